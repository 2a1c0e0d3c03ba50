"""Modes and ranks: Wilson's interval, ties, routes that prove something, real processes."""

import json
import math
import multiprocessing
import os
from collections import Counter
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.serving import KnowingDrafter, plain_tokens, prompt, small_model
from tests.support import raw
from tests.validation.rank_models import PROMPTS, TOKENS, gone, recording, small

from mla_ref.backends import TorchBackend
from mla_ref.bench.speculative_gate import Difference
from mla_ref.engine import first_difference
from mla_ref.models.mtp import MTPModule
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_ranks import DCPSmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import compare
from mla_ref.platform import count_gpus
from mla_ref.speculative import AcceptanceStats, NgramDrafter
from mla_ref.speculative.mtp_drafter import MTPDrafter
from mla_ref.validation import ranks
from mla_ref.validation.modes import EXPECTED, ModesFinding, compare_modes
from mla_ref.validation.modes_acceptance import (
    ORIGINAL,
    Acceptance,
    what_it_says,
    wilson_interval,
)
from mla_ref.validation.modes_texts import Departure, Texts, departures, write_texts
from mla_ref.validation.ranks import RankError, RankJob, RanksFinding, compare_ranks, run_ranks

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2], (1, 2), None),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1], 1),
        ([], [7], 0),
        ([3, 2, 1], [1, 2, 1], 0),
    ],
)
def test_the_first_difference(ours: Any, theirs: Any, place: int | None) -> None:
    assert first_difference(ours, theirs) == place
    assert first_difference(theirs, ours) == place


def test_wilson_against_numbers_from_the_literature() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I: method 3.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson_interval(successes, trials)
        assert found == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert wilson_interval(20, 20)[1] == 1.0
    for bad in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"trials|successes"):
            raw(wilson_interval)(*bad)


def test_the_originals_intervals_hold_each_other() -> None:
    assert [(a.accepted, a.drafted, a.drafts) for a in ORIGINAL] == [
        (66, 93, 31),
        (66, 93, 31),
        (67, 90, 30),
    ]
    assert [round(a.mean_length, 3) for a in ORIGINAL] == [3.129, 3.129, 3.233]
    low = max(a.interval[0] for a in ORIGINAL)
    high = min(a.interval[1] for a in ORIGINAL)
    assert all(low < a.rate < high for a in ORIGINAL)


def test_acceptance_says_what_its_size_allows() -> None:
    stats = AcceptanceStats(Counter({(3, 3): 2, (3, 0): 1, (1, 1): 1}))
    found = Acceptance.of("some", stats)
    assert (found.accepted, found.drafted, found.drafts) == (7, 10, 4)
    assert found.mean_length == 1 + 7 / 4
    low, high = found.interval
    said = what_it_says(found)
    assert f"10 drafted tokens leave {low:.0%} to {high:.0%}" in said
    nothing = Acceptance("none", 0, 0, 0)
    assert "nothing" in what_it_says(nothing)
    assert math.isnan(nothing.rate) and nothing.to_json()["rate"] is None


def drafter() -> KnowingDrafter:
    texts = [[*ids, *plain_tokens("sparse", ids, 16)] for ids in PROMPTS.values()]
    return KnowingDrafter(texts, wrong=0.3)


@cache
def modes() -> ModesFinding:
    return compare_modes(
        small_model("sparse"), drafter(), PROMPTS, tokens=TOKENS, cache_dtype=torch.float64
    )


def test_all_modes_write_the_text_of_plain_decoding_by_their_own_kernels() -> None:
    found = modes()
    assert found.status == "holds" and found.headline.startswith("The same tokens: 16 greedy")
    texts = {name: tuple(plain_tokens("sparse", ids, TOKENS)) for name, ids in PROMPTS.items()}
    assert found.plain.token_ids == texts
    assert tuple(mode.name for mode in found.modes) == tuple(EXPECTED)
    for mode in found.modes:
        assert mode.token_ids == texts
        assert set(mode.routes) == {EXPECTED[mode.name]} and sum(mode.routes.values()) >= 3
        assert mode.acceptance.num_accepted > 0
    assert not found.plain.routes and not found.plain.acceptance.num_drafted
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["status"] == "holds" and len(data["acceptance"]) == 3


def test_modes_that_all_took_one_kernel_prove_nothing() -> None:
    found = modes()
    auto, off, forced = found.modes
    same = replace(found, modes=(auto, replace(off, routes={"decode": 4}), forced))
    assert same.status == "proves nothing"
    assert same.headline.startswith("Proves nothing") and "mode 0 did not go" in same.headline
    mixed = replace(found, modes=(replace(auto, routes={"decode": 3, "extend": 1}), off, forced))
    assert mixed.misrouted == ("auto",)
    undrafted = replace(found, modes=(auto, off, replace(forced, routes={})))
    assert undrafted.misrouted == ("1",)


class ForgetfulPlan:
    """Decode hides from each of several rows all keys but its newest one."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.nbytes, self.extend = plan, plan.nbytes, plan.extend

    def decode(self, q: Any, cache: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if q.shape[0] > 1:
            newest = indices.max(dim=1, keepdim=True).values
            indices = torch.where(indices < newest, -1, indices)
        return self.plan.decode(q, cache, indices, *args, **kwargs)


class ForgetfulBackend(TorchBackend):
    def plan(self, *args: Any, **kwargs: Any) -> Any:
        return ForgetfulPlan(super().plan(*args, **kwargs))


def test_a_kernel_that_misses_earlier_drafts_is_found() -> None:
    model = copy(small_model("sparse"))
    model.backend = ForgetfulBackend()
    found = compare_modes(model, NgramDrafter(3), PROMPTS, tokens=TOKENS, cache_dtype=torch.float64)
    assert found.status == "does not hold" and found.headline.startswith("NOT the same")
    assert {departure.way for departure in found.departures} == {"auto", "1"}
    assert all("NO TIE" in str(departure) for departure in found.departures)


def test_a_tie_is_told_from_a_difference_by_the_noise_of_its_place() -> None:
    difference = Difference(3, 5, 6, top2_gap=1e-3, gap=1e-3)
    by_noise = Departure("auto", "p", difference, noise=4e-4)
    quiet = Departure("auto", "p", difference, noise=1e-6)
    ended = Departure("auto", "p", replace(difference, gap=math.inf), noise=1.0)
    assert by_noise.tie and not quiet.tie and not ended.tie
    assert "a near tie" in str(by_noise) and "NO TIE" in str(quiet)
    found = modes()
    assert replace(found, departures=(by_noise,)).headline.startswith("The same but for ties")
    assert replace(found, departures=(by_noise, quiet)).status == "does not hold"
    assert json.dumps(ended.to_json(), allow_nan=False)


def test_departures_ask_the_model_at_the_place_of_the_difference() -> None:
    model, ids = small_model("sparse"), prompt(2)
    text = tuple(plain_tokens("sparse", ids, 6))
    wrong = (*text[:4], (text[4] + 1) % 60, text[5])
    ours, other = (
        Texts(name, {"p": tokens}, AcceptanceStats(), {}, 1)
        for name, tokens in (("plain", text), ("other", wrong))
    )
    assert departures(model, {"p": ids}, ours, ours) == []
    (found,) = departures(model, {"p": ids}, ours, other)
    assert (found.way, found.prompt, found.difference.place) == ("other", "p", 4)
    assert found.difference.gap > found.limit and 0 <= found.noise < 1e-9


def test_texts_come_back_from_json() -> None:
    found = modes().modes[0]
    again = Texts.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found and again.acceptance.histogram == found.acceptance.histogram


def test_bad_input_is_named() -> None:
    model = small_model("sparse")
    with pytest.raises(ValueError, match="prompts must hold"):
        write_texts("x", model, {}, tokens=3)
    with pytest.raises(ValueError, match="tokens"):
        write_texts("x", model, PROMPTS, tokens=0)
    with pytest.raises(ValueError, match="num_drafts"):
        compare_modes(model, drafter(), PROMPTS, num_drafts=0)
    with pytest.raises(ValueError, match="worlds must hold"):
        RankJob(small, PROMPTS, (), TOKENS, 3)
    with pytest.raises(ValueError, match="worlds"):
        RankJob(small, PROMPTS, (0,), TOKENS, 3)
    with pytest.raises(ValueError, match="device"):
        job(device="cuda:1")
    with pytest.raises(ValueError, match="not initialised"):
        DCPSmolLM2(model, rank=0, world=2)
    with pytest.raises(TypeError, match="sparse must be"):
        raw(DCPSmolLM2)(model.dense, rank=0, world=1)


def test_one_rank_of_one_is_the_sparse_model() -> None:
    model, ngram = small()
    one, rank = (
        write_texts(
            "one",
            way,
            PROMPTS,
            tokens=TOKENS,
            drafter=ngram,
            num_drafts=3,
            cache_dtype=torch.float64,
            page_size=16,
        )
        for way in (model, DCPSmolLM2(model, rank=0, world=1))
    )
    assert rank == one


def test_a_block_that_cannot_be_dealt_out_is_refused() -> None:
    model = DCPSmolLM2(small()[0], rank=0, world=1)
    model.world = 3
    with pytest.raises(ValueError, match="multiple of the 3 ranks"):
        model.new_cache(4, 16)


def job(prepare: Any = small, **changed: Any) -> RankJob:
    return replace(
        RankJob(prepare, PROMPTS, (1, 2), TOKENS, 3, torch.float64, page_size=16), **changed
    )


@pytest.mark.usefixtures("plain_calls")
def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    found = compare_ranks(job(partial(recording, str(tmp_path))))
    assert found.status == "holds" and not found.departures and not found.at_odds
    assert set(found.worlds) == {1, 2}
    for texts in found.worlds.values():
        assert texts.token_ids == found.one_process.token_ids
        assert set(texts.routes) == {"decode"}
        assert texts.acceptance == found.one_process.acceptance
    assert [a.name for a in found.acceptance] == ["one process", "DCP 1", "DCP 2"]
    # Equal tokens would hide a small error, such as one index key that nobody has looked at.
    alone, first, second = (
        torch.load(tmp_path / name, weights_only=True) for name in ("alone", "rank 0", "rank 1")
    )
    assert torch.equal(first[-len(second) :], second), "ranks of one group have other bits"
    for of_world in (first[: len(alone)], second):
        assert compare(of_world, alone).agrees(rel_l2=1e-12)
    assert json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.usefixtures("plain_calls")
def test_a_process_that_dies_is_an_error_and_leaves_nobody_behind() -> None:
    with pytest.raises(RankError, match=r"rank \d+ failed"):
        run_ranks(job(gone, worlds=(2,)))
    assert not multiprocessing.active_children()


def test_ranks_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small()
    alone = write_texts(
        "one", model, PROMPTS, tokens=TOKENS, cache_dtype=torch.float64, page_size=16
    )
    name = next(iter(PROMPTS))
    wrong = [(token + 1) % 60 for token in alone.token_ids[name]]
    other = replace(alone, name="DCP 2", token_ids={**alone.token_ids, name: tuple(wrong)})
    ways = {1: [alone], 2: [other, alone]}
    monkeypatch.setattr(ranks, "run_ranks", lambda job, timeout: ways)
    found = compare_ranks(job())
    assert found.at_odds == (2,) and found.status == "does not hold"
    assert "Ranks of one group differ at [2]" in found.headline
    (departure,) = found.departures
    assert not departure.tie and departure.way == "DCP 2"
    assert replace(found, departures=()).status == "does not hold"
    lone: RanksFinding = replace(found, at_odds=())
    assert lone.status == "does not hold" and "no tie explains: 1" in lone.headline


def test_one_rank_shares_no_cache_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one GPU; but a text that is wrong on one rank is wrong."""
    model, _ = small()
    alone = write_texts(
        "one", model, PROMPTS, tokens=TOKENS, cache_dtype=torch.float64, page_size=16
    )
    monkeypatch.setattr(ranks, "run_ranks", lambda job, timeout: {1: [alone]})
    found = compare_ranks(job(worlds=(1,)))
    assert found.status == found.to_json()["status"] == "proves nothing"
    assert found.headline.startswith("Proves nothing: 16 greedy tokens on 1 ranks (DCP) against")
    assert "No cache was shared" in found.headline
    difference = Difference(3, 5, 6, top2_gap=1e-3, gap=1e-3)
    tie = Departure("DCP 1", "p", difference, noise=4e-4)
    assert replace(found, departures=(tie,)).headline.startswith("Proves nothing: ")
    wrong = replace(found, departures=(replace(tie, noise=1e-6),))
    assert wrong.status == "does not hold" and wrong.headline.startswith("NOT the same: ")
    assert replace(found, worlds={1: alone, 2: alone}).status == "holds"


def test_ranks_are_ended_when_their_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Stuck:
        def is_alive(self) -> bool:
            return True

        def kill(self) -> None:
            asked.append("kill")

        def join(self) -> None:
            asked.append("join")

    class Never:
        processes = (Stuck(),)

        def join(self, timeout: float) -> bool:
            return False

    monkeypatch.setattr(ranks, "start_processes", lambda *args, **kwargs: Never())
    with pytest.raises(RankError, match="not done after 0 s"):
        run_ranks(job(), timeout=0.0)
    assert asked == ["kill", "join"]


def test_the_processes_leave_this_environment_alone() -> None:
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)


@pytest.mark.skipif(count_gpus() > 1, reason="with two GPUs each rank has its own")
def test_ranks_without_a_gpu_each_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ValueError, match="cuda:1"):
        run_ranks(job(device="cuda"))


@pytest.mark.model
def test_the_real_model_writes_the_same_by_every_mode() -> None:
    dense = SmolLM2.from_gguf(attention="gqa")
    model = SparseSmolLM2.trained(dense, topk=8, cache_format="fp32")
    mtp = MTPDrafter(MTPModule.trained(dense), 3)
    text = Tokenizer.from_gguf().encode(passage())
    found = compare_modes(model, mtp, {"emma": text[:16]}, tokens=6)
    assert found.status == "holds", found.headline
    assert not found.misrouted and not found.departures
    assert all(acceptance.drafted > 0 for acceptance in found.acceptance)

"""The bench of speculative decoding: same tokens or no time, sums by hand, modest sentences."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.serving import VOCAB, KnowingDrafter, plain_tokens, prompt, small_model
from tests.support import raw
from torch import Tensor

from mla_ref.bench import (
    Difference,
    Gain,
    GateError,
    Run,
    SameTokens,
    SpeculativeRow,
    compare_tokens,
    in_a_sentence,
    measure_speculative,
    plot_speculative,
)
from mla_ref.bench.speculative_run import PLAIN
from mla_ref.engine import PARTS, StepRecord, runner
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.speculative import AcceptanceStats, Draft, DraftRequest, NewTokens

pytestmark = pytest.mark.thorough

TOKENS = 6
PROMPTS = {"eight": prompt(3), "two": prompt(4)}


@dataclass
class Ticks:
    """A clock on which every run takes as long as the list says."""

    seconds: Sequence[float]
    name: str = "ticks"
    runs: int = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, float]:
        self.runs += 1
        return run(), self.seconds[(self.runs - 1) % len(self.seconds)]


@dataclass
class OffByOne:
    """Proposes tokens that nobody would choose, or anything else."""

    name: str = "off by one"
    calls: list[int] = field(default_factory=list)

    def new_cache(self, num_pages: int, page_size: int) -> None:
        return None

    def propose(
        self,
        requests: Sequence[DraftRequest],
        hidden: Tensor,
        block_table: Tensor,
        page_size: int,
        cache: Any,
    ) -> list[Draft]:
        return [Draft([(r.token_ids[-1] + 1) % VOCAB] * r.num_drafts) for r in requests]


def knowing(**kwargs: Any) -> KnowingDrafter:
    texts = [(*ids, *plain_tokens("gqa", ids, TOKENS)) for ids in PROMPTS.values()]
    return KnowingDrafter(texts, **kwargs)


def measure(*drafters: Any, **kwargs: Any) -> list[SpeculativeRow]:
    prompts = kwargs.pop("prompts", {"eight": PROMPTS["eight"]})
    arguments = {"tokens": TOKENS, "repeats": 1} | kwargs
    return list(measure_speculative(small_model("gqa"), prompts, drafters, **arguments))


@pytest.fixture(scope="module")
def rows() -> list[SpeculativeRow]:
    return measure(knowing(), prompts=PROMPTS)


# ---- what is run


def test_right_drafts_save_steps_and_change_no_token(rows: list[SpeculativeRow]) -> None:
    assert [(row.name, row.prompt_tokens) for row in rows] == [("eight", 8), ("two", 2)]
    for row, ids in zip(rows, PROMPTS.values(), strict=True):
        assert row.drafters == ("knowing",) and row.differences == {}
        for way in (PLAIN, "knowing"):
            assert list(row.first(way).token_ids) == plain_tokens("gqa", ids, TOKENS)
            assert len(row.first(way).prompt_steps) == 1
        # 5 tokens after the first: one a step; or 1 + 3, and the last one alone.
        assert len(row.first(PLAIN).decode_steps) == 5
        assert len(row.first("knowing").decode_steps) == 2
        assert row.first("knowing").acceptance.histogram == (0, 0, 0, 1)
        assert row.tokens("knowing") == 6 and row.tokens("knowing", decode=True) == 5
    gain = Gain.of(rows, "knowing")
    assert gain.steps_saved == 6 and gain.acceptance.acceptance_rate == 1
    assert gain.interval is None and gain.finding == "none"


def test_wrong_drafts_save_nothing_and_change_no_token() -> None:
    rows = measure(OffByOne(), num_drafts=2)
    gain = Gain.of(rows, "off by one")
    assert gain.steps_saved == 0 and gain.acceptance.num_accepted == 0
    assert gain.acceptance.num_drafts > 0


def test_the_ways_take_turns_and_medians_are_taken() -> None:
    """Plain runs in 4, 9 and 6 seconds, the other in 2: three pairs; then pairs of 4 and 2."""
    seen: list[str] = []
    # Two runs to warm up; then eight: plain first, last, first; two: last, first, last.
    clock = Ticks([1.0, 1.0, 4.0, 2.0, 2.0, 9.0, 6.0, 2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 4.0])
    rows = measure(
        knowing(),
        prompts=PROMPTS,
        tokens=2,
        repeats=3,
        clock=clock,
        on_run=lambda name, way: seen.append(f"{name} {way}"),
    )
    assert clock.runs == 14
    eight = [PLAIN, "knowing", "knowing", PLAIN, PLAIN, "knowing"]
    assert seen[:6] == [f"eight {way}" for way in eight]
    two = ["knowing", PLAIN, PLAIN, "knowing", "knowing", PLAIN]
    assert seen[6:] == [f"two {way}" for way in two]
    assert rows[0].seconds(PLAIN) == 6 and rows[0].seconds("knowing") == 2
    assert rows[0].speed_up("knowing") == 3 and rows[1].speed_up("knowing") == 2
    assert rows[0].rate(PLAIN) == 2 / 6
    gain = Gain.of(rows, "knowing")
    assert gain.speed_up == pytest.approx(10 / 4) and gain.median_speed_up == 2.5
    # The steps of the prompt are taken off, and nothing else.
    for run in rows[0].runs[PLAIN]:
        assert run.decode_seconds == run.seconds - run.prompt_steps[0].total_seconds


def test_a_text_of_one_token_has_no_decode_to_compare() -> None:
    rows = measure(OffByOne(), tokens=1)
    assert rows[0].speed_up("off by one", decode=True) is None
    assert rows[0].rate(PLAIN, decode=True) == 0
    gain = Gain.of(rows, "off by one")
    assert gain.decode_speed_up is None
    assert "without the prompt" not in in_a_sentence(gain)
    json.dumps(gain.to_json(), allow_nan=False)


def test_an_end_token_ends_all_ways() -> None:
    ids = PROMPTS["eight"]
    tokens = plain_tokens("gqa", ids, TOKENS)
    end = next(t for place, t in enumerate(tokens) if place > 1 and t not in tokens[:place])
    row = measure(knowing(), eos_id=end, num_drafts=2)[0]
    expected = tokens[: tokens.index(end) + 1]
    assert [list(row.first(way).token_ids) for way in row.runs] == [expected, expected]


# ---- the gate


def test_a_verifier_that_accepts_everything_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = runner.verify

    def accepts_all(
        logits: Tensor, drafts: Any, params: Any, positions: Any, **more: Any
    ) -> NewTokens:
        found = right(logits, drafts, params, positions, **more)
        texts = [[*d, t[-1]] for d, t in zip(drafts, found.token_ids, strict=True)]
        return NewTokens(texts, [len(d) for d in drafts])

    monkeypatch.setattr(runner, "verify", accepts_all)
    with pytest.raises(GateError, match="off by one, prompt 'eight': no time is reported") as info:
        measure(OffByOne())
    (verdict,) = info.value.verdicts
    assert isinstance(verdict, Difference) and not verdict.passed
    assert verdict.place == 1 and verdict.gap > 1e-3
    assert "token 1 is" in str(info.value)


def test_a_way_that_changes_between_repeats_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = runner.verify, iter(range(10**6))

    def forgets(*args: Any, **more: Any) -> NewTokens:
        found = right(*args, **more)
        late = next(calls) > 26
        return NewTokens([[(i + late) % VOCAB for i in t] for t in found[0]], found[1])

    monkeypatch.setattr(runner, "verify", forgets)
    with pytest.raises(GateError, match=r"of a repeat is wrong: its tokens are not those of the"):
        measure(OffByOne(), repeats=2)


def with_logits(*best: float) -> SmolLM2:
    """A model that always says: token 0 has the first of these logits, token 1 the next, ..."""
    model = SmolLM2.random(attention="gqa")
    row = torch.full((1, model.config.vocab_size), -1.0)
    row[0, : len(best)] = torch.tensor(best)
    model.logits = lambda hidden: row  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("best", "other", "gap", "passed"),
    [
        ((1.0, 0.99995), 1, 5e-5, True),
        ((1.0, 0.9998), 1, 2e-4, False),
        ((0.99995, 1.0), 1, 5e-5, True),  # whichever of the two plain decoding took
        ((1.0, 0.99995, 0.5), 2, 0.5, False),  # a tie, but not of the token that was taken
    ],
)
def test_a_difference_passes_only_as_a_tie(
    best: tuple[float, ...], other: int, gap: float, passed: bool
) -> None:
    found = compare_tokens(with_logits(*best), [5, 6], [7, 8, 0, 3], [7, 8, other, 4])
    assert isinstance(found, Difference)
    assert (found.place, found.plain_id, found.other_id) == (2, 0, other)
    assert found.gap == pytest.approx(gap, rel=2e-3) and found.passed is passed
    assert found.top2_gap == pytest.approx(min(gap, abs(best[0] - best[1])), rel=2e-3)
    assert f"{found.gap:.1e} apart" in str(found)


def test_a_gap_is_that_of_plain_decoding_at_the_place() -> None:
    """After the prompt and the tokens that are the same, in one pass."""
    model, ids = small_model("gqa"), PROMPTS["eight"]
    plain = plain_tokens("gqa", ids, 6)
    other = [*plain[:4], (plain[4] + 1) % VOCAB, plain[5]]
    found = compare_tokens(model, ids, plain, other)
    assert isinstance(found, Difference) and found.place == 4
    again = compare_tokens(model, (*ids, *plain[:4]), plain[4:], other[4:])
    assert isinstance(again, Difference) and again.place == 0
    assert found.gap == again.gap > 0


def test_a_text_that_ends_too_early_is_no_tie() -> None:
    found = compare_tokens(with_logits(1.0, 1.0), [5], [7, 8, 9], [7, 8])
    assert isinstance(found, Difference)
    assert (found.plain_id, found.other_id, found.gap) == (9, None, math.inf)
    assert not found.passed and "is the end and not 9" in str(found)
    assert found.to_json()["gap"] is None


def test_equal_tokens_are_no_difference() -> None:
    found = compare_tokens(with_logits(1.0), [5], (7, 8), [7, 8])
    assert found == SameTokens(2) and found.passed and "all 2 tokens" in str(found)


def test_a_tie_is_timed_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_ref.bench import speculative

    tie = Difference(3, 1, 2, 1e-6, 1e-6)

    def compare(model: Any, ids: Any, plain: Any, other: Any) -> Any:
        return SameTokens(1) if plain is other else tie

    monkeypatch.setattr(speculative, "compare_tokens", compare)
    row = measure(OffByOne())[0]
    assert row.differences == {"off by one": tie}
    assert row.to_json()["differences"]["off by one"]["gap"] == 1e-6


# ---- sums and sentences


def a_run(seconds: float, steps: int, tokens: int, accepted: Sequence[int] = ()) -> Run:
    """A prompt of 0.25 s, then `steps` steps that share the rest, half of it in forward."""
    part = dict.fromkeys(PARTS, (seconds - 0.25) / steps / 8) | {
        "forward": (seconds - 0.25) / steps / 2
    }
    prompt_part = dict.fromkeys(PARTS, 0.0) | {"forward": 0.25}
    record = StepRecord(1, 4, 4, 0, 3, 0, 1, None, None, (), part)
    first = replace(record, num_prefill_tokens=9, seconds=prompt_part)
    stats = AcceptanceStats()
    for count in accepted:
        stats.add(3, count)
    return Run(tuple(range(tokens)), seconds, (first, *[record] * steps), stats)


def a_row(plain_s: float, other_s: float) -> SpeculativeRow:
    runs = {PLAIN: (a_run(plain_s, 8, 9),), "mtp": (a_run(other_s, 4, 9, [1, 1, 0, 2]),)}
    return SpeculativeRow("p", 9, runs, {})


def test_sums_by_hand() -> None:
    gain = Gain.of([a_row(4.25, 2.25), a_row(8.25, 8.25)], "mtp")
    assert gain.plain.tokens == 18 and gain.plain.decode_tokens == 16
    assert gain.plain.seconds == 12.5 and gain.plain.decode_seconds == 12
    assert gain.speculative.seconds == 10.5 and gain.speculative.decode_seconds == 10
    assert gain.speed_up == pytest.approx(12.5 / 10.5)
    assert gain.decode_speed_up == pytest.approx(1.2)
    assert gain.median_speed_up == pytest.approx((4.25 / 2.25 + 1) / 2)
    assert (gain.plain.decode_steps, gain.speculative.decode_steps, gain.steps_saved) == (16, 8, 8)
    assert gain.plain.parts["forward"] == 6 and gain.plain.parts["logits"] == 1.5
    assert gain.plain.per_step("forward") == 6 / 16
    assert gain.speculative.per_step("forward") == 5 / 8
    assert gain.speculative.per_token("forward") == 5 / 16
    assert gain.acceptance.mean_acceptance_length == 2
    assert gain.acceptance.per_position_rates == (0.75, 0.25, 0)
    read = json.loads(json.dumps(gain.to_json(), allow_nan=False))
    assert read["acceptance_by_position"] == [0.75, 0.25, 0]
    assert read["plain"]["ms_per_decode_step"]["forward"] == 375


def test_parts_are_medians_over_the_runs() -> None:
    runs = {PLAIN: tuple(a_run(s, 8, 9) for s in (4.25, 100.25, 8.25)), "mtp": (a_run(1.0, 4, 9),)}
    assert SpeculativeRow("p", 9, runs, {}).parts(PLAIN)["forward"] == 4


def test_the_interval_is_of_prompts_and_the_same_every_time() -> None:
    same = Gain.of([a_row(4.0, 2.0)] * 5, "mtp")
    assert same.interval == (2, 2) and same.finding == "faster"
    assert Gain.of([a_row(2.0, 4.0)] * 5, "mtp").finding == "slower"
    assert Gain.of([a_row(4.0, 2.0)] * 4, "mtp").interval is None
    mixed = [a_row(4.0, s) for s in (2.0, 3.0, 4.0, 5.0, 6.0)]
    gain = Gain.of(mixed, "mtp")
    assert gain.interval == Gain.of(mixed, "mtp").interval
    assert gain.interval is not None
    low, high = gain.interval
    assert 4 / 6 < low < 1 < high < 2 and gain.finding == "none"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([a_row(4.0, 2.0)] * 5, "mtp is faster here: 2.00 times"),
        ([a_row(2.0, 4.0)] * 5, "mtp is slower here: 0.50 times"),
        (
            [a_row(4.0, s) for s in (2.0, 3.0, 4.0, 5.0, 6.0)],
            "mtp: no gain or loss that these prompts",
        ),
        ([a_row(4.0, 2.0)], "One prompt is too few to say how sure that is."),
        ([a_row(4.0, 2.0)] * 4, "4 prompts are too few"),
    ],
)
def test_a_sentence_says_what_was_found(rows: list[SpeculativeRow], says: str) -> None:
    sentence = in_a_sentence(Gain.of(rows, "mtp"))
    assert says in sentence
    assert f"It saved {4 * len(rows)} of {8 * len(rows)} steps." in sentence


def test_the_figure_has_a_bar_a_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speculative.svg"
    plot_speculative([Gain.of([a_row(4.0, 2.0)], "mtp")], path, title="here")
    assert path.read_text(encoding="utf-8").startswith("<?xml")
    with pytest.raises(ValueError, match="gains must hold"):
        plot_speculative([], path)


def test_a_row_is_json(rows: list[SpeculativeRow]) -> None:
    read = json.loads(json.dumps(rows[0].to_json(), allow_nan=False))
    assert read["ways"]["knowing"]["new_tokens"] == TOKENS
    assert read["ways"][PLAIN]["speed_up"] is None
    assert set(read["ways"]["knowing"]["runs"][0]["decode_seconds_by_part"]) == set(PARTS)


# ---- bad input


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"num_drafts": 0}, "num_drafts must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"prompts": {}}, "prompts must hold"),
        ({"prompts": {"none": ()}}, "prompt 'none' must have 1 to 58 tokens"),
        ({"prompts": {"long": (1,) * 59}}, "prompt 'long' must have 1 to 58 tokens"),
        ({"drafters": []}, "drafters must have a name each"),
        ({"drafters": [OffByOne(), OffByOne()]}, "drafters must have a name each"),
        ({"drafters": [OffByOne("plain")]}, "and not 'plain'"),
    ],
)
def test_bad_input_is_refused_by_the_call(changed: dict[str, Any], says: str) -> None:
    arguments = {"prompts": PROMPTS, "drafters": [OffByOne()], "tokens": TOKENS} | changed
    with pytest.raises(ValueError, match=says):
        raw(measure_speculative)(small_model("gqa"), **arguments)


def test_a_gain_is_of_a_drafter_that_took_part() -> None:
    with pytest.raises(ValueError, match="rows must hold"):
        Gain.of([], "mtp")
    with pytest.raises(ValueError, match="drafter must be one of mtp"):
        Gain.of([a_row(4.0, 2.0)], "ngram")

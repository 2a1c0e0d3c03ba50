"""The bench of sparse decode: who is measured where, and the gate in front of each time."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import raw

from mla_ref.bench import (
    GateError,
    SparseRow,
    Timing,
    measure_sparse,
    plot_sparse,
    ratios,
    sparse,
    sparse_step,
)
from mla_ref.bench.sparse_peer import PeerStep
from mla_ref.bench.sparse_step import DecodeStep, Layer, StepResult
from mla_ref.layers import default_softmax_scale, preset

pytestmark = pytest.mark.thorough

# 656-byte rows fix the latent, the rotary key and the index key; all else is small.
V32 = preset("v3.2")
CONFIG = replace(
    V32,
    name="tiny",
    hidden_size=48,
    num_layers=1,
    num_heads=3,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    v_head_dim=20,
    softmax_scale=default_softmax_scale(16, 64, V32.rope.yarn),
    indexer=replace(V32.indexer, num_heads=8, full_layers=(0,), topk=8),
)
FAST: dict[str, Any] = {"warmup": 0, "repeats": 1}


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer.random(CONFIG)


@pytest.fixture(scope="module")
def rows() -> list[SparseRow]:
    return list(measure_sparse(CONFIG, [8, 70], peer_length=0, **FAST))


def test_dense_and_both_sparse_at_every_length(rows: list[SparseRow]) -> None:
    assert [(row.length, row.name) for row in rows] == [
        (length, name) for length in (8, 70) for name in ("dense", "sparse float32", "sparse FP8")
    ]
    assert all(verdict.passed for row in rows for verdict in row.timing.verdicts)


def test_a_sparse_result_is_checked_by_its_choice_too(rows: list[SparseRow]) -> None:
    compared = {row.name: [verdict.what for verdict in row.timing.verdicts] for row in rows}
    assert compared["dense"] == ["out"]
    for name in ("sparse float32", "sparse FP8"):
        assert compared[name] == ["out", "scores of the chosen keys"]


# ---- the peer


@pytest.mark.peers
@pytest.mark.usefixtures("plain_calls")
def test_the_peer_runs_up_to_its_length() -> None:
    pytest.importorskip("transformers")
    measured = measure_sparse(CONFIG, [8, 70, 130], peer_length=70, **FAST)
    assert [row.length for row in measured if row.name == "peer"] == [8, 70]


@pytest.mark.peers
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("length", [8, 9, 65, 200])
@torch.inference_mode()
def test_the_peer_gives_our_output_and_our_choice(layer: Layer, length: int) -> None:
    pytest.importorskip("transformers")
    problem = DecodeStep.random(layer, length)
    peer = PeerStep(problem)
    for _ in range(2):  # the second time its cache must be as at first
        peer.fill()
        result = peer()
    ours = problem.sparse("bf16")()
    assert torch.allclose(result.out, ours.out, rtol=0, atol=1e-4)
    visible = torch.arange(length) <= problem.step.positions[:, None]
    chosen = [
        [set(row[seen[row.long()]].tolist()) for row, seen in zip(lists, visible, strict=True)]
        for lists in (result.positions, ours.positions)
    ]
    theirs, mine = chosen
    assert theirs == [row - {-1} for row in mine]


@pytest.mark.peers
def test_a_peer_of_another_layer_gets_no_time(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    fill = PeerStep.fill

    def late(self: PeerStep) -> None:
        fill(self)
        self._cache.layers[0].keys[..., -1, :] += 1.0

    monkeypatch.setattr(PeerStep, "fill", late)
    with pytest.raises(GateError, match=r"peer: .*at 8 tokens, held against dense.*out"):
        raw(sparse.hold_against_each_other)(layer, peer=True)


# ---- the gate


def _changed(name: str, change: Callable[[StepResult], StepResult]) -> Any:
    """A method of `DecodeStep` whose runs give a changed result."""
    method = getattr(DecodeStep, name)

    def make(self: DecodeStep, *args: Any) -> Callable[[], StepResult]:
        run = method(self, *args)
        return lambda: change(run())

    return make


def _wrong_out(result: StepResult) -> StepResult:
    out = result.out.clone()
    out[-1, -1] += 1e-2
    return result._replace(out=out)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_wrong_output_is_found_before_anything_is_timed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeStep, name, _changed(name, _wrong_out))
    monkeypatch.setattr(sparse, "measure", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(GateError, match=r"sparse float32: .*at 8 tokens, held against dense"):
        next(measure_sparse(CONFIG, [70], peer_length=0, **FAST))


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_an_output_that_is_wrong_only_at_the_timed_length_gets_no_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "hold_against_each_other", lambda *a, **k: None)
    monkeypatch.setattr(DecodeStep, name, _changed(name, _wrong_out))
    with pytest.raises(GateError, match=rf"{name}.*, 70 tokens: .*before the timed runs.*out"):
        list(measure_sparse(CONFIG, [70], peer_length=0, **FAST))


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
@torch.inference_mode()
def test_the_choice_is_judged_by_its_scores(layer: Layer, cache_format: str) -> None:
    """The output alone cannot tell: it is right for whatever was chosen."""
    problem = DecodeStep.random(layer, 70)
    run, check = problem.sparse(cache_format), problem.check(cache_format)
    result = run()
    assert all(verdict.passed for verdict in check(result))
    positions = result.positions
    assert positions is not None

    def judged(changed: torch.Tensor) -> list[bool]:
        right = problem._expected(changed, cache_format)
        return [verdict.passed for verdict in check(StepResult(right, changed))]

    assert judged(positions.flip(1)) == [True, True]  # the order does not matter
    everyone = set(range(60))
    for wrong in (
        min(everyone - set(positions[0].tolist())),  # a key that is not among the best
        int(positions[0, 0]),  # a key that is listed twice
        69,  # a key that the first row may not see
        -1,  # none at all
    ):
        changed = positions.clone()
        changed[0, -1] = wrong
        assert judged(changed) == [True, False], wrong


@torch.inference_mode()
def test_a_key_listed_twice_is_found_where_all_scores_are_equal(layer: Layer) -> None:
    made = DecodeStep.random(layer, 70)
    problem = replace(made, keys=torch.zeros_like(made.keys))
    for positions, passes in ((torch.arange(8), True), (torch.arange(8) // 2, False)):
        lists = positions.expand(4, 8)
        result = StepResult(problem._expected(lists, "bf16"), lists)
        assert [v.passed for v in problem.check("bf16")(result)] == [True, passes]


@torch.inference_mode()
def test_fp8_is_checked_against_fp8(layer: Layer) -> None:
    """Limits that would let the FP8 error itself through would let much else through."""
    problem = DecodeStep.random(layer, 70)
    for made, read in (("fp8", "bf16"), ("bf16", "fp8")):
        verdicts = problem.check(read)(problem.sparse(made)())
        assert not verdicts[0].passed


def test_the_same_length_is_the_same_problem(layer: Layer) -> None:
    one, two = (DecodeStep.random(layer, 12) for _ in range(2))
    assert torch.equal(one.x, two.x) and torch.equal(one.rows, two.rows)
    assert not torch.equal(one.x, DecodeStep.random(layer, 13).x)


@torch.inference_mode()
def test_a_step_twice_gives_the_same_bits(layer: Layer) -> None:
    problem = DecodeStep.random(layer, 70)
    for run in (problem.dense(), problem.sparse("bf16"), problem.sparse("fp8")):
        assert torch.equal(run().out, run().out)


# ---- input, data and figure


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"lengths": []}, ValueError, "lengths"),
        ({"lengths": [64, 3]}, ValueError, "lengths must be at least 4"),
        ({"lengths": [64.0]}, TypeError, "lengths"),
        ({"peer_length": -1}, ValueError, "peer_length"),
        ({"repeats": 0}, ValueError, "repeats"),
        ({"warmup": -1}, ValueError, "warmup"),
        ({"config": replace(CONFIG, indexer=None)}, ValueError, "indexer"),
        ({"config": replace(CONFIG, indexer=replace(CONFIG.indexer, topk=3))}, ValueError, "topk"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    arguments = {"config": CONFIG, "lengths": [64], **FAST, **change}
    with pytest.raises(error, match=says):
        measure_sparse(**arguments)  # no row was asked for


def _row(name: str, length: int, *samples: float) -> SparseRow:
    return SparseRow(name, length, Timing(name, "wall clock", 0, samples, ()))


def test_ratios_are_of_medians() -> None:
    made = [
        _row("peer", 100, 50.0, 60.0, 900.0),
        _row("dense", 100, 6.0),
        _row("sparse float32", 100, 2.0),
        _row("sparse FP8", 100, 3.0),
        _row("dense", 400, 24.0),
        _row("sparse float32", 400, 3.0),
        _row("sparse FP8", 400, 4.0),
    ]
    assert {ratio.what: ratio.value for ratio in ratios(made)} == {
        "peer / sparse float32 at 100": 30.0,
        "peer / sparse FP8 at 100": 20.0,
        "dense / sparse float32 at 100": 3.0,
        "dense / sparse FP8 at 100": 2.0,
        "dense / sparse float32 at 400": 8.0,
        "dense / sparse FP8 at 400": 6.0,
        "dense 400 / 100": 4.0,
        "sparse float32 400 / 100": 1.5,
        "sparse FP8 400 / 100": pytest.approx(4 / 3),
    }
    assert all("/" in ratio.what and " at " in ratio.what for ratio in ratios(made[:4]))


def test_rows_and_ratios_are_strict_json(rows: list[SparseRow]) -> None:
    report = {
        "rows": [row.to_json() for row in rows],
        "ratios": [ratio.to_json() for ratio in ratios(rows)],
    }
    read = json.loads(json.dumps(report, allow_nan=False))
    assert [row["timing"]["samples_s"] for row in read["rows"]] == [
        list(row.timing.samples_s) for row in rows
    ]
    assert all(math.isfinite(ratio["value"]) for ratio in read["ratios"])


def test_the_figure_has_a_line_for_each_contender(rows: list[SparseRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sparse.svg"
    plot_sparse([*rows, _row("peer", 8, 0.1)], path, title="one machine")
    assert path.read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="two lengths"):
        plot_sparse([row for row in rows if row.length == 8], path)


def test_only_one_problem_is_made_for_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    made, random = [], DecodeStep.random.__func__

    def counted(cls: type, layer: Layer, length: int) -> DecodeStep:
        made.append(length)
        return random(cls, layer, length)

    monkeypatch.setattr(sparse_step.DecodeStep, "random", classmethod(counted))
    list(measure_sparse(CONFIG, [20, 30], peer_length=0, **FAST))
    assert made == [8, 20, 30]

"""The bench of routing: equal rows both ways, what is counted, and sentences that do not boast."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import assert_agrees, raw

from mla_ref.batching import plan_scratch
from mla_ref.bench import (
    GateError,
    Launch,
    RoutingRow,
    TimeComparison,
    Timing,
    measure_routing,
    routing_step,
    what_is_counted,
    what_was_lost,
)
from mla_ref.bench.routing_step import MixedBatch, RoutedStep
from mla_ref.numerics import AttentionResult

pytestmark = pytest.mark.thorough

SIZES: dict[str, Any] = {"heads": 2, "topk": 80, "context": 90, "multiprocessors": 188}
FAST: dict[str, Any] = SIZES | {"num_verifiers": 3, "warmup": 0, "repeats": 1}


@pytest.fixture(scope="module")
def batch() -> MixedBatch:
    return MixedBatch.random(3, 5, **SIZES)


@pytest.fixture(scope="module")
def rows() -> list[RoutingRow]:
    return list(measure_routing([5, 30], **FAST))


# ---- the batch


def test_the_chunk_sends_all_to_extend_and_only_itself_when_each_is_asked(
    batch: MixedBatch,
) -> None:
    together, alone = batch.batch_wide, batch.alone
    assert together.step.query_lens == (4, 5, 4, 4)
    assert (together.way.kind, together.way.reason, together.way.blame) == (
        "extend",
        "prefill-in-batch",
        1,
    )
    assert sorted(alone.step.query_lens[:3]) == [4, 4, 4] and alone.step.query_lens[3] == 5
    assert [s[:2] + s[4:] for s in alone.way.segments] == [(0, 12, "decode"), (12, 17, "extend")]


def test_a_chunk_as_short_as_a_verifier_is_still_a_chunk() -> None:
    alone = MixedBatch.random(2, 4, **SIZES).alone
    assert [s[:2] + s[4:] for s in alone.way.segments] == [(0, 8, "decode"), (8, 12, "extend")]


def test_both_ways_give_the_rows_of_rung_9(batch: MixedBatch) -> None:
    together, alone, expected = batch.batch_wide(), batch.alone(), batch.batch_wide.expected()
    assert_agrees(together, expected, rel_l2=1e-6)
    assert sorted(batch.rows.tolist()) == list(range(17)) != batch.rows.tolist()
    same = AttentionResult(expected.out[batch.rows], expected.lse[batch.rows])
    assert_agrees(alone, same, rel_l2=1e-6)


def test_every_row_attends_to_as_many_keys_as_it_may(batch: MixedBatch) -> None:
    routed = batch.alone
    visible = routed.step.visible_lens.clamp(max=SIZES["topk"])
    assert torch.equal((routed.indices >= 0).sum(1), visible)
    assert all(len(set(r.tolist()) - {-1}) == 80 for r in routed.indices)


# ---- what is counted


def test_launches_are_counted_by_hand(rows: list[RoutingRow]) -> None:
    """A plan for 16 rows of decode on 188 multiprocessors: 12 splits, and 80 keys make 2."""
    assert [row.chunk for row in rows] == [5, 30]
    assert rows[0].batch_wide == (Launch("extend", 17, 17, 1, 80, 1),)
    assert rows[0].alone == (Launch("decode", 12, 24, 2, 40, 1), Launch("extend", 5, 5, 1, 80, 1))
    assert rows[1].batch_wide == (Launch("extend", 42, 42, 1, 80, 1),)


def test_the_splits_that_are_counted_are_those_that_run(batch: MixedBatch) -> None:
    decode, _ = batch.alone.costs(188)
    assert decode.num_splits == batch.alone.plan.decode.num_splits == 2
    few = next(iter(measure_routing([1], **(FAST | {"multiprocessors": 5}))))
    assert few.alone[0].num_splits == 1
    assert few.batch_wide[0].waves == 3  # 13 blocks on 5


def test_the_count_in_words(rows: list[RoutingRow]) -> None:
    assert what_is_counted(rows[1]) == (
        "Counted for 188 SMs: the 12 verifier rows are 12 blocks of 80 keys in extend, and 24 of "
        "40 in decode, which is a launch of its own and a merge."
    )


# ---- what is said of the times


def timed(*pairs: tuple[float, float]) -> RoutingRow:
    a, b = (
        Timing(name, "wall clock", 0, samples, ())
        for name, samples in zip(("batch-wide", "by itself"), zip(*pairs, strict=True), strict=True)
    )
    return RoutingRow(3, 5, "prefill-in-batch", TimeComparison(a, b), (), ())


@pytest.mark.parametrize(
    ("pairs", "finding", "says"),
    [
        ([(2.0, 1.0)] * 5, "lost", "lost 50% of the step here; it took 2.00 to 2.00 times"),
        ([(1.0, 2.0)] * 5, "reversed", "lost nothing here, it was 50% faster; it took 0.50 to"),
        # One pair that says otherwise: nothing is claimed. Too few of them: that is said.
        ([(2.0, 1.0)] * 5 + [(1.0, 1.1)], "none", "lost nothing that shows here; it took 0.91 to"),
        (
            [(2.0, 1.0)] * 4,
            "too few",
            "ran in 4 pairs of runs, too few to tell what it lost (5 are needed); it took 2.00 to "
            "2.00 times as long.",
        ),
        ([(1.0, 1.5)], "too few", "ran in 1 pair of runs, too few to tell what it lost (5 are"),
        ([(2.0, 1.0)] * 3 + [(1.0, 1.1)], "too few", "it took 0.91 to 2.00 times as long."),
        ([(1.0, 1.0)] * 5, "none", "as long in 5 pairs of runs."),
    ],
)
def test_a_loss_is_claimed_only_where_all_pairs_agree(
    pairs: list[tuple[float, float]], finding: str, says: str
) -> None:
    row = timed(*pairs)
    assert row.finding == finding
    assert says in what_was_lost(row)
    assert what_was_lost(row).count(". ") == 0
    assert row.lost_s == pytest.approx(row.times.a.median_s - row.times.b.median_s)


def test_a_row_as_json(rows: list[RoutingRow]) -> None:
    read = json.loads(json.dumps(rows[0].to_json(), allow_nan=False))
    assert (read["num_verifiers"], read["chunk"], read["reason"]) == (3, 5, "prefill-in-batch")
    assert read["finding"] == "too few"
    assert [launch["blocks"] for launch in read["by_itself"]] == [24, 5]
    assert [t["name"] for t in (read["times"]["a"], read["times"]["b"])] == [
        "batch-wide",
        "by itself",
    ]
    assert all(v["passed"] for t in ("a", "b") for v in read["times"][t]["verdicts"])


# ---- the gate


def off_in(wrong: Callable[[RoutedStep], bool]) -> Callable[[RoutedStep], AttentionResult]:
    right = RoutedStep.__call__

    def run(self: RoutedStep) -> AttentionResult:
        out, lse = right(self)
        return AttentionResult(out + 0.01 if wrong(self) else out, lse)

    return run


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda routed: routed.way.kind == "mixed", "by itself: .*held against the batch-wide"),
        (lambda routed: True, "batch-wide: .*before the timed runs"),
    ],
)
def test_a_wrong_result_gets_no_time(
    wrong: Callable[[RoutedStep], bool], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoutedStep, "__call__", off_in(wrong))
    with pytest.raises(GateError, match=says):
        next(measure_routing([5], **FAST))


@pytest.mark.parametrize("name", [*SIZES, "num_verifiers", "repeats", "warmup", "chunks"])
@pytest.mark.parametrize("value", [-1, 1.5, None, "8"])
def test_bad_numbers_are_named_before_anything_is_made(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_step, "plan_scratch", lambda *a: pytest.fail("planned"))
    given = {"chunks": [5]} | FAST | {name: [value] if name == "chunks" else value}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(measure_routing)(**given)
    assert plan_scratch is not routing_step.plan_scratch


def test_no_chunk_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="chunks must hold"):
        measure_routing([], **FAST)

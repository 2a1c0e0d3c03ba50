"""Whole steps: totals and shares by hand, and a wrong part that is caught where it stands."""

import json
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import CPU, FakeClock

from mla_ref.backends import TorchBackend
from mla_ref.bench import NoTime, Timing, random_cache
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.kernel_step import StepBatch, StepShape
from mla_ref.bench.kernel_sweep import SweepPoint, measure_sweep, sweep_shapes
from mla_ref.indexer import index_scores, positions_to_slots, select_topk
from mla_ref.testing import Adapter, as_adapter

SHAPE = StepShape(context=200, requests=2, rows_per_request=4, heads=2, topk=128)


def measure(backend: TorchBackend, what: str = "verifier", *us: float) -> SweepPoint:
    timer = GpuTimer(FakeClock(*(u / 1e6 for u in us)), rounds=1, replays=1)
    found = measure_sweep(as_adapter(backend), [(what, SHAPE)], timer, CPU, memory_limit=10**9)
    return next(found)


def test_the_sweep_has_every_batch_and_a_prefill_at_each_context() -> None:
    shapes = sweep_shapes()
    assert len(shapes) == 4 * 4 * 4 + 4
    assert ("verifier", StepShape(131_072, 64, 4)) in shapes
    assert ("prefill", StepShape(1024, 1, 256)) in shapes
    assert StepShape(131_072, 64, 4).rows == 256 and StepShape(100, 2, 1).pages == 4


def test_totals_and_shares_by_hand() -> None:
    # index scores, top-k, slots, decode, extend, merge
    point = measure(TorchBackend(32), "verifier", 40, 20, 10, 30, 130, 5)
    assert point.total_s("decode") == pytest.approx(100 / 1e6)
    assert point.total_s("extend") == pytest.approx(200 / 1e6)
    assert point.share("index scores", "decode") == pytest.approx(0.4)
    assert point.share("extend", "extend") == pytest.approx(0.65)
    assert point.seconds("merge") == pytest.approx(5 / 1e6) and point.torch_parts == ()
    data = json.loads(json.dumps(point.to_json(), allow_nan=False))
    assert data["shares"]["decode"]["top-k"] == pytest.approx(0.2)
    assert data["parts"]["merge"]["median_s"] == pytest.approx(5 / 1e6)
    assert "verdicts" not in data["parts"]["merge"]


def test_a_prefill_goes_to_extend_alone() -> None:
    point = measure(TorchBackend(32), "prefill", 1)
    assert set(point.outcomes) == {"index scores", "top-k", "slots", "extend"}
    assert point.total_s("decode") is None and point.total_s("extend") is not None


@pytest.mark.parametrize("part", ["index_scores", "topk", "convert", "merge"])
def test_a_wrong_part_gets_no_time_and_the_others_theirs(part: str) -> None:
    class Wrong(TorchBackend):
        @property
        def parts(self) -> Any:
            right = super().parts[part]

            def wrong(*args: Any, **named: Any) -> Any:
                result = right(*args, **named)
                if isinstance(result, torch.Tensor):
                    result[-1, 0] += 1
                    return result
                return result.out + 0.1, result.lse

            return MappingProxyType({**super().parts, part: wrong})

    outcomes = measure(Wrong(32)).outcomes
    name = {"index_scores": "index scores", "topk": "top-k", "convert": "slots"}.get(part, part)
    wrong = outcomes.pop(name)
    assert isinstance(wrong, NoTime) and wrong.wrong
    assert all(isinstance(outcome, Timing) for outcome in outcomes.values())


def test_parts_that_a_backend_has_not_are_torchs_and_said() -> None:
    class Bare(TorchBackend):
        @property
        def parts(self) -> Any:
            return MappingProxyType({})

    assert measure(Bare(32)).torch_parts == ("index scores", "top-k", "slots", "merge")


def test_rows_see_their_own_request_up_to_themselves() -> None:
    batch = StepBatch.random(SHAPE, random_cache(640, "fp8", CPU))
    assert batch.visible_lens.tolist() == [197, 198, 199, 200] * 2
    assert batch.request_of_row.tolist() == [0] * 4 + [1] * 4
    assert len(batch.block_table.unique()) == 8  # no page belongs to two requests
    positions = select_topk(batch.scores(index_scores), batch.visible_lens, 128)
    slots = positions_to_slots(positions, batch.request_of_row, batch.block_table, 64)
    four = [set(row.tolist()) for row in slots[:4]]
    assert 90 < len(set.intersection(*four)) < 128  # rows of a request share most of their lists
    assert not set.union(*four) & set(slots[4:].flatten().tolist())


def test_a_step_beyond_the_memory_is_a_line_with_its_reason() -> None:
    timer = GpuTimer(FakeClock())
    (point,) = measure_sweep(
        as_adapter(TorchBackend()), [("verifier", SHAPE)], timer, CPU, memory_limit=1000
    )
    assert "its cache and index keys take 0.0 GB" in str(point.outcomes["index scores"])


def test_a_cache_with_too_few_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="2 pages, the requests take 8"):
        StepBatch.random(SHAPE, random_cache(128, "fp8", CPU))


def test_a_plain_function_has_no_step() -> None:
    found = measure_sweep(
        Adapter(decode=lambda: None),
        [("verifier", SHAPE)],
        GpuTimer(FakeClock()),
        CPU,
        memory_limit=10**9,
    )
    with pytest.raises(ValueError, match="a step needs a backend"):
        next(found)

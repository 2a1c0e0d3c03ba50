"""Tuning: every configuration is tried, a wrong one cannot win."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import CPU, FakeClock, small_workload

from mla_ref.backends import TorchBackend
from mla_ref.backends.torch_backend import TorchPlan
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.tune import tune
from mla_ref.numerics import AttentionResult
from mla_ref.testing import Adapter, as_adapter


@dataclass(frozen=True)
class TunedPlan:
    inner: TorchPlan
    config: str
    num_splits: int
    partials: AttentionResult

    def decode(self, *args: Any, **named: Any) -> AttentionResult:
        result = replace(self.inner, num_splits=self.num_splits, partials=self.partials).decode(
            *args, **named
        )
        return AttentionResult(result.out + 1, result.lse) if self.config == "bad" else result


class TunedBackend(TorchBackend):
    """The torch backend with three configurations, one of them wrong."""

    def configurations(self, spec: Any, device: torch.device) -> tuple[str, ...]:
        return ("slow", "bad", "quick")

    def plan(self, spec: Any, **named: Any) -> Any:
        inner = super().plan(spec, **named)
        return TunedPlan(inner, "slow", inner.num_splits, inner.partials)


def test_every_configuration_is_tried_in_three_numbers_of_splits() -> None:
    # slow in 1, 2, 4 splits; bad gets no time; quick in 1, 2, 4
    clock = FakeClock(*(us / 1e6 for us in (30, 20, 25, 12, 11, 10)))
    backend = TunedBackend(8)
    work = small_workload(topk=256)
    plan = backend.plan(work.shape.spec, max_rows=4, max_requests=4, device=CPU, kinds=("decode",))
    assert plan.num_splits == 2
    (trials,) = tune(as_adapter(backend), iter([work]), GpuTimer(clock, rounds=1, replays=1))
    timed = [(t.config, t.seconds) for t in trials if t.seconds]
    assert timed == [
        ("quick, splits: 4", 10 / 1e6),
        ("quick, splits: 2", 11 / 1e6),
        ("quick, splits: 1", 12 / 1e6),
        ("slow, splits: 2", 20 / 1e6),
        ("slow, splits: 4", 25 / 1e6),
        ("slow, splits: 1", 30 / 1e6),
    ]
    assert [t.config for t in trials if t.chosen] == ["slow, splits: 2"]
    assert {t.config for t in trials[6:]} == {f"bad, splits: {n}" for n in (1, 2, 4)}
    assert trials[0].to_json()["median_s"] == 10 / 1e6


@pytest.mark.parametrize(
    "adapter, words",
    [
        (as_adapter(TorchBackend()), "backend 'torch' has none"),
        (Adapter(decode=lambda: None), "a plain function has none"),
    ],
)
def test_what_has_no_configurations_is_refused(adapter: Adapter, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(tune(adapter, iter([small_workload()]), GpuTimer(FakeClock())))

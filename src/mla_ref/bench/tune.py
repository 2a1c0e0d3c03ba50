"""Try every tuning configuration of a backend and say which is the fastest.

A decode is tried with the plan's splits, half and twice as many. The backend lists what may run on
this device: a configuration that does not fit is not offered. A wrong one gets no time, as
everywhere, so it cannot win.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from mla_ref.backends import AttnSpec
from mla_ref.bench.kernel_check import SAMPLE, KernelCheck
from mla_ref.bench.kernel_timer import KernelTimer
from mla_ref.bench.kernel_workload import SOFTMAX_SCALE, KernelWorkload
from mla_ref.bench.kernels import DECODE
from mla_ref.bench.timer import Contender
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.numerics import AttentionResult
from mla_ref.testing import Adapter


@runtime_checkable
class Tunable(Protocol):
    """A backend whose plans are dataclasses with a field `config` that may be replaced."""

    def configurations(self, spec: AttnSpec, device: torch.device) -> Sequence[Any]:
        """What fits this device; `str()` names a configuration."""


@dataclass(frozen=True)
class Trial:
    """One configuration on one workload.

    Attributes:
        config: Its name, and in how many splits.
        kind: "decode" or "extend".
        workload: What it ran on.
        outcome: Its time, or why there is none.
        chosen: Whether the backend takes it by itself.
    """

    config: str
    kind: str
    workload: KernelWorkload
    outcome: Timing | NoTime
    chosen: bool

    @property
    def seconds(self) -> float | None:
        """The median; None without a time."""
        return self.outcome.median_s if isinstance(self.outcome, Timing) else None

    def to_json(self) -> dict[str, Any]:
        """The trial as a JSON object."""
        shape = self.workload.shape
        return {
            "config": self.config,
            "kind": self.kind,
            "workload": self.workload.name,
            "rows": shape.rows,
            "heads": shape.heads,
            "topk": shape.topk,
            "median_s": self.seconds,
            "chosen": self.chosen,
            "outcome": self.outcome.to_json(),
        }


def tune(
    adapter: Adapter,
    workloads: Iterator[KernelWorkload],
    timer: KernelTimer,
    *,
    kind: str = DECODE,
    sample: int = SAMPLE,
) -> Iterator[tuple[Trial, ...]]:
    """All configurations on each workload, the fastest first.

    Args:
        adapter: With a backend that is `Tunable`.
        workloads: From `make_workload`.
        timer: See `kernel_timer`.
        kind: "decode" or "extend".
        sample: Rows of each result that are judged.

    Raises:
        ValueError: The backend has no configurations to choose from, or does not serve a workload.
    """
    backend = adapter.backend
    if backend is None or not isinstance(backend, Tunable):
        name = "a plain function" if backend is None else f"backend {backend.name!r}"
        raise ValueError(f"--tune needs a backend with configurations to try, {name} has none")
    for workload in workloads:
        spec, device = workload.shape.spec, workload.q.device
        if reason := backend.supports(spec, device):
            raise ValueError(f"backend {backend.name!r} does not serve {workload.shape}: {reason}")
        rows = workload.shape.rows
        plan: Any = backend.plan(
            spec, max_rows=rows, max_requests=rows, device=device, kinds=(kind,)
        )
        if "config" not in getattr(plan, "__dataclass_fields__", {}):
            raise ValueError(f"plans of backend {backend.name!r} have no config to replace")
        right = KernelCheck(workload, sample).by_precision_rule(
            getattr(backend, "maths", adapter.maths)
        )
        plans = [
            cut
            for config in backend.configurations(spec, device)
            for cut in _in_splits(replace(plan, config=config))
        ]
        outcomes = timer.race(
            [
                Contender(
                    f"{_name(cut)}, {workload.name}, {workload.shape}",
                    _Call(cut, kind, workload),
                    right,
                )
                for cut in plans
            ]
        )
        trials = [
            Trial(_name(cut), kind, workload, outcome, _name(cut) == _name(plan))
            for cut, outcome in zip(plans, outcomes, strict=True)
        ]
        yield tuple(sorted(trials, key=lambda t: (t.seconds is None, t.seconds or 0.0)))


def _in_splits(plan: Any) -> Iterator[Any]:
    """The plan in its splits, half and twice as many; as it is where it has none to change."""
    splits, partials = getattr(plan, "num_splits", 0), getattr(plan, "partials", None)
    if not splits or not isinstance(partials, AttentionResult):
        yield plan
        return
    for count in sorted({max(splits // 2, 1), splits, 2 * splits}):
        room = AttentionResult(*(x.new_empty(count, *x.shape[1:]) for x in partials))
        yield replace(plan, num_splits=count, partials=room)


def _name(plan: Any) -> str:
    splits = getattr(plan, "num_splits", 0)
    return f"{plan.config}, splits: {splits}" if splits else str(plan.config)


@dataclass(frozen=True)
class _Call:
    """A plan's run on a workload."""

    plan: Any
    kind: str
    workload: KernelWorkload

    def __call__(self) -> AttentionResult:
        work = self.workload
        run = getattr(self.plan, self.kind)
        return run(work.q, work.kv_cache, work.indices, softmax_scale=SOFTMAX_SCALE)

"""Times of several kernels in turn, each behind the gate: on a GPU by graph replay, else by clock.

A failure costs the one contender, not the table: its line says why there is no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from mla_ref.bench.gate import GateError
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.timer import HOST_CLOCK, Clock, Contender, measure
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.checks import require_count
from mla_ref.platform import CudaClock


@runtime_checkable
class KernelTimer(Protocol):
    """Times contenders on one machine."""

    def race(self, contenders: Sequence[Contender[Any]]) -> list[Timing | NoTime]:
        """A time for each whose result is right, else why there is none; in their order."""


@dataclass(frozen=True)
class HostTimer:
    """The host's clock, for a machine without a GPU: its times say nothing about one.

    Attributes:
        warmup: Runs of each after the checked one that are not counted.
        repeats: Timed runs of each.
        clock: Times one call.
    """

    warmup: int = 1
    repeats: int = 3
    clock: Clock = HOST_CLOCK

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_count("warmup", self.warmup)
        require_count("repeats", self.repeats, at_least=1)

    def race(self, contenders: Sequence[Contender[Any]]) -> list[Timing | NoTime]:
        """One after the other."""
        return [self._time(contender) for contender in contenders]

    def _time(self, contender: Contender[Any]) -> Timing | NoTime:
        try:
            return measure(
                contender.name,
                contender.run,
                contender.check,
                warmup=self.warmup,
                repeats=self.repeats,
                clock=self.clock,
                before_each=contender.before_each,
            )
        except GateError as error:
            return NoTime.wrong_result(contender.name, error)
        except Exception as error:  # as in GpuTimer: a kernel's library may raise anything
            return NoTime.failure(contender.name, error)


def kernel_timer(device: torch.device, *, repeats: int = 3, mode: str = "graph") -> KernelTimer:
    """The timer that suits a device.

    Args:
        device: Where the kernels run.
        repeats: Rounds on a GPU, timed runs on a CPU.
        mode: Of a GPU: "graph" or "launches".
    """
    if device.type == "cuda":
        return GpuTimer(CudaClock(device), rounds=repeats, mode=mode)
    return HostTimer(repeats=repeats)

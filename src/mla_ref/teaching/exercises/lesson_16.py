"""Exercise of lesson 16: a benchmark that cannot be fooled in the usual ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.model_gpu import Buffer, ModelGPU

_RIGHT = 42.0


@dataclass
class _Kernel:
    """A kernel on a model of a GPU, that may misbehave in some of its calls.

    Attributes:
        extra_s: Seconds that the device takes on top, by the number of the call.
        wrong: Calls whose output is wrong.
        keeps: Hands out the output of its first call again.
    """

    extra_s: dict[int, float] = field(default_factory=dict)
    wrong: tuple[int, ...] = ()
    keeps: bool = False
    gpu: ModelGPU = field(default_factory=ModelGPU)
    calls: int = 0
    data: Buffer = field(default_factory=lambda: Buffer(12_000_000))
    kept: Tensor | None = None

    def run(self) -> Tensor:
        number, self.calls = self.calls, self.calls + 1
        self.gpu.run(lambda: None, [self.data])
        if late := self.extra_s.get(number):
            self.gpu.run(lambda: None, [Buffer(round(late * self.gpu.memory_bytes_s))])
        if self.keeps and self.kept is not None:
            return self.kept
        self.kept = torch.full((4,), 0.0 if number in self.wrong else _RIGHT)
        return self.kept

    def check(self, result: Tensor) -> bool:
        return bool((result == _RIGHT).all())

    @property
    def cold_s(self) -> float:
        """From the launch to the end of the work, with nothing in the cache."""
        gpu = self.gpu
        return gpu.launch_s + gpu.start_s + self.data.num_bytes / gpu.memory_bytes_s


def _bench(bench: Function, kernel: _Kernel, repeats: int) -> Any:
    gpu = kernel.gpu
    return bench(kernel.run, kernel.check, gpu.flush, gpu.synchronize, gpu.now, repeats)


def _times(bench: Function, kernel: _Kernel, repeats: int, expected: float) -> None:
    found = _bench(bench, kernel, repeats)
    if isinstance(found, bool) or not isinstance(found, float):
        raise Complaint(f"the result is {describe(found)}, expected a float, in seconds")
    if not math.isclose(found, expected, rel_tol=1e-6):
        raise Complaint(f"the result is {found * 1e6:.4g} us, expected {expected * 1e6:.4g} us")
    if kernel.calls != repeats + 1:
        raise Complaint(f"run() was called {kernel.calls} times, expected {repeats + 1}")


def _timed(kernel: _Kernel, repeats: int, more_s: float = 0.0) -> Callable[[Function], None]:
    """The kernel's time when cold, and `more_s`; each check with a kernel of its own."""

    def check(bench: Function) -> None:
        fresh = _Kernel(dict(kernel.extra_s), kernel.wrong, kernel.keeps)
        _times(bench, fresh, repeats, fresh.cold_s + more_s)

    return check


def _refused(kernel: _Kernel, repeats: int, what: str) -> Callable[[Function], None]:
    """A ValueError, and nothing else."""

    def check(bench: Function) -> None:
        fresh = _Kernel(dict(kernel.extra_s), kernel.wrong, kernel.keeps)
        try:
            found = _bench(bench, fresh, repeats)
        except Complaint as complaint:
            if isinstance(complaint.__cause__, ValueError):
                return
            raise
        raise Complaint(f"the result is {describe(found)}, expected a ValueError: {what}")

    return check


# What the launch of a second kernel costs the host is hidden behind the first one's work.
_LATE = 3e-6
_START = ModelGPU().start_s

BENCH = Exercise(
    id="16-bench",
    title="A benchmark",
    task=(
        "Write `bench(run, check, flush, synchronize, now, repeats)`: the median of `repeats` "
        "times of `run()`, in seconds. `run()` launches work on a device and returns its output, a "
        "float32 tensor, before the work is done. `synchronize()` waits for everything that was "
        "launched, `now()` is the host's clock, and `flush()` launches work that empties the "
        "cache. Call `run()` once before the timed calls. Flush before every timed call; neither "
        "the flush nor anything else that was launched before may be in a time. `check(output)` is "
        "True if an output is right: ask it of the first and of the last output, and raise a "
        "ValueError if one is wrong. Fill each output with NaN, in place, before the next call, so "
        "that one that was kept cannot pass for a new one."
    ),
    signature=(
        "def bench(\n    run: Callable[[], Tensor],\n    check: Callable[[Tensor], bool],\n"
        "    flush: Callable[[], None],\n    synchronize: Callable[[], None],\n"
        "    now: Callable[[], float],\n    repeats: int,\n) -> float:"
    ),
    cases=(
        Case(
            "one timed call of 3 us of reading",
            "The launch alone takes 5 us here, whatever it launches: wait before you look at the "
            "clock, and for the flush before you start it. Twice as fast means that the cache "
            "still held what the first call had read.",
            _timed(_Kernel(), 1),
        ),
        Case(
            "five calls, all alike",
            "From the second timed call on the cache is warm again if it is flushed only once "
            "(DeepGEMM#68).",
            _timed(_Kernel(), 5),
        ),
        Case(
            "a first call that compiles",
            "The first call of a kernel compiles, allocates, and wakes the clocks up.",
            _timed(_Kernel({0: 1.0}), 3),
        ),
        Case(
            "one of five calls interrupted",
            "The mean believes everything, and the fastest run is a best case, not a time.",
            _timed(_Kernel({2: 0.1}), 5),
        ),
        Case(
            "two of four calls slower",
            "The median of an even number is the mean of the two in the middle.",
            _timed(_Kernel({1: _LATE, 2: _LATE}), 4, (_LATE + _START) / 2),
        ),
        Case(
            "wrong from the first call on",
            "A kernel that does nothing is the fastest of all.",
            _refused(_Kernel(wrong=tuple(range(9))), 3, "the first output is wrong"),
        ),
        Case(
            "right at first, wrong in the last call",
            "A race, or a buffer that is too small: the time is of work that was not done.",
            _refused(_Kernel(wrong=(3,)), 3, "the last output is wrong"),
        ),
        Case(
            "the first output kept and handed out again",
            "Contest entries did it (flashinfer-bench-starter-kit#21): computed once, and returned "
            "ever after.",
            _refused(_Kernel(keeps=True), 3, "the last output was not computed again"),
        ),
    ),
)

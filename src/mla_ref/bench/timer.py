"""Times of things whose results were checked.

`measure` times one thing, `compare_times` two in turn. Both check a result before they take a time
and check the result of the last timed run too: a time is only worth having for work that was done.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from mla_ref.bench.gate import Check, Verdict, require_right, spoil
from mla_ref.bench.timing import TimeComparison, Timing
from mla_ref.checks import require_count

R = TypeVar("R")


def _nothing() -> None:
    pass


@runtime_checkable
class Clock(Protocol):
    """Times one call: runs a function once and says how many seconds that took.

    The host's clock is `WallClock`. Code for a device may bring one that reads the device's events,
    or that divides the time of many launches by their number.
    """

    @property
    def name(self) -> str:
        """What kind of time this is, for the report."""

    def __call__(self, run: Callable[[], R]) -> tuple[R, float]:
        """Return what `run` returned, and the seconds it took."""


@dataclass(frozen=True)
class WallClock:
    """The host's clock around one call.

    Attributes:
        synchronize: Waits for all work given to the device. A GPU call returns before it is done,
            so without this the time is that of the launch alone. Nothing to wait for on a CPU.
        now: Seconds that never run backwards.
        name: What kind of time this is, for the report.
    """

    synchronize: Callable[[], None] = _nothing
    now: Callable[[], float] = time.perf_counter
    name: str = "wall clock"

    def __call__(self, run: Callable[[], R]) -> tuple[R, float]:
        """Return what `run` returned, and the seconds until its work was done."""
        self.synchronize()  # or the work before it would be counted too
        start = self.now()
        result = run()
        self.synchronize()
        return result, self.now() - start


HOST_CLOCK = WallClock()


@dataclass(frozen=True)
class Contender(Generic[R]):
    """One thing to be timed.

    Attributes:
        name: What it is, with its shape where that matters.
        run: Does the work once, on inputs that it already holds, and returns the result.
        check: Says how far that result is from a known good one.
        before_each: Called before every run, outside the clock. The place to flush a cache, to
            restore inputs that the run changes, or to change inputs.
    """

    name: str
    run: Callable[[], R]
    check: Check[R]
    before_each: Callable[[], None] = _nothing


def measure(
    name: str,
    run: Callable[[], R],
    check: Check[R],
    *,
    warmup: int = 2,
    repeats: int = 10,
    clock: Clock = HOST_CLOCK,
    before_each: Callable[[], None] = _nothing,
) -> Timing:
    """Time one thing, if its result is right.

    One run is checked at the very shape that is timed. Then come `warmup` runs and `repeats` timed
    runs, and the result of the last timed run is checked too. Between runs the old result is
    overwritten (`spoil`), so a run must compute its result and cannot hand out an old one. Where
    the result shares memory with an input, `before_each` must restore that input.

    Args:
        name: What is timed, for reports and errors.
        run: Does the work once and returns the result.
        check: Compares a result with a known good one; see `close_to`.
        warmup: Runs after the checked one that are not counted, 0 or more.
        repeats: Timed runs, 1 or more.
        clock: Times one call. The default suits a CPU.
        before_each: Called before every run, outside the clock.

    Returns:
        Every sample in seconds, with what the check found.

    Raises:
        GateError: The result is wrong, before the timed runs or after them.
        TypeError: `warmup` or `repeats` is not an integer.
        ValueError: One of them is too small, or a sample is not above 0 seconds.
    """
    require_count("warmup", warmup)
    require_count("repeats", repeats, at_least=1)
    trial = _Trial(Contender(name, run, check, before_each), clock)
    trial.prepare(warmup)
    for _ in range(repeats):
        trial.sample()
    return trial.finish()


def compare_times(
    a: Contender[Any],
    b: Contender[Any],
    *,
    warmup: int = 2,
    repeats: int = 10,
    clock: Clock = HOST_CLOCK,
) -> TimeComparison:
    """Time two things in turn (a, b, a, b, ...), each gated as in `measure`.

    Two runs minutes apart also compare two clock speeds and two neighbours on the machine. Runs in
    turn share them, and the spread of the ratio from pair to pair says how far to trust it.

    Args:
        a: The first; the ratio is its time over the other's.
        b: The second.
        warmup: Runs of each after the checked one that are not counted, 0 or more.
        repeats: Timed runs of each, 1 or more.
        clock: Times one call. The default suits a CPU.

    Returns:
        Both timings and their ratio.

    Raises:
        GateError: One of the two results is wrong, before the timed runs or after them.
        TypeError: `warmup` or `repeats` is not an integer.
        ValueError: One of them is too small, or a sample is not above 0 seconds.
    """
    require_count("warmup", warmup)
    require_count("repeats", repeats, at_least=1)
    trials = _Trial(a, clock), _Trial(b, clock)
    for trial in trials:
        trial.prepare(warmup)
    for _ in range(repeats):
        for trial in trials:
            trial.sample()
    return TimeComparison(*(trial.finish() for trial in trials))


@dataclass
class _Trial:
    """The runs of one contender, in progress."""

    contender: Contender[Any]
    clock: Clock
    warmup: int = 0
    samples_s: list[float] = field(default_factory=list)
    result: Any = None

    def prepare(self, warmup: int) -> None:
        self._run()
        self._gate("before the timed runs")
        for _ in range(warmup):
            self._run()
        self.warmup = warmup

    def sample(self) -> None:
        seconds = self._run()
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"clock: expected a time above 0 seconds, it gave {seconds}")
        self.samples_s.append(seconds)

    def finish(self) -> Timing:
        verdicts = self._gate(
            "of the last timed run (the first run was right: old output, or changed inputs?)"
        )
        return Timing(
            self.contender.name, self.clock.name, self.warmup, tuple(self.samples_s), verdicts
        )

    def _gate(self, when: str) -> tuple[Verdict, ...]:
        return require_right(self.contender.name, when, self.result, self.contender.check)

    def _run(self) -> float:
        spoil(self.result)
        self.result = None  # freed now, not during the timed call
        self.contender.before_each()
        self.result, seconds = self.clock(self.contender.run)
        return seconds

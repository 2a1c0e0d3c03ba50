"""Times on a GPU: CUDA graphs replayed after the L2 cache was written over, by the device's events.

A call of 20 us costs as much again to launch from Python, and then its time is that of the host:
of the same kernel `do_bench` has shown 14 and 25 us in turn. In a graph the launch costs under a
microsecond. Between replays the L2 is flushed, since a serving engine has read a layer's weights
since the last attention; that adds 4 to 9 us over replays back to back.

All contenders are captured first and then timed in rounds, in turn, so that a clock that drifts
drifts for all of them.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from mla_ref.bench.gate import GateError, require_right, spoil
from mla_ref.bench.timer import Contender
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.checks import require_choice, require_count
from mla_ref.platform import Captured

MODES = ("graph", "launches")


@runtime_checkable
class DeviceClock(Protocol):
    """What of `platform.CudaClock` is used here."""

    @property
    def flush_bytes(self) -> int:
        """What a flush writes."""

    def flush(self) -> None:
        """Write over the L2 cache."""

    def capture(self, run: Callable[[], Any]) -> Captured:
        """Put one call into a graph."""

    def seconds(
        self, run: Callable[[], object], repeats: int, before_each: Callable[[], None]
    ) -> Sequence[float]:
        """Seconds of each run by the device's events."""

    def synchronize(self) -> None:
        """Wait for the device."""


@dataclass(frozen=True)
class GpuTimer:
    """Graph replays or plain launches, in rounds.

    Attributes:
        clock: The GPU.
        rounds: How often all contenders take their turn, 1 or more.
        replays: Timed runs of a turn; a sample is their median.
        mode: "graph"; or "launches", where a short kernel's time is that of its launch. What cannot
            be captured is timed by plain launches in both, and its time says so.
    """

    clock: DeviceClock
    rounds: int = 3
    replays: int = 20
    mode: str = "graph"

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_count("rounds", self.rounds, at_least=1)
        require_count("replays", self.replays, at_least=1)
        require_choice("mode", self.mode, MODES)

    def race(self, contenders: Sequence[Contender[Any]]) -> list[Timing | NoTime]:
        """A time for each whose result is right, else why there is none; in their order."""
        runners = [_Runner(contender) for contender in contenders]
        for runner in runners:
            runner.guarded(partial(runner.prepare, self.clock, self.mode))
        for _ in range(self.rounds):
            for runner in runners:
                runner.guarded(partial(runner.turn, self.clock, self.replays))
        for runner in runners:
            runner.guarded(partial(runner.finish, self._name(runner), self.rounds * self.replays))
        return [runner.outcome for runner in runners]

    def _name(self, runner: "_Runner") -> str:
        how = "plain launches" if runner.graph is None else "CUDA graph replays"
        return (
            f"median of {self.replays} {how}, each after {self.clock.flush_bytes / 2**20:.0f} MiB "
            f"were written over the L2{runner.why_no_graph}"
        )


@dataclass
class _Runner:
    """One contender, from its first run to its time."""

    contender: Contender[Any]
    graph: Captured | None = None
    why_no_graph: str = ""
    result: Any = None
    samples_s: list[float] = field(default_factory=list)
    outcome: Timing | NoTime = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = NoTime(self.contender.name, "it has not run")
        self._lost = False

    def guarded(self, step: Callable[[], None]) -> None:
        """Do one step, unless an earlier one failed."""
        if self._lost:
            return
        try:
            step()
        except GateError as error:
            self._lost, self.outcome = True, NoTime.wrong_result(self.contender.name, error)
        except Exception as error:  # Triton's and CuPy's errors have no base of their own
            self._lost, self.outcome = True, NoTime.failure(self.contender.name, error)

    def prepare(self, clock: DeviceClock, mode: str) -> None:
        self.contender.before_each()
        self.result = self.contender.run()
        clock.synchronize()
        self._gate("before the timed runs")
        spoil(self.result)
        if mode == "graph":
            try:
                self.graph = clock.capture(self.contender.run)
            except RuntimeError as error:
                self.why_no_graph = f"; no graph can hold it ({_first_line(error)})"
            else:
                self.result = self.graph.result
                # What the warm-up left there must not pass for the work of a replay.
                spoil(self.result)

    def turn(self, clock: DeviceClock, replays: int) -> None:
        def before() -> None:
            self.contender.before_each()
            clock.flush()

        run = self._launch if self.graph is None else self.graph.replay
        self.samples_s.append(statistics.median(clock.seconds(run, replays, before)))

    def _launch(self) -> None:
        self.result = self.contender.run()

    def finish(self, clock_name: str, runs: int) -> None:
        verdicts = self._gate(f"of the last of {runs} timed runs")
        self.outcome = Timing(self.contender.name, clock_name, 1, tuple(self.samples_s), verdicts)

    def _gate(self, when: str) -> Any:
        return require_right(self.contender.name, when, self.result, self.contender.check)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

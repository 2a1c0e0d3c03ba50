"""A bug of benchmarks, as published ones had it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class LaunchClock:
    """BUG: reads the host's clock when the call returns, and not when its work is done.

    Right on a CPU. A GPU's call returns as soon as the work has been handed over.

    Attributes:
        synchronize: Waits for all work given to the device; never called after `run`.
        now: Seconds that never run backwards.
        name: What kind of time this is, for the report.
    """

    synchronize: Callable[[], None] = _nothing
    now: Callable[[], float] = time.perf_counter
    name: str = "wall clock"

    def __call__(self, run: Callable[[], R]) -> tuple[R, float]:
        """Return what `run` returned, and the seconds until it returned."""
        self.synchronize()
        start = self.now()
        result = run()
        return result, self.now() - start

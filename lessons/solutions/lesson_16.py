"""Answer to the exercise of lesson 16. Write your own first."""

import statistics
from collections.abc import Callable

from torch import Tensor


def bench(
    run: Callable[[], Tensor],
    check: Callable[[Tensor], bool],
    flush: Callable[[], None],
    synchronize: Callable[[], None],
    now: Callable[[], float],
    repeats: int,
) -> float:
    """The median of cold times, if the work was done."""
    output = run()
    synchronize()
    if not check(output):
        raise ValueError("the first output is wrong")
    samples = []
    for _ in range(repeats):
        output.fill_(float("nan"))
        flush()
        synchronize()
        start = now()
        output = run()
        synchronize()
        samples.append(now() - start)
    if not check(output):
        raise ValueError("the last output is wrong")
    return statistics.median(samples)

"""Bugs of checks: a wrong kernel passes, as it did in published ones."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor


def no_difference_above(
    actual: Float[Tensor, "..."], expected: Float[Tensor, "..."], max_abs: float
) -> bool:
    """BUG: asks whether a difference is too large, and NaN is not larger than anything.

    Right as long as every number is finite.

    Args:
        actual: The result under test.
        expected: What it should be.
        max_abs: The largest difference allowed.
    """
    return not bool(((actual - expected).abs() > max_abs).any())


def lengths_to_check(timed: Sequence[int], at_most: int = 256) -> list[int]:
    """BUG: makes the check quick by checking shorter inputs than those that are timed.

    Right as long as a kernel takes the same path at every length.

    Args:
        timed: Lengths of the inputs that the benchmark times.
        at_most: The longest that the slow reference is asked for.
    """
    return [min(length, at_most) for length in timed]

"""Comparison of two tensors: first where they are not numbers, then how far the numbers are apart.

A plain `if abs(a - b) > tol: fail` lets NaN through, because every comparison with NaN is false;
a kernel that did less work and left NaN behind has passed such a check, faster than all others
(SGEMM_CUDA#20). So the pattern of NaN and of each infinity comes first.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from mla_ref.checks import describe


@dataclass(frozen=True)
class Comparison:
    """How `actual` differs from `expected`.

    The four error figures are taken in float64 over the positions where both are finite.

    Attributes:
        shape: Shape of both tensors.
        nan_mismatches: Positions where one is NaN and the other is not.
        inf_mismatches: Positions where one is +inf or -inf and the other is not the same.
        max_abs: Largest absolute difference.
        rel_l2: ||actual - expected|| / ||expected||; the plain norm of the difference where
            `expected` is all zero.
        cosine: Cosine of the angle between both, 1.0 where both are all zero.
        worst_index: Index of the first mismatch of NaN or inf if there is one, else of `max_abs`;
            empty where there is nothing to compare.
        worst_actual: The value of `actual` there.
        worst_expected: The value of `expected` there.
    """

    shape: tuple[int, ...]
    nan_mismatches: int
    inf_mismatches: int
    max_abs: float
    rel_l2: float
    cosine: float
    worst_index: tuple[int, ...]
    worst_actual: float
    worst_expected: float

    def agrees(self, *, rel_l2: float = math.inf, max_abs: float = math.inf) -> bool:
        """True if the NaN and inf patterns are equal and the errors are within the limits."""
        same_pattern = self.nan_mismatches == 0 and self.inf_mismatches == 0
        return same_pattern and self.rel_l2 <= rel_l2 and self.max_abs <= max_abs

    def to_json(self) -> dict[str, object]:
        """The figures as plain data; floats that JSON cannot hold become strings."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        """One line for a terminal or an error message."""
        pattern = (
            f"NaN differs at {self.nan_mismatches}, inf at {self.inf_mismatches} positions, "
            if self.nan_mismatches or self.inf_mismatches
            else ""
        )
        return (
            f"{pattern}max abs {self.max_abs:.2e}, rel L2 {self.rel_l2:.2e}, worst at "
            f"{list(self.worst_index)}: {self.worst_actual:.6g} instead of "
            f"{self.worst_expected:.6g}"
        )


def compare(actual: Shaped[Tensor, "..."], expected: Shaped[Tensor, "..."]) -> Comparison:
    """Compare two tensors of one shape, in float64.

    Args:
        actual: The tensor under test.
        expected: What it should be; it may have another dtype.

    Raises:
        TypeError: An argument is not a tensor of real numbers.
        ValueError: The shapes differ. Broadcasting would hide a missing row.
    """
    for name, value in (("actual", actual), ("expected", expected)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(value)}")
        if value.is_complex():
            raise TypeError(f"{name} must hold real numbers, got {describe(value)}")
    if actual.shape != expected.shape:
        raise ValueError(f"actual is {describe(actual)}, expected is {describe(expected)}")
    a = actual.detach().to("cpu", torch.float64)
    e = expected.detach().to("cpu", torch.float64)

    nan_differs = a.isnan() != e.isnan()
    inf_differs = (a.isinf() | e.isinf()) & (a != e) & ~nan_differs & ~a.isnan()
    finite = a.isfinite() & e.isfinite()
    # Masked before the difference: inf - inf would put NaN into every figure.
    a_clean, e_clean = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
    difference = (a_clean - e_clean).abs()
    norm_a, norm_e = float(a_clean.norm()), float(e_clean.norm())
    distance = float(difference.norm())

    ranking = torch.where(nan_differs | inf_differs, torch.inf, difference).flatten()
    worst = int(ranking.argmax()) if ranking.numel() else -1
    # NumPy's: the first call of torch.unravel_index imports sympy, which takes seconds.
    index = tuple(int(i) for i in np.unravel_index(worst, a.shape)) if worst >= 0 else ()
    return Comparison(
        shape=tuple(actual.shape),
        nan_mismatches=int(nan_differs.sum()),
        inf_mismatches=int(inf_differs.sum()),
        max_abs=float(difference.max()) if difference.numel() else 0.0,
        rel_l2=distance / norm_e if norm_e else distance,
        cosine=_cosine(a_clean, e_clean, norm_a, norm_e),
        worst_index=index,
        worst_actual=float(a[index]) if worst >= 0 else math.nan,
        worst_expected=float(e[index]) if worst >= 0 else math.nan,
    )


def _cosine(a: Tensor, e: Tensor, norm_a: float, norm_e: float) -> float:
    if norm_a == 0 or norm_e == 0:
        return 1.0 if norm_a == norm_e else 0.0
    return float(((a / norm_a) * (e / norm_e)).sum())

"""The precision rule: how wrong a low-precision kernel may be.

A fixed tolerance is either too loose for small values or too tight for bfloat16. So the measure is
what honest arithmetic of the same kind would lose: run the same maths in plain torch in the low
precision (the twin), take its error to the float64 oracle, and allow twice that plus one unit in
the last place of the output dtype. The factor is the one of flash-attention's own tests
(Dao-AILab/flash-attention, tests/test_flash_attn.py); the ulp replaces their probe with 0.3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import describe, require_float
from mla_ref.numerics.compare import Comparison, compare


@dataclass(frozen=True)
class PrecisionVerdict:
    """Whether a kernel's output keeps the precision rule.

    Attributes:
        passed: Same NaN and inf positions as the oracle, and every row within its limit.
        actual: The kernel against the oracle.
        twin: The same maths in torch against the oracle.
        worst_row: Index of the row (all dimensions but the last) with the largest excess.
        worst_error: Largest absolute error in that row.
        limit: What was allowed there: 2 * the twin's largest error + 1 ulp at the row's maximum;
            the ulp alone where the twin is not finite and the oracle is.
    """

    passed: bool
    actual: Comparison
    twin: Comparison
    worst_row: tuple[int, ...]
    worst_error: float
    limit: float

    def __str__(self) -> str:
        """One line for a terminal or an error message."""
        return (
            f"{'passes' if self.passed else 'fails'} the precision rule: row "
            f"{list(self.worst_row)} errs by {self.worst_error:.2e}, allowed {self.limit:.2e} "
            f"({self.actual})"
        )


def ulp(value: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Distance between neighbouring numbers of `dtype` at the magnitude of each value (float64).

    At and below the smallest normal number the spacing is that of the subnormals. Infinity has an
    infinite one, and NaN has NaN.
    """
    info = torch.finfo(dtype)
    magnitude = value.abs().double().clamp(min=info.tiny)
    # From the exponent: log2 in floating point rounds what is just below a power of two up to it.
    power = torch.exp2((torch.frexp(magnitude).exponent - 1).double())
    return info.eps * torch.where(magnitude.isfinite(), power, magnitude)


def precision_rule(
    actual: Float[Tensor, "*rows d"],
    oracle: Float[Tensor, "*rows d"],
    twin: Float[Tensor, "*rows d"],
) -> PrecisionVerdict:
    """Judge `actual` against the oracle, with the twin's own error as the yardstick.

    Args:
        actual: The kernel's output; its dtype gives the ulp.
        oracle: The same result in float64, from the same (already rounded) inputs.
        twin: The same maths in torch at the kernel's precision.

    Raises:
        ValueError: Shapes differ, or a tensor is a scalar.
    """
    for name, value in (("actual", actual), ("oracle", oracle), ("twin", twin)):
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise ValueError(
                f"{name} must be a tensor of one dimension at least, got {describe(value)}"
            )
        require_float(name, value, " ".join("d" * value.ndim))
        if value.shape != actual.shape:
            raise ValueError(f"{name} is {describe(value)} but actual is {describe(actual)}")
    against, twin_against = compare(actual, oracle), compare(twin, oracle)
    if actual.numel() == 0:
        return PrecisionVerdict(True, against, twin_against, (), 0.0, 0.0)

    exact = oracle.detach().to("cpu", torch.float64)

    def row_error(value: Tensor) -> Tensor:
        wide = value.detach().to("cpu", torch.float64)
        both = wide.isfinite() & exact.isfinite()
        return torch.where(both, wide - exact, 0.0).abs().amax(dim=-1)

    row_maximum = torch.where(exact.isfinite(), exact, 0.0).abs().amax(dim=-1)
    # A row whose twin is not finite where the oracle is gives no yardstick: its ulp is all.
    broken = (exact.isfinite() & ~twin.detach().to("cpu").isfinite()).any(dim=-1)
    limit = 2 * torch.where(broken, 0.0, row_error(twin)) + ulp(row_maximum, actual.dtype)
    excess = row_error(actual) - limit
    worst_row = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
    same_pattern = against.nan_mismatches == 0 and against.inf_mismatches == 0
    return PrecisionVerdict(
        passed=same_pattern and bool((excess <= 0).all()),
        actual=against,
        twin=twin_against,
        worst_row=worst_row,
        worst_error=float(row_error(actual)[worst_row]),
        limit=float(limit[worst_row]),
    )

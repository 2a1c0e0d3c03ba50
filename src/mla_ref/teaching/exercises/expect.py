"""What the cases ask of a result: kind and shape first, then NaN and infinities, then numbers."""

from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.numerics import compare
from mla_ref.teaching.exercises.exercise import Complaint


def expect_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
    """Return `value` if it is a tensor of this dtype and shape."""
    expected = f"expected {_short(dtype)} of shape {list(shape)}"
    if not isinstance(value, Tensor):
        raise Complaint(f"{what} is {describe(value)}, {expected}")
    if value.dtype != dtype or value.shape != shape:
        raise Complaint(f"{what} is {describe(value)}, {expected}")
    return value


def expect_parts(value: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return `value` if it is a tuple with one entry a name."""
    if not isinstance(value, tuple) or len(value) != len(names):
        got = f"{len(value)} values" if isinstance(value, tuple) else describe(value)
        raise Complaint(f"the result is {got}, expected the tuple ({', '.join(names)})")
    return value


def expect_close(value: Tensor, expected: Tensor, what: str, *, max_abs: float) -> None:
    """Complain if a NaN or infinity stands in the wrong place, then if a number is off."""
    found = compare(value, expected)
    where = f"{what} at {list(found.worst_index)}" if found.worst_index else what
    pair = f"{where} is {found.worst_actual:.6g}, expected {found.worst_expected:.6g}"
    if found.nan_mismatches:
        raise Complaint(
            f"{found.nan_mismatches} of {value.numel()} numbers are NaN in one and "
            f"not in the other: {pair}"
        )
    if not found.agrees(max_abs=max_abs):
        raise Complaint(pair)


def expect_same_bits(value: Tensor, expected: Tensor, what: str) -> None:
    """Complain unless both are equal to the last bit; rounding counts."""
    expect_close(value, expected, what, max_abs=0.0)


def _short(dtype: torch.dtype) -> str:
    return f"a {str(dtype).removeprefix('torch.')} tensor"

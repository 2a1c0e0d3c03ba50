"""Every way to spoil one argument, in order and without chance: for arguments that are many.

Of a few hundred calls that are drawn, hardly one has a length below 0 in a list of int64: a rare
value in one of eight arguments is not met by luck. So each argument is spoiled in every way here.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from tests.edges.edge import FLOATS
from torch import Tensor

NOT_A_TENSOR = (None, "q", 3, 0.5, [1.0], (), math.nan)
SCALARS = (None, "1", True, 0, -1, 0.0, -0.5, 2, 7, 1e-50, 1e300, 10**400, math.nan, math.inf, 1.5)
DTYPES = (*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64)
NUMBERS = (-(2**31), -2, -1, 0, 1, 2, 5, 100, 2**31 - 1)


def spoilt(value: Any) -> Iterator[Any]:
    """All that may stand in the place of a good value."""
    if isinstance(value, Tensor):
        yield from spoilt_tensor(value)
    elif isinstance(value, list):
        yield from (None, 3, [], [*value, 1], value[:-1], [-1] * len(value), [0.5], {1: 2})
        for at in {0, len(value) - 1} & set(range(len(value))):
            for scalar in SCALARS:
                yield [*value[:at], scalar, *value[at + 1 :]]
    else:
        yield from SCALARS


def spoilt_tensor(x: Tensor) -> Iterator[Any]:
    """Another type, dtype, device, shape, order in memory, or number at its ends."""
    yield from NOT_A_TENSOR
    yield from (x.to(dtype) for dtype in DTYPES)
    for dim in range(max(x.ndim, 1)):
        yield x.unsqueeze(dim)
        if x.ndim and x.shape[dim]:
            first = x.narrow(dim, 0, 1)
            yield from (x.narrow(dim, 1, x.shape[dim] - 1), torch.cat([x, first], dim))
            yield x.select(dim, 0)
    if x.ndim:
        yield x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.is_floating_point():
        yield x.to("meta")
        return
    for at in {0, x.numel() - 1} & set(range(x.numel())):
        for number in NUMBERS:
            changed = x.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[at] = number
            yield changed

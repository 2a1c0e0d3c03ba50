"""Exercise of lesson 15: what mma.sync does with the registers of 32 lanes."""

import math

import torch
from torch import Tensor

from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_tensor
from mla_ref.teaching.fragments import A, B, C, Fragment


def _registers(fragment: Fragment, matrix: Tensor) -> Tensor:
    return torch.from_numpy(fragment.take(matrix.numpy()))


def _random(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*fragment.shape, generator=generator) for fragment in (C, A, B))  # type: ignore[return-value]


def _one(shape: tuple[int, int], row: int, column: int, value: float) -> Tensor:
    matrix = torch.zeros(shape)
    matrix[row, column] = value
    return matrix


def _check(warp_product: Function, c: Tensor, a: Tensor, b: Tensor) -> None:
    parts = _registers(C, c), _registers(A, a), _registers(B, b)
    found = expect_tensor(warp_product(*parts), torch.float32, (32, 4), "the result")
    expected = (c.double() + a.double() @ b.double()).float()
    expect_close(found, _registers(C, expected), "the result", max_abs=1e-4)


def _case(name: str, matrices: tuple[Tensor, Tensor, Tensor], why: str) -> Case:
    def check(warp_product: Function) -> None:
        _check(warp_product, *matrices)

    return Case(name, why, check)


def _single(row: int, k: int, column: int) -> tuple[Tensor, Tensor, Tensor]:
    """A and B with one number each, so that C gets one."""
    return torch.zeros(C.shape), _one(A.shape, row, k, 2.0), _one(B.shape, k, column, 3.0)


def _poisoned(row: int) -> tuple[Tensor, Tensor, Tensor]:
    c, a, b = _random(4)
    a[row, 5] = math.nan
    return c, a, b


WARP_PRODUCT = Exercise(
    id="15-warp-product",
    title="One instruction, 32 lanes",
    task=(
        "Write `warp_product(c, a, b)`: what `mma.sync` leaves in the lanes' registers of C. Lane "
        "`4 * g + t` brings `c[lane]`, `a[lane]` and `b[lane]`, in the order of the figure: of A "
        "row `g` at columns `2t, 2t + 1`, row `g + 8` at the same columns, then both rows at "
        "`2t + 8, 2t + 9`; of B rows `2t, 2t + 1, 2t + 8, 2t + 9` of column `g`; of C row `g` at "
        "columns `2t, 2t + 1`, then row `g + 8`. Return the new `c`, float32; change no argument."
    ),
    signature=(
        'def warp_product(\n    c: Float[Tensor, "32 4"], a: Float[Tensor, "32 8"], '
        'b: Float[Tensor, "32 4"]\n) -> Float[Tensor, "32 4"]:'
    ),
    cases=(
        _case(
            "A and B are 0",
            (_random(1)[0], torch.zeros(A.shape), torch.zeros(B.shape)),
            "C is added to, not replaced: a sum over 512 numbers takes 32 instructions.",
        ),
        _case(
            "one number: row 0, k 0, column 0",
            _single(0, 0, 0),
            "It stands in lane 0 everywhere, so only the sum over k can go wrong here.",
        ),
        _case(
            "one number: row 3, k 0, column 5",
            _single(3, 0, 5),
            "A's row 3 is in lane 12, B's column 5 in lane 20, and C's (3, 5) in lane 14.",
        ),
        _case(
            "one number: row 11, k 4, column 2",
            _single(11, 4, 2),
            "Numbers 2 and 3 of A are of row g + 8, and so are 2 and 3 of C.",
        ),
        _case(
            "one number: row 2, k 13, column 1",
            _single(2, 13, 1),
            "k from 8 on is in numbers 4 to 7 of A, and in 2 and 3 of B.",
        ),
        _case(
            "random numbers",
            _random(2),
            "Everything at once.",
        ),
        _case(
            "NaN in row 9 of A",
            _poisoned(9),
            "A row that should not count must not be loaded: its NaN fills a row of C, and only "
            "that one (miles#2079).",
        ),
    ),
)

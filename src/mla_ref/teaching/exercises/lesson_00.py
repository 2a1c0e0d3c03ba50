"""The exercise of lesson 00: a comparison that NaN does not pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_parts

_NAN, _INF = torch.nan, torch.inf


def _expected(seed: int = 0) -> Tensor:
    """Outputs of 4 rows and 3 numbers, away from 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 3, generator=generator) + 1.0


def _with(values: Tensor, *changes: tuple[tuple[int, ...], float]) -> Tensor:
    """A copy with other numbers at some indices."""
    changed = values.clone()
    for index, number in changes:
        changed[index] = number
    return changed


def _asked(compare: Function, actual: Tensor, expected: Tensor, max_abs: float) -> Any:
    passed, worst = expect_parts(compare(actual, expected, max_abs), ("passed", "worst"))
    if not isinstance(passed, bool):
        raise Complaint(f"passed is {describe(passed)}, expected True or False")
    if not isinstance(worst, tuple) or not all(type(i) is int for i in worst):
        raise Complaint(f"worst is {describe(worst)}, expected a tuple of int")
    return passed, worst


def _judged(
    actual: Tensor,
    expected: Tensor,
    passes: bool,
    at: tuple[int, ...] | None = None,
    max_abs: float = 0.01,
) -> Callable[[Function], None]:
    """The verdict, and then the index where it is not left open."""

    def check(compare: Function) -> None:
        passed, worst = _asked(compare, actual, expected, max_abs)
        if passed is not passes:
            raise Complaint(f"passed is {passed}, expected {passes}")
        if at is not None and worst != at:
            raise Complaint(f"worst is {worst}, expected {at}")

    return check


def _check_shapes(compare: Function) -> None:
    try:
        found = compare(_expected()[:1], _expected(), 9.0)
    except Complaint as complaint:
        if isinstance(complaint.__cause__, ValueError):
            return
        raise
    raise Complaint(
        f"the result is {describe(found)}, expected a ValueError: shapes [1, 3] and [4, 3] differ"
    )


_SOME = _expected()
_LSE = torch.tensor([-_INF, 1.5, -_INF, 2.5])
_HALF = torch.tensor([10.0, 40_000.0, 45_000.0], dtype=torch.float16)

COMPARE = Exercise(
    id="00-compare",
    title="A comparison that NaN does not pass",
    task=(
        "Write `my_compare(actual, expected, max_abs)`, which returns `(passed, worst)`. A "
        "*mismatch* is a position where one of both is NaN and the other is not, or where one is "
        "an infinity and the other is not the same one. `passed` is True if there is no mismatch "
        "and no finite pair differs by more than `max_abs`. `worst` is the index of the first "
        "mismatch, as a tuple of int; without one, the index of the largest difference, the first "
        "if several are as large. Take differences in float64. If both are empty, nothing is "
        "wrong: `(True, ())`. Shapes that differ are a ValueError."
    ),
    signature=(
        'def my_compare(\n    actual: Float[Tensor, "..."],\n'
        '    expected: Float[Tensor, "..."],\n    max_abs: float,\n'
        ") -> tuple[bool, tuple[int, ...]]:"
    ),
    cases=(
        Case(
            "one number too large by 0.5",
            "The index says which row and which head a kernel gets wrong: often the only clue.",
            _judged(_with(_SOME, ((2, 1), float(_SOME[2, 1]) + 0.5)), _SOME, False, (2, 1)),
        ),
        Case(
            "one number too small by 0.5",
            "Without the absolute value every number that is too small passes.",
            _judged(_with(_SOME, ((1, 2), float(_SOME[1, 2]) - 0.5)), _SOME, False, (1, 2)),
        ),
        Case(
            "off by exactly the limit",
            "A limit of 0 asks for equal numbers, so what lies on the limit has to pass.",
            _judged(_with(_SOME, ((0, 2), 1.5)), _with(_SOME, ((0, 2), 1.25)), True, (0, 2), 0.25),
        ),
        Case(
            "NaN in the result",
            "A kernel that writes nothing leaves what was there. Every comparison with NaN is "
            "False, so a check that looks for large differences finds none (SGEMM_CUDA#20).",
            _judged(_with(_SOME, ((3, 0), _NAN)), _SOME, False, (3, 0)),
        ),
        Case(
            "NaN expected, a number in the result",
            "A row whose query holds NaN has no softmax. A kernel that makes a number of it hides "
            "a fault of whoever made the query.",
            _judged(_SOME, _with(_SOME, ((1, 0), _NAN)), False, (1, 0)),
        ),
        Case(
            "NaN in both, at the same place",
            "NaN where the oracle says NaN is right. Equality says the contrary: NaN differs from "
            "itself.",
            _judged(_with(_SOME, ((1, 0), _NAN)), _with(_SOME, ((1, 0), _NAN)), True),
        ),
        Case(
            "-inf in both, at the same places",
            "The LSE of a row that sees nothing. -inf minus -inf is NaN.",
            _judged(_LSE, _LSE.clone(), True),
        ),
        Case(
            "+inf where -inf is expected",
            "FlashMLA marks a row that sees nothing with +inf, others with -inf. In a merge that "
            "is the largest weight in place of the smallest.",
            _judged(_with(_LSE, ((2,), _INF)), _LSE, False, (2,)),
        ),
        Case(
            "NaN in one place, a large difference before it",
            "The first thing to mend is what is not a number.",
            _judged(_with(_SOME, ((0, 0), 99.0), ((2, 2), _NAN)), _SOME, False, (2, 2)),
        ),
        Case(
            "several mismatches",
            "The first one: kernels write from front to back, so the fault often lies there.",
            _judged(_with(_SOME, ((1, 1), _INF), ((3, 2), _NAN)), _SOME, False, (1, 1)),
        ),
        Case(
            "two float16 tensors that are 80,000 and 90,000 apart",
            "float16 ends at 65,504: in its own dtype each of these differences is inf.",
            _judged(-_HALF, _HALF, True, (2,), 1e5),
        ),
        Case(
            "a single number, no dimension",
            "A loss, a mean. Its index is the empty tuple.",
            _judged(torch.tensor(1.5), torch.tensor(1.0), False, ()),
        ),
        Case(
            "nothing to compare",
            "A rank that owns no row. The largest of no numbers is an error in torch.",
            _judged(torch.zeros(0, 3), torch.zeros(0, 3), True, ()),
        ),
        Case(
            "one row against four",
            "Broadcasting would compare the one row four times, and nobody misses the other three.",
            _check_shapes,
        ),
    ),
)

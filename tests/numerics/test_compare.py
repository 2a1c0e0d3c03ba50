"""compare: what is not a number comes first, and every figure is one that can be worked out."""

import json
import math

import pytest
import torch
from tests.support import raw

from mla_ref.numerics import compare

NAN, INF = math.nan, math.inf


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_figures_worked_out_by_hand() -> None:
    # Difference (0, 0, 2, 0): max 2, norm 2. ||expected|| = sqrt(1 + 4 + 4 + 16) = 5.
    # Cosine: actual·expected = 1 + 4 + 8 + 16 = 29, ||actual|| = sqrt(1 + 4 + 16 + 16) = sqrt(37).
    c = compare(t(1, 2, 4, 4), t(1, 2, 2, 4))
    assert (c.nan_mismatches, c.inf_mismatches) == (0, 0)
    assert c.max_abs == 2.0
    assert c.rel_l2 == pytest.approx(2 / 5, rel=1e-15)
    assert c.cosine == pytest.approx(29 / (5 * math.sqrt(37)), rel=1e-15)
    assert (c.worst_index, c.worst_actual, c.worst_expected) == ((2,), 4.0, 2.0)
    assert c.agrees(rel_l2=0.41, max_abs=2.0)
    assert not c.agrees(rel_l2=0.39)
    assert not c.agrees(max_abs=1.9)


def test_nan_never_passes() -> None:
    """`(a - b).abs().max() < tol` is what let an output of nothing but NaN through."""
    c = compare(torch.full((4,), NAN), torch.zeros(4))
    assert c.nan_mismatches == 4
    assert not c.agrees(rel_l2=INF, max_abs=INF)
    assert not compare(torch.zeros(4), torch.full((4,), NAN)).agrees()


def test_nan_in_the_same_places_agrees() -> None:
    c = compare(t(NAN, 1, 2), t(NAN, 1, 3))
    assert (c.nan_mismatches, c.max_abs) == (0, 1.0)


@pytest.mark.parametrize(
    ("actual", "expected", "nan", "inf"),
    [
        (INF, -INF, 0, 1),
        (-INF, INF, 0, 1),
        (INF, 1.0, 0, 1),
        (1.0, INF, 0, 1),
        (INF, INF, 0, 0),
        (-INF, -INF, 0, 0),
        (NAN, INF, 1, 0),
        (INF, NAN, 1, 0),
        (NAN, NAN, 0, 0),
    ],
)
def test_infinities_have_signs(actual: float, expected: float, nan: int, inf: int) -> None:
    c = compare(t(0.0, actual), t(0.0, expected))
    assert (c.nan_mismatches, c.inf_mismatches) == (nan, inf)
    assert c.agrees() == (nan + inf == 0)
    # No inf - inf has leaked into the figures.
    assert (c.max_abs, c.rel_l2, c.cosine) == (0.0, 0.0, 1.0)


def test_a_mismatch_is_the_worst_whatever_the_numbers() -> None:
    c = compare(t(1e6, 0, NAN, INF), t(0, 0, 0, INF))
    assert c.worst_index == (2,)
    assert math.isnan(c.worst_actual) and c.worst_expected == 0.0


def test_worst_index_counts_in_every_dimension() -> None:
    actual = torch.zeros(2, 3, 4)
    actual[1, 2, 0] = -7.0
    c = compare(actual, torch.zeros(2, 3, 4))
    assert (c.worst_index, c.worst_actual, c.max_abs) == ((1, 2, 0), -7.0, 7.0)


def test_expected_zero_gives_the_plain_norm() -> None:
    c = compare(t(3, 4), t(0, 0))
    assert (c.rel_l2, c.cosine) == (5.0, 0.0)
    assert (compare(t(0, 0), t(0, 0)).rel_l2, compare(t(0, 0), t(0, 0)).cosine) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_nothing_to_compare(shape: tuple[int, ...]) -> None:
    c = compare(torch.zeros(shape), torch.zeros(shape))
    assert c.agrees(rel_l2=0.0, max_abs=0.0)
    assert c.worst_index == ()


def test_a_scalar_has_the_empty_index() -> None:
    c = compare(torch.tensor(2.0), torch.tensor(1.0))
    assert (c.worst_index, c.worst_actual, c.max_abs) == ((), 2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_and_bools(dtype: torch.dtype) -> None:
    c = compare(torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([1, 1, 1], dtype=dtype))
    assert (c.max_abs, c.worst_index) == (1.0, (1,))


def test_dtypes_may_differ_and_nothing_is_rounded_on_the_way() -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert compare(third.float(), third).max_abs == abs(float(third.float()) - 1 / 3)
    assert compare(third.float(), third).max_abs > 0


def test_a_broadcast_would_hide_a_missing_row() -> None:
    with pytest.raises(ValueError, match=r"actual .*\[1, 3\].*expected .*\[2, 3\]"):
        compare(torch.zeros(1, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["actual", "expected"])
@pytest.mark.parametrize("wrong", [None, 1.0, [1.0], torch.ones(1, dtype=torch.complex64)])
def test_only_tensors_of_real_numbers(name: str, wrong: object) -> None:
    arguments = {"actual": torch.ones(1), "expected": torch.ones(1)} | {name: wrong}
    with pytest.raises(TypeError, match=name):
        raw(compare)(**arguments)


def test_one_line_and_json_say_what_differs() -> None:
    line = str(compare(t(1, NAN, INF), t(1, 2, 3)))
    assert "\n" not in line
    assert "NaN differs at 1, inf at 1" in line
    assert "[1]: nan instead of 2" in line
    figures = json.loads(json.dumps(compare(t(1, NAN), t(1, 2)).to_json(), allow_nan=False))
    assert (figures["nan_mismatches"], figures["worst_actual"]) == (1, "nan")
    assert "NaN" not in str(compare(t(1), t(2)))


def test_inputs_stay_as_they_are() -> None:
    a, e = t(1, NAN, INF), t(NAN, 2, INF)
    a0, e0 = a.clone(), e.clone()
    compare(a, e)
    assert torch.equal(a.nan_to_num(7), a0.nan_to_num(7))
    assert torch.equal(e.nan_to_num(7), e0.nan_to_num(7))

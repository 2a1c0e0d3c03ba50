"""The precision rule passes honest arithmetic and fails what errs three times as much."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.numerics import precision_rule
from mla_ref.numerics.precision import ulp

BF16 = torch.bfloat16


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """An oracle and its rounding to bfloat16, which every honest kernel loses at least."""
    oracle = torch.randn(6, 4, 32, dtype=torch.float64)
    return oracle, oracle.to(BF16)


def test_ulp_is_the_distance_of_neighbours() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        values = torch.tensor([1.0, 1.5, 2.0, -4.0, 0.75, 0.0], dtype=torch.float64)
        smallest = torch.finfo(dtype).smallest_normal * eps  # spacing of the subnormals
        expected = (
            torch.tensor([1.0, 1.0, 2.0, 4.0, 0.5, smallest / eps], dtype=torch.float64) * eps
        )
        assert torch.equal(ulp(values, dtype), expected)


def test_ulp_in_bfloat16_against_the_bit_pattern() -> None:
    """Bit patterns of neighbouring positive numbers are neighbouring integers."""
    x = torch.tensor([0.1, 1.0, 3.14, 100.0, 448.0], dtype=BF16)
    following = (x.view(torch.int16) + 1).view(BF16)
    assert torch.equal(ulp(x, BF16), following.double() - x.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ulp_just_below_a_power_of_two(dtype: torch.dtype) -> None:
    """log2 of 2 - 2^-52 rounds to 1, which would be the ulp of 2."""
    for exponent in range(-60, 60, 3):
        power = torch.tensor(2.0**exponent, dtype=torch.float64)
        below = torch.nextafter(power, torch.zeros_like(power))
        eps = torch.finfo(dtype).eps
        assert ulp(below, dtype) == eps * power / 2 and ulp(power, dtype) == eps * power
        assert ulp(-below, dtype) == eps * power / 2


def test_ulp_of_what_is_no_number() -> None:
    found = ulp(torch.tensor([math.inf, -math.inf, math.nan, 1.0]), torch.float32)
    assert found[:2].tolist() == [math.inf, math.inf] and found[2].isnan() and found[3] == 2**-23


def test_the_twin_itself_passes() -> None:
    oracle, twin = problem()
    verdict = precision_rule(twin, oracle, twin)
    assert verdict.passed
    assert verdict.worst_error <= verdict.limit


@pytest.mark.parametrize(("error", "passed"), [(2.0, True), (2.5, True), (3.0, False)])
def test_twice_the_twins_error_and_one_ulp(error: float, passed: bool) -> None:
    """The twin errs by 1 in one row, whose maximum is 64: an ulp of bfloat16 is 0.5 there."""
    oracle = torch.full((3, 8), 64.0, dtype=torch.float64)
    twin, actual = oracle.clone(), oracle.to(BF16)
    twin[1, 2] += 1.0
    actual[1, 5] += error
    verdict = precision_rule(actual, oracle, twin)
    assert verdict.passed is passed
    if error > 2:
        assert verdict.worst_row == (1,)
        assert (verdict.worst_error, verdict.limit) == (error, 2.5)


def test_three_times_the_rounding_error_fails() -> None:
    oracle, twin = problem()
    worse = oracle + 3.5 * (twin.double() - oracle)
    # In float64 the ulp adds nothing, so the factor alone decides.
    assert not precision_rule(worse, oracle, twin).passed
    assert precision_rule(oracle + 1.9 * (twin.double() - oracle), oracle, twin).passed


def test_rows_are_judged_one_by_one() -> None:
    """A row of small numbers is not excused by the error of a row of large ones."""
    oracle = torch.ones(2, 4, dtype=torch.float64)
    oracle[1] *= 1e6
    twin = oracle.clone()
    twin[1] += 100.0
    actual = oracle.clone()
    actual[0, 3] += 1.0
    verdict = precision_rule(actual, oracle, twin)
    assert not verdict.passed
    assert verdict.worst_row == (0,)
    assert "fails" in str(verdict) and "[0]" in str(verdict)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_fails(bad: float) -> None:
    oracle, twin = problem()
    actual = twin.clone()
    actual[2, 1, 5] = bad
    assert not precision_rule(actual, oracle, twin).passed


def test_a_broken_twin_allows_nothing() -> None:
    """NaN or inf in the twin is no yardstick, and no excuse for a NaN in the kernel."""
    oracle, twin = problem()
    twin[2] = math.nan
    actual = oracle.to(BF16)
    actual[2, 1, 5] = math.nan
    assert not precision_rule(actual, oracle, twin).passed
    actual = oracle.to(BF16)
    actual[2] *= 1.1
    assert not precision_rule(actual, oracle, twin).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_twin_that_is_broken_in_one_number_allows_an_ulp_in_its_row(bad: float) -> None:
    """Its other numbers are no yardstick either; a row beside it keeps its own."""
    oracle = torch.ones(2, 2, dtype=torch.float64)
    twin = torch.tensor([[bad, 1.2], [1.0, 1.2]])
    actual = torch.tensor([[1.0, 1.0], [1.39, 1.0]])
    assert precision_rule(actual, oracle, twin).passed
    actual[0, 0] = 1.0 + 2**-23
    assert precision_rule(actual, oracle, twin).passed
    actual[0, 0] = 1.39
    verdict = precision_rule(actual, oracle, twin)
    assert not verdict.passed
    assert (verdict.worst_row, verdict.limit) == ((0,), 2**-23)


def test_the_same_infinities_pass() -> None:
    oracle, twin = problem()
    oracle[0, 0, 0], twin[0, 0, 0] = math.inf, math.inf
    oracle[1, 1, 1], twin[1, 1, 1] = math.nan, math.nan
    assert precision_rule(twin, oracle, twin).passed


def test_rows_of_zeros_must_be_zero() -> None:
    """A row that sees nothing is exactly 0; one subnormal ulp is all that is left to chance."""
    oracle = torch.zeros(2, 8, dtype=torch.float64)
    assert precision_rule(oracle.to(BF16), oracle, oracle.to(BF16)).passed
    wrong = oracle.to(BF16)
    wrong[1, 3] = 1e-30
    assert not precision_rule(wrong, oracle, oracle.to(BF16)).passed


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_judge_passes(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    assert precision_rule(empty, empty.double(), empty).passed


@pytest.mark.parametrize("name", ["actual", "oracle", "twin"])
def test_bad_input_is_named(name: str) -> None:
    good = {name: torch.ones(2, 3) for name in ("actual", "oracle", "twin")}
    for wrong in (None, torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2)):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(precision_rule)(**(good | {name: wrong}))

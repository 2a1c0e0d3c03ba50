"""E4M3 bytes against the format's definition, and the scale rules by their published numbers."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.numerics.float8 import (
    SCALE_READERS,
    SCALE_RULES,
    from_e4m3,
    group_scale,
    power_of_two_at_least,
    power_of_two_at_most,
    read_scale,
    to_e4m3,
)


def by_definition(byte: int) -> float:
    """What an E4M3 byte means: sign, exponent with bias 7, three mantissa bits; 0x7F is NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
VALUES = torch.tensor([by_definition(b) for b in range(256)])


def test_B127_every_byte_means_what_the_format_says() -> None:
    assert torch.equal(from_e4m3(EVERY_BYTE).nan_to_num(999.0), VALUES.nan_to_num(999.0))
    # Both ways, the two zeros and the NaN with its sign included.
    again = to_e4m3(from_e4m3(EVERY_BYTE))
    numbers = ~VALUES.isnan()
    assert torch.equal(again[numbers], EVERY_BYTE[numbers])
    assert from_e4m3(again[~numbers]).isnan().all()


def test_B047_overflow_saturates_and_small_numbers_round() -> None:
    cases = {
        448.0: 0x7E,
        464.0: 0x7E,
        465.0: 0x7E,
        1000.0: 0x7E,
        math.inf: 0x7E,
        -1000.0: 0xFE,
        -math.inf: 0xFE,
        2.0**-9: 0x01,
        2.0**-10: 0x00,
    }
    assert to_e4m3(torch.tensor(list(cases))).tolist() == list(cases.values())
    assert int(to_e4m3(torch.tensor(math.nan))) & 0x7F == 0x7F


def test_rounding_is_to_the_nearest_and_ties_go_to_even() -> None:
    x = torch.randn(20_000) * 10
    finite = VALUES[~VALUES.isnan()]
    nearest = (x[:, None] - finite).abs().amin(dim=1)
    assert torch.equal((from_e4m3(to_e4m3(x)) - x).abs(), nearest)
    # 17 and 19 lie in the middle of 16, 18, 20; 16 and 20 have the even mantissa.
    assert from_e4m3(to_e4m3(torch.tensor([17.0, 19.0]))).tolist() == [16.0, 20.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_float_dtypes_give_the_same_bytes(dtype: torch.dtype) -> None:
    x = VALUES[~VALUES.isnan()].to(dtype)
    assert torch.equal(to_e4m3(x), to_e4m3(x.float()))


def test_powers_of_two_are_exact_next_to_a_power() -> None:
    for exponent in range(-120, 120):
        power = torch.tensor(2.0**exponent)
        above = torch.nextafter(power, torch.tensor(math.inf))
        below = torch.nextafter(power, torch.tensor(0.0))
        assert power_of_two_at_least(torch.stack([below, power, above])).tolist() == [
            2.0**exponent,
            2.0**exponent,
            2.0 ** (exponent + 1),
        ]
        assert power_of_two_at_most(torch.stack([below, power, above])).tolist() == [
            2.0 ** (exponent - 1),
            2.0**exponent,
            2.0**exponent,
        ]


def test_B049_power_of_two_scales_by_their_published_numbers() -> None:
    amax = torch.tensor([0.0, 0.0546875, 0.0547, 1.0, 100.0, 448.0, 449.0])
    expected = [2.0**-13, 2.0**-13, 2.0**-12, 2.0**-8, 0.25, 1.0, 2.0]
    assert group_scale(amax, "pow2").tolist() == expected
    # The floor on amax in place of the quotient allows far smaller scales.
    assert group_scale(torch.tensor([0.0, 449.0]), "pow2-floor").tolist() == [2.0**-22, 2.0]


def test_B049_a_reader_that_truncates_is_right_on_powers_of_two_only() -> None:
    amax = torch.rand(1000) * 100
    for rule in SCALE_RULES:
        stored = group_scale(amax, rule)
        ratio = read_scale(stored, "truncated") / stored
        if rule.startswith("pow2"):
            assert torch.equal(ratio, torch.ones_like(ratio))
        else:
            assert ratio.min() < 0.6
            assert ratio.max() <= 1.0
    assert torch.equal(read_scale(amax, "stored"), amax)


def test_B048_a_group_of_zeros_has_a_usable_scale() -> None:
    for rule in SCALE_RULES:
        scale = float(group_scale(torch.tensor(0.0), rule))
        assert math.isfinite(scale)
        assert scale >= 2.0**-126
    assert float(group_scale(torch.tensor(0.0), "fp32-one")) == 1.0
    assert float(group_scale(torch.tensor(0.0), "fp32-floor")) == pytest.approx(1e-4 / 448)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_scaled_group_never_saturates(rule: str) -> None:
    amax = torch.logspace(-38, 38, 2000)
    assert ((amax / group_scale(amax, rule)) <= 448.0 * (1 + 2**-22)).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_nan_and_infinity_are_not_hidden_by_a_floor_or_a_power_of_two(rule: str) -> None:
    amax = torch.tensor([math.nan, 3.0, math.inf])
    scale = group_scale(amax, rule)
    assert scale[0].isnan() and scale[2] == math.inf
    assert scale[1] == group_scale(amax[1], rule)
    truncated = read_scale(scale, "truncated")
    assert truncated[0].isnan() and truncated[2] == math.inf
    assert truncated[1] == read_scale(scale[1], "truncated")


@pytest.mark.parametrize(
    ("function", "choices"), [(group_scale, SCALE_RULES), (read_scale, SCALE_READERS)]
)
def test_an_unknown_choice_lists_the_choices(function, choices) -> None:
    with pytest.raises(ValueError, match=choices[0]):
        raw(function)(torch.ones(2), "e8m0")

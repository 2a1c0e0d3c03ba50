"""MXFP8 against ml_dtypes, torch's own E8M0 and exact fractions; scales at every edge."""

import math
from fractions import Fraction

import pytest
import torch
from tests.support import raw

from mla_ref.numerics import MXFP8Tensor, dequantise_mxfp8, quantise_mxfp8
from mla_ref.numerics.mxfp8 import MXFP8_SCALE_RULES, from_e8m0, mxfp8_scale

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
FLOAT32_MAX = torch.finfo(torch.float32).max
needs_e8m0 = pytest.mark.skipif(
    not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no E8M0"
)


def byte_by_fractions(amax: float, rule: str) -> int:
    """The scale byte from its definition, by search in exact arithmetic."""
    exponent = -300
    if rule == "ceil":  # the smallest power of two under which amax is at most 448
        while Fraction(amax) > 448 * Fraction(2) ** exponent:
            exponent += 1
    else:  # the largest power of two that is at most amax, over 2^8
        while Fraction(2) ** (exponent + 1) <= Fraction(amax):
            exponent += 1
        exponent -= 8
    return max(exponent, -127) + 127


def around(value: float) -> list[float]:
    """A float32 and its two neighbours."""
    x = torch.tensor(value)
    return [
        float(torch.nextafter(x, torch.tensor(0.0))),
        float(x),
        float(torch.nextafter(x, torch.tensor(math.inf))),
    ]


def hostile() -> torch.Tensor:
    """40 groups: magnitudes from 2^-140 to 2^120, zeros among them, one group all zero."""
    x = torch.randn(40, 32) * 2.0 ** torch.linspace(-140, 120, 40)[:, None]
    x[:, 3] = 0.0
    x[7] = 0.0
    return x


def test_every_scale_byte_is_a_power_of_two() -> None:
    scales = from_e8m0(EVERY_BYTE)
    assert scales[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert scales[255].isnan()


@needs_e8m0
def test_every_scale_byte_as_torch_reads_it() -> None:
    theirs = EVERY_BYTE.view(torch.float8_e8m0fnu).float()
    assert torch.equal(from_e8m0(EVERY_BYTE)[:255], theirs[:255])
    assert theirs[255].isnan()


def test_every_byte_of_both_kinds_as_ml_dtypes_reads_it() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    elements = EVERY_BYTE.numpy().view(ml_dtypes.float8_e4m3fn).astype("float64")
    for scale in (0, 1, 100, 127, 254, 255):
        scales = torch.full((8,), scale, dtype=torch.uint8)
        factor = scales[:1].numpy().view(ml_dtypes.float8_e8m0fnu).astype("float64")
        expected = torch.from_numpy(elements * factor)
        got = dequantise_mxfp8(MXFP8Tensor(EVERY_BYTE, scales), torch.float64)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("rule", MXFP8_SCALE_RULES)
def test_the_scale_by_its_definition(rule: str) -> None:
    """At powers of two, at 448 times a power, one unit beside each, and in between."""
    amax = [v for e in (-149, -130, -120, -110, -1, 0, 1, 60, 127) for v in around(2.0**e)]
    amax += [v for e in (-130, -127, -126, -9, 0, 1, 100) for v in around(448 * 2.0**e)]
    amax += [*torch.logspace(-44, 38, 300).tolist(), FLOAT32_MAX]
    amax = [v for v in amax if v > 0]
    expected = [byte_by_fractions(v, rule) for v in amax]
    assert mxfp8_scale(torch.tensor(amax), rule).tolist() == expected


def test_the_rules_differ_between_448_and_512_only() -> None:
    amax = torch.tensor([256.0, 447.0, 448.0, 448.00003, 511.0, 512.0])
    assert mxfp8_scale(amax, "floor").tolist() == [127] * 5 + [128]
    assert mxfp8_scale(amax, "ceil").tolist() == [127] * 3 + [128] * 3


def test_an_exact_power_of_two_becomes_256() -> None:
    """Both rules; a scale that is rounded up once too often would give 128."""
    for rule in MXFP8_SCALE_RULES:
        data, scales = quantise_mxfp8(torch.eye(32) * 0.25, scale_rule=rule)
        assert scales.eq(127 - 2 - 8).all()
        assert data.diagonal().eq(0x78).all()


@needs_e8m0
def test_a_cast_to_e8m0_rounds_to_nearest_and_would_saturate() -> None:
    """Why the rule is not `(amax / 448).to(float8_e8m0fnu)`: 1.2 becomes 1, and 538 becomes 448."""
    amax = torch.tensor([538.0])
    cast = (amax / 448).to(torch.float8_e8m0fnu).view(torch.uint8)
    assert cast.item() == 127
    assert mxfp8_scale(amax).item() == 128


@pytest.mark.parametrize("rule", MXFP8_SCALE_RULES)
def test_elements_are_rounded_as_ml_dtypes_rounds_them(rule: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = hostile()
    data, scales = quantise_mxfp8(x, scale_rule=rule)
    assert scales[:, 0].tolist() == [
        byte_by_fractions(v, rule) if v else 0 for v in x.abs().amax(dim=1).tolist()
    ]
    scaled = (x.double() / 2.0 ** (scales.double() - 127)).clamp(-448, 448)
    expected = scaled.numpy().astype("float32").astype(ml_dtypes.float8_e4m3fn).view("uint8")
    assert torch.equal(data, torch.from_numpy(expected))


def test_nothing_saturates_and_the_error_is_bounded() -> None:
    """Half a step of a 3-bit mantissa, or of the smallest step of the group."""
    x = hostile()
    quantised = quantise_mxfp8(x)
    scale = from_e8m0(quantised.scales).double()
    assert (x.double().abs() / scale <= 448).all()
    error = (dequantise_mxfp8(quantised, torch.float64) - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10)).all()


def test_B047_beyond_the_largest_element() -> None:
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([511.0, -511.0, 448.00003, 465.0, 2.0**-10])
    data, scales = quantise_mxfp8(x, scale_rule="floor")
    assert scales.tolist() == [[127]]
    assert data[0, :5].tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x00]
    # The other rule takes the next power of two: 511 / 2 is nearest to 256.
    data, scales = quantise_mxfp8(x)
    assert scales.tolist() == [[128]]
    assert data[0, :2].tolist() == [0x78, 0xF8]


@pytest.mark.parametrize("rule", MXFP8_SCALE_RULES)
def test_B048_a_group_of_zeros(rule: str) -> None:
    x = torch.randn(3, 96)
    x[1, 32:64] = 0.0
    x[2, 32:64] = -0.0
    data, scales = quantise_mxfp8(x, scale_rule=rule)
    assert scales[1:, 1].eq(0).all()
    assert data[1, 32:64].eq(0).all()
    back = dequantise_mxfp8(MXFP8Tensor(data, scales))
    assert back.isfinite().all()
    assert back[1:, 32:64].eq(0).all()
    assert back[2, 32:64].signbit().all()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_inf_mark_their_group_alone(bad: float) -> None:
    x = torch.randn(2, 96)
    clean = quantise_mxfp8(x)
    x[0, 40] = bad
    data, scales = quantise_mxfp8(x)
    assert scales[0, 1] == 255
    assert data[0, 32:64].eq(0x7F).all()
    back, before = dequantise_mxfp8(MXFP8Tensor(data, scales)), dequantise_mxfp8(clean)
    assert back[0, 32:64].isnan().all()
    back[0, 32:64] = before[0, 32:64]
    assert torch.equal(back, before)


def test_below_the_smallest_scale() -> None:
    """Clamped to 2^-127: steps of 2^-136, and what is under half of one is 0."""
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([2.0**-119, 2.0**-120, 2.0**-136, 2.0**-138])
    data, scales = quantise_mxfp8(x)
    assert scales.eq(0).all()
    assert data[:, 0].tolist() == [0x78, 0x70, 0x01, 0x00]
    assert dequantise_mxfp8(MXFP8Tensor(data, scales))[:3, 0].tolist() == x[:3, 0].tolist()


def test_the_largest_float32() -> None:
    """It rounds up to 2^128, which float64 can say; the saturating rule stays below."""
    x = torch.full((1, 32), FLOAT32_MAX)
    assert mxfp8_scale(x[:, 0]).item() == 120 + 127
    assert dequantise_mxfp8(quantise_mxfp8(x), torch.float64).eq(2.0**128).all()
    assert dequantise_mxfp8(quantise_mxfp8(x)).isposinf().all()
    floor = dequantise_mxfp8(quantise_mxfp8(x, scale_rule="floor"))
    assert floor.eq(448 * 2.0**119).all()


def test_float32_holds_the_numbers_exactly() -> None:
    quantised = quantise_mxfp8(hostile())
    assert torch.equal(
        dequantise_mxfp8(quantised).double(), dequantise_mxfp8(quantised, torch.float64)
    )


@pytest.mark.parametrize("rule", MXFP8_SCALE_RULES)
def test_numbers_of_the_format_pass_unchanged(rule: str) -> None:
    """What was read back and is written again reads the same, even where its amax has moved."""
    once = dequantise_mxfp8(quantise_mxfp8(hostile(), scale_rule=rule))
    assert torch.equal(dequantise_mxfp8(quantise_mxfp8(once, scale_rule=rule)), once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_float_dtypes_give_the_same_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).to(dtype)
    for part, expected in zip(quantise_mxfp8(x), quantise_mxfp8(x.float()), strict=True):
        assert torch.equal(part, expected)


def test_a_float64_beyond_float32_is_infinite() -> None:
    x = torch.full((1, 32), 1e300, dtype=torch.float64)
    assert quantise_mxfp8(x).scales.item() == 255
    assert dequantise_mxfp8(quantise_mxfp8(1 / x)).eq(0).all()


def test_strides_and_leading_dimensions_do_not_matter() -> None:
    x = torch.randn(64, 3, 5).permute(2, 1, 0)
    data, scales = quantise_mxfp8(x)
    assert data.shape == (5, 3, 64) and scales.shape == (5, 3, 2)
    for part, expected in zip((data, scales), quantise_mxfp8(x.contiguous()), strict=True):
        assert torch.equal(part, expected)
    flat = quantise_mxfp8(x.reshape(-1))
    assert torch.equal(flat.data, data.flatten())
    strided = MXFP8Tensor(
        torch.stack([data, data], dim=-1)[..., 0], torch.stack([scales, scales], dim=-1)[..., 0]
    )
    assert torch.equal(dequantise_mxfp8(strided), dequantise_mxfp8(MXFP8Tensor(data, scales)))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (2, 0, 32)])
def test_nothing_to_quantise(shape: tuple[int, ...]) -> None:
    quantised = quantise_mxfp8(torch.zeros(shape))
    assert quantised.nbytes == 0
    assert dequantise_mxfp8(quantised).shape == shape


def test_it_takes_8_and_a_quarter_bits_a_number() -> None:
    assert quantise_mxfp8(torch.randn(7, 320)).nbytes * 8 == 7 * 320 * 8.25


def test_bad_input_is_named() -> None:
    for wrong in (torch.zeros(4, 33), torch.zeros(4, 16), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x must have a multiple of 32"):
            raw(quantise_mxfp8)(wrong)
    for kind in (torch.zeros(32, dtype=torch.int32), [0.0] * 32, None):
        with pytest.raises(TypeError, match="x must be a floating-point tensor"):
            raw(quantise_mxfp8)(kind)
    with pytest.raises(ValueError, match="rule must be one of ceil, floor"):
        raw(quantise_mxfp8)(torch.zeros(32), scale_rule="nearest")
    data, scales = quantise_mxfp8(torch.zeros(4, 64))
    with pytest.raises(ValueError, match="scales must have one byte for each 32 bytes of data"):
        raw(dequantise_mxfp8)(MXFP8Tensor(data, scales[:, :1]))
    with pytest.raises(ValueError, match="scales must have one byte"):
        raw(dequantise_mxfp8)(MXFP8Tensor(data, scales[:2]))
    with pytest.raises(ValueError, match="data must have the shape"):
        raw(dequantise_mxfp8)(MXFP8Tensor(data[0, 0], scales))
    with pytest.raises(TypeError, match="scales must be a uint8 tensor"):
        raw(dequantise_mxfp8)(MXFP8Tensor(data, scales.float()))
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64"):
        raw(dequantise_mxfp8)(MXFP8Tensor(data, scales), torch.bfloat16)

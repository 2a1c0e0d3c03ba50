"""NVFP4 and its E2M1 codes against ml_dtypes, a search over all codes, and bytes by hand."""

import math

import numpy as np
import pytest
import torch
from tests.support import raw

from mla_ref.numerics import NVFP4Tensor, dequantise_nvfp4, quantise_nvfp4
from mla_ref.numerics.float4 import from_e2m1, pack_e2m1, to_e2m1, unpack_e2m1
from mla_ref.numerics.float8 import from_e4m3
from mla_ref.numerics.nvfp4 import (
    GLOBAL_SCALE_READERS,
    nvfp4_global_scale,
    read_global_scale,
)

EVERY_CODE = torch.arange(16, dtype=torch.uint8)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FLOAT32_MAX = torch.finfo(torch.float32).max


def by_definition(code: int) -> float:
    """What an E2M1 code means: sign, exponent with bias 1, one mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


VALUES = torch.tensor([by_definition(c) for c in range(16)])


def probes() -> torch.Tensor:
    """Each code, each midpoint and one unit beside them, a fine grid, and beyond the ends."""
    exact = torch.tensor([*VALUES[:8].tolist(), *MIDPOINTS])
    above = torch.nextafter(exact, torch.tensor(math.inf))
    below = torch.nextafter(exact, torch.tensor(-math.inf)).clamp(min=0)
    grid = torch.cat([exact, above, below, torch.arange(0, 8, 1 / 64), torch.rand(500) * 7])
    grid = torch.cat([grid, torch.tensor([1e-45, 1e30, math.inf])])
    return torch.cat([grid, -grid])


def test_every_code_means_what_the_format_says() -> None:
    assert torch.equal(from_e2m1(EVERY_CODE), VALUES)
    assert from_e2m1(EVERY_CODE[8:9]).signbit().item()
    assert torch.equal(to_e2m1(VALUES), EVERY_CODE)
    # Only the low half of a byte is read.
    assert torch.equal(from_e2m1(EVERY_CODE + 0xF0), VALUES)


def test_codes_and_rounding_as_ml_dtypes_has_them() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = EVERY_CODE.numpy().view(ml_dtypes.float4_e2m1fn).astype("float32")
    assert torch.equal(from_e2m1(EVERY_CODE), torch.from_numpy(theirs))
    x = probes()
    expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8")
    assert torch.equal(to_e2m1(x), torch.from_numpy(expected))


def test_rounding_is_to_the_nearest_of_all_codes() -> None:
    x = probes()
    x = x[x.isfinite()].double()
    got = from_e2m1(to_e2m1(x)).double()
    assert torch.equal((got - x).abs(), (x[:, None] - VALUES.double()).abs().amin(dim=1))


def test_ties_go_to_the_even_code() -> None:
    assert to_e2m1(torch.tensor(MIDPOINTS)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert to_e2m1(-torch.tensor(MIDPOINTS)).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_what_has_no_code() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e30, -7.0, math.nan, -math.nan, -0.0, -1e-45])
    assert to_e2m1(x).tolist() == [7, 15, 7, 15, 7, 7, 8, 8]


def test_strided_numbers_give_the_same_codes_and_no_warning() -> None:
    x = torch.randn(8, 6).T * 3
    assert torch.equal(to_e2m1(x), to_e2m1(x.contiguous()))


def test_the_even_element_lies_in_the_low_half() -> None:
    codes = torch.tensor([[1, 15, 8, 7], [0, 2, 3, 4]], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [[0xF1, 0x78], [0x20, 0x43]]
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_e2m1(unpack_e2m1(every_byte)), every_byte)
    with pytest.raises(ValueError, match="even number"):
        raw(pack_e2m1)(codes[:, :3])


def test_bytes_by_hand() -> None:
    """The largest number is 6 * 448, so the factor is 1; the second group has scale 2."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([2688.0, -448.0, 224.0])
    x[0, 16:20] = torch.tensor([12.0, -1.0, 1.5, 100 / 12])
    data, scales, factor = quantise_nvfp4(x)
    assert factor.item() == 1.0
    assert scales.tolist() == [[0x7E, 0x40]]
    # 6, -1 | 0.5, 0   and   6, -0.5 | 0.75 -> 1 (even), 4.17 -> 4
    assert data[0, :2].tolist() == [0xA7, 0x01]
    assert data[0, 8:10].tolist() == [0x97, 0x62]
    back = dequantise_nvfp4(NVFP4Tensor(data, scales, factor))
    assert back[0, :4].tolist() == [2688.0, -448.0, 224.0, 0.0]
    assert back[0, 16:20].tolist() == [12.0, -1.0, 2.0, 8.0]


def test_a_whole_tensor_as_ml_dtypes_and_numpy_make_it() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = torch.randn(24, 64) * torch.logspace(-4, 3, 24)[:, None]
    groups = x.numpy().reshape(24, 4, 16)
    amax = np.abs(groups).max(axis=-1)
    factor = np.float32(amax.max() / np.float32(2688))
    scales = (amax / (np.float32(6) * factor)).astype(ml_dtypes.float8_e4m3fn)
    step = scales.astype(np.float32) * factor
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(step[..., None] == 0, np.float32(0), groups / step[..., None])
    codes = scaled.astype(ml_dtypes.float4_e2m1fn)
    got = quantise_nvfp4(x)
    assert got.global_scale.item() == factor
    assert got.scales.tolist() == scales.view(np.uint8).tolist()
    assert unpack_e2m1(got.data).tolist() == codes.view(np.uint8).reshape(24, 64).tolist()
    expected = codes.astype(np.float64) * scales.astype(np.float64)[..., None] * np.float64(factor)
    assert dequantise_nvfp4(got, torch.float64).tolist() == expected.reshape(24, 64).tolist()


def test_every_number_is_the_nearest_that_its_group_can_say() -> None:
    x = torch.randn(6, 48) * 3
    quantised = quantise_nvfp4(x)
    step = from_e4m3(quantised.scales).double() * quantised.global_scale.double()
    choices = step.repeat_interleave(16, dim=1)[..., None] * VALUES.double()
    nearest = (choices - x.double()[..., None]).abs().amin(dim=-1)
    error = (dequantise_nvfp4(quantised, torch.float64) - x.double()).abs()
    assert (error <= nearest * (1 + 1e-6) + 1e-12).all()


def test_codes_are_made_with_the_rounded_scale() -> None:
    """Group amax 6 * 17 wants the scale 17, E4M3 has 16 and 18: 17 rounds to 16 (even)."""
    x = torch.zeros(2, 16)
    x[0, 0] = 2688.0
    x[1, :2] = torch.tensor([102.0, 56.0])
    quantised = quantise_nvfp4(x)
    assert from_e4m3(quantised.scales).tolist() == [[448.0], [16.0]]
    # 102 / 16 saturates at 6. 56 / 16 is the midpoint 3.5 and goes to 4; 56 / 17 would be 3.
    assert dequantise_nvfp4(quantised)[1, :2].tolist() == [96.0, 64.0]


def test_the_factor_is_rounded_once_in_float32_and_never_in_float64() -> None:
    x = torch.randn(8, 64)
    quantised = quantise_nvfp4(x)
    exact = dequantise_nvfp4(quantised, torch.float64)
    assert torch.equal(dequantise_nvfp4(quantised), exact.float())
    # Without the factor even bfloat16 holds every number.
    unit = NVFP4Tensor(quantised.data, quantised.scales, torch.tensor(1.0))
    assert torch.equal(dequantise_nvfp4(unit).bfloat16().float(), dequantise_nvfp4(unit))


def test_B048_a_tensor_of_zeros_and_a_group_of_zeros() -> None:
    for x in (torch.zeros(2, 32), -torch.zeros(2, 32)):
        quantised = quantise_nvfp4(x)
        assert quantised.global_scale.item() == 2.0**-126
        assert quantised.scales.eq(0).all()
        assert dequantise_nvfp4(quantised).eq(0).all()
    x = torch.randn(2, 48)
    x[1, 16:32] = 0.0
    quantised = quantise_nvfp4(x)
    assert quantised.scales[1, 1] == 0 and quantised.data[1, 8:16].eq(0).all()
    assert dequantise_nvfp4(quantised).isfinite().all()
    assert dequantise_nvfp4(quantised)[1, 16:32].eq(0).all()


def test_a_group_too_small_beside_the_tensor_reads_as_zeros() -> None:
    """Under half of E4M3's smallest step; just above it the scale is 2^-9."""
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[2, 0] = 2688.0, 6 * 2.0**-10, 6 * 2.0**-10 * 1.01
    quantised = quantise_nvfp4(x)
    assert quantised.scales[:, 0].tolist() == [0x7E, 0x00, 0x01]
    assert quantised.data[1].eq(0).all()
    assert dequantise_nvfp4(quantised)[1:, 0].tolist() == [0.0, 3 * 2.0**-9]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_inf_mark_their_group_alone(bad: float) -> None:
    x = torch.randn(2, 48)
    x[0, 16:32] = 0.0
    clean = quantise_nvfp4(x)
    x[0, 20] = bad
    marked = quantise_nvfp4(x)
    assert marked.global_scale == clean.global_scale
    assert marked.scales[0, 1] == 0x7F and marked.data[0, 8:16].eq(0).all()
    back = dequantise_nvfp4(marked)
    assert back[0, 16:32].isnan().all()
    back[0, 16:32] = 0.0
    assert torch.equal(back, dequantise_nvfp4(clean))


def test_a_tensor_without_a_finite_number() -> None:
    quantised = quantise_nvfp4(torch.full((1, 16), math.inf))
    assert quantised.global_scale.item() == 2.0**-126
    assert dequantise_nvfp4(quantised).isnan().all()


def test_the_ends_of_float32() -> None:
    x = torch.full((1, 16), FLOAT32_MAX)
    assert dequantise_nvfp4(quantise_nvfp4(x))[0].tolist() == pytest.approx([FLOAT32_MAX] * 16)
    # Subnormal numbers: the factor stays a normal number, and the group scale does the rest.
    tiny = torch.full((1, 16), 2.0**-130)
    quantised = quantise_nvfp4(tiny)
    assert quantised.global_scale.item() == 2.0**-126
    assert dequantise_nvfp4(quantised).isfinite().all()
    assert dequantise_nvfp4(quantised)[0].tolist() == pytest.approx([2.0**-130] * 16, rel=0.1)


def test_B062_the_given_factor_reaches_the_bytes() -> None:
    x = torch.randn(4, 64)
    one, four = quantise_nvfp4(x, global_scale=0.25), quantise_nvfp4(x, global_scale=1.0)
    assert one.global_scale == 0.25 and four.global_scale == 1.0
    assert not torch.equal(one.scales, four.scales)
    assert torch.equal(from_e4m3(one.scales), 4 * from_e4m3(four.scales))
    assert torch.equal(one.data, four.data)
    assert torch.equal(dequantise_nvfp4(one), dequantise_nvfp4(four))


def test_a_given_factor_that_is_too_small_saturates() -> None:
    x = torch.full((1, 16), 5000.0)
    assert dequantise_nvfp4(quantise_nvfp4(x, global_scale=1.0)).eq(2688.0).all()


def test_the_reciprocal_reader() -> None:
    stored = torch.tensor(2688.0)
    assert read_global_scale(stored, "reciprocal").item() == pytest.approx(1 / 2688, rel=1e-7)
    assert read_global_scale(stored).item() == 2688.0
    with pytest.raises(ValueError, match="reader must be one of factor, reciprocal"):
        raw(read_global_scale)(stored, "inverse")
    assert read_global_scale(torch.tensor(0.0)).item() == 0.0  # a tensor of zeros, as stored
    for wrong in (math.nan, math.inf, -math.inf, -1.0):
        for reader in GLOBAL_SCALE_READERS:
            with pytest.raises(ValueError, match=f"^stored must be finite and .* got {wrong}$"):
                read_global_scale(torch.tensor(wrong), reader)
    for wrong in (0.0, -0.0, 1e-45):
        with pytest.raises(ValueError, match="^stored must .* one over it finite"):
            read_global_scale(torch.tensor(wrong), "reciprocal")


def test_a_given_factor_whose_largest_group_scale_overflows_is_refused() -> None:
    """6 * factor would be infinity and the scale of every group 0: a tensor of zeros, unseen."""
    last = torch.tensor(FLOAT32_MAX / 6).item()
    x = torch.full((1, 16), FLOAT32_MAX)
    assert dequantise_nvfp4(quantise_nvfp4(x, global_scale=last)).gt(0).all()
    for factor in (5.68e37, 6e37, FLOAT32_MAX):
        with pytest.raises(ValueError, match="global_scale must be so small that 6 times it is"):
            quantise_nvfp4(x, global_scale=factor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_float_dtypes_give_the_same_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).to(dtype)
    for part, expected in zip(quantise_nvfp4(x), quantise_nvfp4(x.float()), strict=True):
        assert torch.equal(part, expected)


def test_strides_and_leading_dimensions_do_not_matter() -> None:
    x = torch.randn(32, 3, 5).permute(2, 1, 0)
    got, expected = quantise_nvfp4(x), quantise_nvfp4(x.contiguous())
    assert got.data.shape == (5, 3, 16) and got.scales.shape == (5, 3, 2)
    for part, other in zip(got, expected, strict=True):
        assert torch.equal(part, other)
    strided = NVFP4Tensor(
        torch.stack([got.data] * 2, dim=-1)[..., 0],
        torch.stack([got.scales] * 2, dim=-1)[..., 0],
        got.global_scale,
    )
    assert torch.equal(dequantise_nvfp4(strided), dequantise_nvfp4(got))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,), (2, 0, 16)])
def test_nothing_to_quantise(shape: tuple[int, ...]) -> None:
    quantised = quantise_nvfp4(torch.zeros(shape))
    assert quantised.nbytes == 4
    assert dequantise_nvfp4(quantised).shape == shape


def test_it_takes_4_and_a_half_bits_a_number_and_one_float() -> None:
    assert (quantise_nvfp4(torch.randn(7, 320)).nbytes - 4) * 8 == 7 * 320 * 4.5


def test_bad_input_is_named() -> None:
    for wrong in (torch.zeros(4, 17), torch.zeros(4, 8), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="x must have a multiple of 16"):
            raw(quantise_nvfp4)(wrong)
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        raw(quantise_nvfp4)(torch.zeros(16, dtype=torch.int8))
    for factor in (0.0, -1.0, math.nan, math.inf, 1e-50):
        with pytest.raises(ValueError, match="global_scale must be finite"):
            raw(quantise_nvfp4)(torch.zeros(16), global_scale=factor)
    data, scales, factor = quantise_nvfp4(torch.zeros(4, 32))
    with pytest.raises(ValueError, match="scales must have one byte for each 8 bytes of data"):
        raw(dequantise_nvfp4)(NVFP4Tensor(data, scales[:, :1], factor))
    with pytest.raises(TypeError, match="data must be a uint8 tensor"):
        raw(dequantise_nvfp4)(NVFP4Tensor(data.int(), scales, factor))
    with pytest.raises(TypeError, match="global_scale must be a float32 tensor"):
        raw(dequantise_nvfp4)(NVFP4Tensor(data, scales, factor.double()))
    with pytest.raises(ValueError, match="global_scale must be one number"):
        raw(dequantise_nvfp4)(NVFP4Tensor(data, scales, factor.expand(4)))
    with pytest.raises(ValueError, match="dtype must be"):
        raw(dequantise_nvfp4)(NVFP4Tensor(data, scales, factor), torch.float16)
    assert nvfp4_global_scale(torch.tensor([[1.0, -2688.0]])).item() == 1.0

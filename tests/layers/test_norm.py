"""RMSNorm and LayerNorm: numbers by hand, their eps, and where they round."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.layers import layer_norm, rms_norm


def test_numbers_by_hand() -> None:
    """(3, 4): mean square 12.5, root 5 / sqrt(2); weight (1, 10)."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    got = rms_norm(x, torch.tensor([1.0, 10.0], dtype=torch.float64), eps=1e-30)
    assert got[0].tolist() == pytest.approx([3 * math.sqrt(2) / 5, 8 * math.sqrt(2)], rel=1e-14)


def test_eps_is_inside_the_root() -> None:
    """Mean square 4 and eps 12: divided by sqrt(16), not by 2 + sqrt(12)."""
    x = torch.full((1, 3), 2.0)
    assert rms_norm(x, torch.ones(3), eps=12.0).tolist() == [[0.5, 0.5, 0.5]]


def test_B080_the_eps_matters_for_small_latents() -> None:
    """A latent of 0.01: with 1e-6 it grows to about 1, with 1e-2 it hardly does."""
    x = torch.full((1, 4), 0.01, dtype=torch.float64)
    weight = torch.ones(4, dtype=torch.float64)
    small, large = rms_norm(x, weight, eps=1e-6), rms_norm(x, weight, eps=1e-2)
    assert small[0, 0].item() == pytest.approx(0.01 / math.sqrt(1e-4 + 1e-6), rel=1e-12)
    assert large[0, 0].item() == pytest.approx(0.01 / math.sqrt(1e-4 + 1e-2), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Statistics, product and weight in float32; the result is within half a unit of exact."""
    x = (10 * torch.randn(16, 512, dtype=torch.float64)).to(dtype)
    weight = (1 + 0.3 * torch.randn(512, dtype=torch.float64)).to(dtype)
    got = rms_norm(x, weight, eps=1e-6)
    assert got.dtype == dtype
    wide = x.double()
    exact = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    half_unit = torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= exact.abs() * (half_unit + 1e-6) + 1e-7).all()


def test_float16_squares_do_not_overflow() -> None:
    """300 squared is beyond float16's 65504."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert rms_norm(x, torch.ones(8), eps=1e-6).tolist() == [[1.0] * 8]


def test_float64_stays_float64() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    got = rms_norm(x, torch.ones(5, dtype=torch.float64), eps=1e-12)
    assert got.dtype == torch.float64
    assert got.square().mean(-1).tolist() == pytest.approx([1.0] * 3, abs=1e-10)


def test_rows_of_zeros_stay_zero() -> None:
    """Padding rows are zeros: 0 / sqrt(0) must not be NaN."""
    assert (rms_norm(torch.zeros(2, 4), torch.ones(4), eps=1e-6) == 0).all()


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 3, 4), (3, 0)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    got = rms_norm(x, torch.ones(shape[-1]), eps=1e-6)
    assert got.shape == shape
    if x.numel():
        rows = [rms_norm(row, torch.ones(4), eps=1e-6) for row in x.reshape(-1, 4)]
        assert torch.allclose(got.reshape(-1, 4), torch.stack(rows), rtol=1e-6)


def test_bad_input_is_named() -> None:
    good = {"x": torch.randn(2, 4), "weight": torch.ones(4), "eps": 1e-6}
    for name, wrong in [
        ("x", None),
        ("x", torch.tensor(1.0)),
        ("x", torch.ones(2, 4, dtype=torch.int64)),
        ("x", torch.randn(2, 5)),
        ("weight", None),
        ("weight", torch.ones(1)),
        ("weight", torch.ones(1, 4)),
        ("eps", 0.0),
        ("eps", -1e-6),
        ("eps", math.nan),
        ("eps", 1e-50),
        ("eps", "1e-6"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(rms_norm)(**(good | {name: wrong}))


# --- LayerNorm


def test_B027_a_layer_norm_is_no_rms_norm() -> None:
    """(1, 2, 3, 4): mean 2.5, variance 1.25. An RMSNorm would give .365, .730, 1.095, 1.461."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    one, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    got = layer_norm(x, one, zero, eps=1e-30)
    sides = [3 / math.sqrt(5), 1 / math.sqrt(5)]
    assert got[0].tolist() == pytest.approx([-sides[0], -sides[1], sides[1], sides[0]], rel=1e-14)
    rms = rms_norm(x, one, eps=1e-30)[0].tolist()
    assert rms == pytest.approx([0.365148, 0.730297, 1.095445, 1.460593], abs=1e-6)


def test_B027_a_constant_row_gives_the_bias() -> None:
    bias = torch.tensor([0.5, -2.0, 3.0])
    for value in (0.0, 7.25, -1e3):
        got = layer_norm(torch.full((1, 3), value), torch.tensor([1.0, 2.0, 3.0]), bias, eps=1e-6)
        assert got[0].tolist() == bias.tolist()


def test_layer_norm_weight_bias_and_eps_by_hand() -> None:
    """(1, 3): deviations -1 and 1, variance 1, eps 3: halves; then times (2, 4), plus (10, 20)."""
    weight, bias = torch.tensor([2.0, 4.0]), torch.tensor([10.0, 20.0])
    assert layer_norm(torch.tensor([[1.0, 3.0]]), weight, bias, eps=3.0).tolist() == [[9.0, 22.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_rounds_low_precision_once(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(16, 128, dtype=torch.float64)).to(dtype)
    weight, bias = torch.randn(128).to(dtype), torch.randn(128).to(dtype)
    got = layer_norm(x, weight, bias, eps=1e-6)
    assert got.dtype == dtype
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    exact = scaled + bias.double()
    half_unit = torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= exact.abs() * half_unit * 1.01 + 1e-5).all()


def test_layer_norm_of_rows_far_from_zero() -> None:
    """Mean 1e4, deviation 1: E[x^2] - E[x]^2 in float32 would lose all of it."""
    x = 1e4 + torch.tensor([[-1.0, 1.0, -1.0, 1.0]])
    got = layer_norm(x, torch.ones(4), torch.zeros(4), eps=1e-12)
    assert got.tolist() == [[-1.0, 1.0, -1.0, 1.0]]


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 3, 4), (3, 0)])
def test_layer_norm_takes_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    got = layer_norm(x, weight, bias, eps=1e-6)
    assert got.shape == shape
    if x.numel():
        rows = [layer_norm(row, weight, bias, eps=1e-6) for row in x.reshape(-1, 4)]
        assert torch.allclose(got.reshape(-1, 4), torch.stack(rows), rtol=1e-6, atol=1e-6)


def test_layer_norm_names_bad_input() -> None:
    good = {"x": torch.randn(2, 4), "weight": torch.ones(4), "bias": torch.ones(4), "eps": 1e-6}
    for name, wrong in [
        ("x", None),
        ("x", torch.tensor(1.0)),
        ("x", torch.ones(2, 4, dtype=torch.int64)),
        ("weight", torch.ones(1)),
        ("weight", torch.ones(4, dtype=torch.int64)),
        ("bias", None),
        ("bias", torch.ones(1)),
        ("bias", torch.ones(1, 4)),
        ("bias", torch.ones(4, dtype=torch.int64)),
        ("bias", torch.ones(4, device="meta")),
        ("eps", 0.0),
        ("eps", math.nan),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(layer_norm)(**(good | {name: wrong}))

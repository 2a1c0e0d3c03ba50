"""RMSNorm: numbers by hand, its eps, and where it rounds."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.layers import rms_norm


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

"""What lesson 08 says of FP8 rows, and the bugs that it plants."""

import pytest
import torch

from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import compare
from mla_ref.teaching import figures, fp8_logits, planted, real_model

BY_EXPONENT = planted.unpack_fp8_rows_by_exponent


def kv_rows(n=7, seed=0):
    return torch.randn(n, 576, generator=torch.Generator().manual_seed(seed))


def test_B049_an_exponent_is_enough_where_the_writer_stores_powers_of_two():
    packed = pack_fp8_rows(kv_rows(), scale_rule="pow2")
    assert torch.equal(BY_EXPONENT(packed), unpack_fp8_rows(packed))


def test_B049_an_exponent_shrinks_each_tile_by_the_mantissa_of_its_scale():
    packed = pack_fp8_rows(kv_rows())
    right, wrong = unpack_fp8_rows(packed), BY_EXPONENT(packed)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    mantissas = (2 * torch.frexp(scales).mantissa).repeat_interleave(128, dim=1)
    assert float(mantissas.max()) > 1.2
    assert compare(wrong[:, :512] * mantissas, right[:, :512]).agrees(max_abs=1e-6)
    assert torch.equal(wrong[:, 512:], right[:, 512:])


def test_B048_without_a_floor_a_group_of_zeros_is_nan_and_nothing_else():
    rows = kv_rows()
    rows[3, 128:256] = 0
    wrong = unpack_fp8_rows(planted.pack_fp8_rows_without_floor(rows))
    right = unpack_fp8_rows(pack_fp8_rows(rows))
    nan = torch.zeros(7, 576, dtype=torch.bool)
    nan[3, 128:256] = True
    assert torch.equal(wrong.isnan(), nan)
    assert torch.equal(wrong[~nan], right[~nan])


def test_e4m3_errs_by_a_share_of_each_number():
    """Part 4: at most a sixteenth, 0.026 in the mean, and down to 1 / 28,672 of the largest."""
    sizes = torch.logspace(0, 4.4, 128, dtype=torch.float64)  # up to 25,119 times smaller
    row = torch.zeros(1, 576)
    row[0, :128] = (448 / sizes).float()
    error = (unpack_fp8_rows(pack_fp8_rows(row))[0, :128] / row[0, :128] - 1).abs()
    assert float(error.max()) <= 2.0**-4 * 1.0001
    assert float(error.square().mean().sqrt()) == pytest.approx(0.026, abs=0.003)


@pytest.mark.parametrize("rotation", fp8_logits.ROTATIONS)
def test_every_rotation_is_orthogonal(rotation):
    turn = fp8_logits.rotation_matrix(rotation).double()
    assert compare(turn @ turn.T, torch.eye(512).double()).agrees(max_abs=1e-6)


def test_two_of_256_leave_keys_and_values_apart():
    turn = fp8_logits.rotation_matrix("two of 256")
    assert not turn[:256, 256:].any()
    assert not turn[256:, :256].any()
    assert fp8_logits.rotation_matrix("one of 512").all()


@pytest.mark.slow
@pytest.mark.model
def test_the_table_of_the_whole_model():
    """The first 128 tokens; rounding of another machine may move a token."""
    measured = {row.rotation: row for row in fp8_logits.logit_errors(real_model(), 128)}
    for rotation, kl, top1 in (
        ("none", 0.0082, 0.977),
        ("one of 512", 0.0106, 0.945),
        ("two of 256", 0.0033, 0.984),
    ):
        assert measured[rotation].mean_kl == pytest.approx(kl, rel=0.15)
        assert measured[rotation].top1_agreement == pytest.approx(top1, abs=0.02)


@pytest.mark.thorough
def test_the_byte_maps_are_drawn_to_scale():
    pytest.importorskip("matplotlib")
    axes = figures.byte_maps().axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    whole, planes = widths[: 3 * 9], widths[3 * 9 :]
    assert sum(whole) == 3 * 656
    assert sum(planes[: 3 * 8]) == 3 * 576
    assert sum(planes[3 * 8 :]) == 64 * 8


@pytest.mark.thorough
def test_scale_errors_draws_mantissas():
    pytest.importorskip("matplotlib")
    scales = torch.tensor([[1.5, 0.25]])
    right = figures.scale_errors(scales, {"a": torch.tensor([[0.1, 0.2]])}).axes[1]
    (line,) = right.lines
    assert line.get_xdata().tolist() == pytest.approx([1.5, 1.0])
    assert line.get_ydata().tolist() == pytest.approx([0.1, 0.2])


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_or_measured_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="scales must hold numbers above 0"):
        figures.scale_errors(torch.zeros(2, 4), {})
    with pytest.raises(ValueError, match=r"errors\['a'\] must hold one error a tile, \[2, 4\]"):
        figures.scale_errors(torch.ones(2, 4), {"a": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="rotation must be one of none, one of 512, two of 256"):
        fp8_logits.rotation_matrix("three")

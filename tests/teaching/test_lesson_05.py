"""What lesson 05 says of layouts and angles, and the bugs that it plants."""

import pytest
import torch

from mla_ref.attention import causal_attention
from mla_ref.layers import RopeConfig, apply_rope, inverse_frequencies, rope_table
from mla_ref.numerics import compare
from mla_ref.teaching import figures, layer_input, planted, real_model

CONFIG = RopeConfig(64, 1e5, interleaved=True)


def scores(turn_q, turn_k, q, k, shift=0):
    cos, sin = rope_table(CONFIG, torch.arange(q.shape[0]) + shift)
    q, k = (
        turn(x, cos, sin, interleaved=True) for turn, x in ((turn_q, q), (turn_k, k))
    )  # fmt: skip
    return torch.einsum("shd,thd->hst", q, k)


def test_B023_no_property_of_rope_finds_the_wrong_layout():
    q, k = torch.randn(9, 2, 64).double(), torch.randn(9, 2, 64).double()
    wrong = planted.rope_in_halves
    cos, sin = rope_table(CONFIG, torch.arange(9))
    turned = wrong(q, cos, sin, interleaved=True)
    assert compare(turned.norm(dim=-1), q.norm(dim=-1)).agrees(rel_l2=1e-14)
    assert torch.equal(turned[0], q[0])
    both = scores(wrong, wrong, q, k)
    assert compare(scores(wrong, wrong, q, k, shift=1000), both).agrees(rel_l2=1e-10)
    right = scores(apply_rope, apply_rope, q, k)
    assert not compare(both, right).agrees(rel_l2=0.1)
    # Where both stand at one position, nothing is left of the turning.
    diagonal = both.diagonal(dim1=1, dim2=2), right.diagonal(dim1=1, dim2=2)
    assert compare(*diagonal).agrees(rel_l2=1e-13)


def test_B023_mixed_layouts_are_found_by_a_shift():
    q, k = torch.randn(9, 2, 64).double(), torch.randn(9, 2, 64).double()
    mixed = scores(apply_rope, planted.rope_in_halves, q, k)
    shifted = scores(apply_rope, planted.rope_in_halves, q, k, shift=1000)
    assert not compare(shifted, mixed).agrees(rel_l2=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B161_neighbours_keep_positions_of_their_own_whatever_the_dtype(dtype):
    positions = torch.tensor([256, 257, 6142, 6143])
    x = torch.ones(4, 64, dtype=dtype)
    right = apply_rope(x, *rope_table(CONFIG, positions), interleaved=True)
    wrong = apply_rope(
        x, *planted.rope_table_in_bfloat16(CONFIG, positions), interleaved=True
    )  # fmt: skip
    assert torch.equal(wrong[0], wrong[1]) and torch.equal(wrong[2], wrong[3])
    assert not compare(right[0], right[1]).agrees(max_abs=0.1)
    assert not compare(right[2], right[3]).agrees(max_abs=0.1)
    exact = apply_rope(x.double(), *rope_table(CONFIG, positions), interleaved=True)
    assert compare(right.double(), exact).agrees(max_abs=1.5 * 2**-8)


def test_B161_angles_in_float32_lose_more_at_a_million_than_a_rounded_cosine():
    """What the second figure shows, and why the table is made in float64."""
    config, far = RopeConfig(64, 1e4, interleaved=True), torch.tensor([1_000_000])
    exact = rope_table(config, far)[0]
    narrow = (far[:, None].float() * inverse_frequencies(config).float()).cos()
    in_bfloat16 = (exact.bfloat16() - exact).abs().max()
    assert float((narrow - exact).abs().max()) > 2 * float(in_bfloat16)


@pytest.mark.model
def test_with_the_real_model_neighbours_hide_the_wrong_layout():
    """A few per cent at position 1, more than the whole far out."""
    layer = layer_input(real_model(), layer=7, num_tokens=256)
    cos, sin = rope_table(CONFIG, torch.arange(256))
    q, k = (
        planted.rope_in_halves(
            apply_rope(x, cos, -sin, interleaved=True), cos, sin, interleaved=True
        )
        for x in (layer.q, layer.k)
    )
    wrong = causal_attention(q, k, layer.v, softmax_scale=layer.softmax_scale).out
    right = causal_attention(layer.q, layer.k, layer.v, softmax_scale=layer.softmax_scale).out
    error = (wrong - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
    assert 0.005 < error[1] < 0.06
    assert error[128:].median() > 1


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: figures.rope_layouts(0), "position must be at least 1"),
        (lambda: figures.error_by_position({}, torch.tensor([1])), "errors must hold 1 to 4"),
        (
            lambda: figures.error_by_position({"a": torch.rand(2)}, torch.tensor([1])),
            "one a position, 1, got 2",
        ),
        (
            lambda: figures.error_by_position({"a": torch.rand(2)}, torch.tensor([0, 1])),
            "positions must hold numbers from 1 on",
        ),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument(draw, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.thorough
def test_rope_layouts_prints_how_far_each_pair_has_come():
    pytest.importorskip("matplotlib")
    figure = figures.rope_layouts(7, theta=100.0)
    shown = [text.get_text() for text in figure.axes[0].texts]
    for pair, frequency in enumerate([1.0, 100**-0.25, 0.1, 100**-0.75]):
        assert f"pair {pair}: {7 * frequency:.2f} rad" in shown


@pytest.mark.thorough
@pytest.mark.parametrize("smallest, shown", [(0.0, True), (1e-7, True), (0.02, False)])
def test_error_by_position_keeps_the_exact_line_for_small_errors(smallest, shown):
    pytest.importorskip("matplotlib")
    error = torch.tensor([smallest, 0.5, 1.0])
    axes = figures.error_by_position({"a": error}, torch.arange(1, 4)).axes[0]
    assert ("exact" in [label.get_text() for label in axes.get_yticklabels()]) == shown
    low, high = axes.get_ylim()
    assert low < max(smallest, 1e-9) and high > 1.0

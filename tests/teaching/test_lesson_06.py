"""What lesson 06 says of the scale and of latents, and the bugs that it plants."""

import pytest
import torch

from mla_ref.attention import mla_expanded_attention
from mla_ref.batching import Step
from mla_ref.layers import PRESETS, YarnConfig, default_softmax_scale
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted

YARN = YarnConfig(40.0, 4096)


def expanded(scale, s=20):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    step = Step.one_request(0, s, s)
    return mla_expanded_attention(
        draw(s, 2, 16),
        draw(s, 2, 8),
        draw(1, s, 40),
        draw(2, 16, 32) / 32**0.5,
        draw(2, 16, 32) / 32**0.5,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        softmax_scale=scale,
    )


def test_B079_without_mscale_the_first_row_is_right_and_no_other():
    right = expanded(default_softmax_scale(16, 8, YARN)).out
    wrong = expanded(planted.scale_without_mscale(16, 8, YARN)).out
    assert torch.equal(wrong[0], right[0])
    for row in range(1, 20):
        assert not compare(wrong[row], right[row]).agrees(rel_l2=0.02)


def test_B079_without_mscale_models_that_are_not_stretched_are_right():
    assert planted.scale_without_mscale(192, 64, None) == default_softmax_scale(192, 64, None)
    ratio = default_softmax_scale(128, 64, YARN) / planted.scale_without_mscale(128, 64, YARN)
    assert ratio == pytest.approx(1.8738542, abs=1e-7)


def test_B079_no_released_model_shows_which_mscale_was_taken():
    stretched = [config for config in PRESETS.values() if config.rope.yarn]
    assert len(stretched) >= 3
    for config in stretched:
        dims = config.qk_nope_head_dim, config.qk_rope_head_dim, config.rope.yarn
        assert planted.scale_from_mscale(*dims) == config.softmax_scale
    different = YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=0.5)
    right = default_softmax_scale(128, 64, different)
    assert planted.scale_from_mscale(128, 64, different) == pytest.approx(right * 1.3357, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_flow_names_the_widths_of_each_model(name):
    pytest.importorskip("matplotlib")
    config = PRESETS[name]
    shown = [text.get_text() for text in figures.mla_flow(config).axes[0].texts]
    heads = config.num_heads
    for text in (
        f"hidden\n{config.hidden_size:,}",
        f"latent\n{config.kv_lora_rank}",
        f"k_nope\n{heads} × {config.qk_nope_head_dim}",
        f"v\n{heads} × {config.v_head_dim}",
        f"the cached row: {config.kv_row_dim} numbers",
    ):
        assert text in shown


@pytest.mark.thorough
def test_latent_rank_draws_what_lies_beyond_each_rank():
    pytest.importorskip("matplotlib")
    figure = figures.latent_rank(
        {"a": torch.tensor([3.0, 4.0, 0.0])}, [1, 2], {"b": torch.tensor([0.5, 0.25])}
    )
    left, right = (axes.lines[0].get_ydata() for axes in figure.axes)
    assert [float(y) for y in left] == pytest.approx([16 / 25, 0.0, 0.0])
    assert [float(y) for y in right] == [0.5, 0.25]


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    with pytest.raises(TypeError, match="config must be an MLAConfig"):
        figures.mla_flow("v3.2")
    with pytest.raises(ValueError, match=r"spectra\['a'\] must hold one singular value"):
        figures.latent_rank({"a": torch.randn(0)}, [1], {})
    with pytest.raises(ValueError, match=r"errors\['b'\] must hold one a rank, 1, got 2"):
        figures.latent_rank({"a": torch.rand(3)}, [1], {"b": torch.rand(2)})

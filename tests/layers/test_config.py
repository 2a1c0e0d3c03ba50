"""Dimensions of published models, and the softmax scale that goes with them."""

import math
from dataclasses import replace

import pytest
from tests.support import raw

from mla_ref.layers import PRESETS, MLAConfig, YarnConfig, default_softmax_scale, preset

# hidden, layers, heads, q_lora, kv_lora, nope, rope, v, theta, yarn factor, eps: as published.
PUBLISHED = {
    "deepseek-v2-lite": (2048, 27, 16, None, 512, 128, 64, 128, 1e4, 40.0, 1e-6),
    "v3": (7168, 61, 128, 1536, 512, 128, 64, 128, 1e4, 40.0, 1e-6),
    "v3.2": (7168, 61, 128, 1536, 512, 128, 64, 128, 1e4, 40.0, 1e-6),
    "glm-5": (6144, 78, 64, 2048, 512, 192, 64, 256, 1e6, None, 1e-5),
    "glm-5.2": (6144, 78, 64, 2048, 512, 192, 64, 256, 8e6, None, 1e-5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_as_published(name: str) -> None:
    c = preset(name)
    assert c.name == name
    assert PUBLISHED[name] == (
        c.hidden_size,
        c.num_layers,
        c.num_heads,
        c.q_lora_rank,
        c.kv_lora_rank,
        c.qk_nope_head_dim,
        c.qk_rope_head_dim,
        c.v_head_dim,
        c.rope.theta,
        c.rope.yarn.factor if c.rope.yarn else None,
        c.rms_norm_eps,
    )
    assert c.rope.dim == c.qk_rope_head_dim


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        # 192^-0.5 * (0.1 * 0.707 * ln 40 + 1)^2 and 192^-0.5 * (0.1 * ln 40 + 1)^2
        ("deepseek-v2-lite", 0.1147214),
        ("v3", 0.1352338),
        ("v3.2", 0.1352338),
        ("glm-5", 0.0625),  # 256^-0.5
        ("glm-5.2", 0.0625),
        ("smollm2-packed", 0.125),  # 64^-0.5
    ],
)
def test_B079_softmax_scale_of_the_presets(name: str, scale: float) -> None:
    assert preset(name).softmax_scale == pytest.approx(scale, abs=5e-8)


def test_B079_the_scale_takes_mscale_all_dim() -> None:
    """mscale belongs to cos and sin; without YaRN, or with weight 0, the plain scale is left."""
    plain = 192**-0.5
    for mscale in (0.0, 0.5, 1.0):
        yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=1.0)
        assert default_softmax_scale(128, 64, yarn) == pytest.approx(plain * 1.8738542, rel=1e-7)
        yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=0.707)
        assert default_softmax_scale(128, 64, yarn) == pytest.approx(plain * 1.5896262, rel=1e-7)
        yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=0.0)
        assert default_softmax_scale(128, 64, yarn) == plain
    assert default_softmax_scale(128, 64, None) == plain


def test_B079_the_cached_row_has_no_say() -> None:
    """576^-0.5 = 0.0417 is what a kernel would guess from the row."""
    c = preset("v3.2")
    assert c.qk_head_dim == 192 and c.kv_row_dim == 576
    assert c.softmax_scale > 3 * c.kv_row_dim**-0.5


def test_B151_what_a_token_costs_in_the_cache() -> None:
    """576 numbers whatever the number of heads; the expanded cache is 71 and 57 times larger."""
    v3, glm = preset("v3"), preset("glm-5.2")
    assert v3.kv_row_dim == glm.kv_row_dim == replace(v3, num_heads=1).kv_row_dim == 576
    assert v3.kv_row_dim * 2 == 1152  # bytes in bfloat16
    expanded = {c.name: c.num_heads * (c.qk_head_dim + c.v_head_dim) for c in (v3, glm)}
    assert expanded == {"v3": 40_960, "glm-5.2": 32_768}
    assert expanded["v3"] / 576 == pytest.approx(71.1, abs=0.05)
    assert expanded["glm-5.2"] / 576 == pytest.approx(56.9, abs=0.05)


def test_B055_a_model_without_rotary_numbers() -> None:
    rope = replace(preset("glm-5").rope, dim=0)
    c = replace(preset("glm-5"), qk_rope_head_dim=0, rope=rope)
    assert (c.qk_head_dim, c.kv_row_dim) == (192, 512)


def test_B082_an_odd_rotary_width_is_refused() -> None:
    with pytest.raises(ValueError, match="qk_rope_head_dim must be even, got 7"):
        replace(preset("v3"), qk_rope_head_dim=7)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hidden_size", (0, -1, 1.5, None)),
        ("num_layers", (0, "61")),
        ("num_heads", (0, True)),
        ("q_lora_rank", (0, -1)),
        ("kv_lora_rank", (0, None)),
        ("qk_nope_head_dim", (-1, 1.0)),
        ("qk_rope_head_dim", (-2, 3)),
        ("v_head_dim", (0,)),
        ("rms_norm_eps", (0.0, -1e-6, math.nan, None, 1e-50)),
        ("softmax_scale", (0.0, -0.1, math.inf, math.nan, None, 1e-50, 1e300)),
    ],
)
def test_a_config_that_cannot_be(name: str, values: tuple) -> None:
    fields = {f: getattr(preset("v3"), f) for f in MLAConfig.__dataclass_fields__}
    for value in values:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(MLAConfig)(**(fields | {name: value}))


def test_no_number_to_compare_at_all() -> None:
    with pytest.raises(ValueError, match="must not both be 0"):
        replace(
            preset("v3"),
            qk_nope_head_dim=0,
            qk_rope_head_dim=0,
            rope=replace(preset("v3").rope, dim=0),
        )


def test_an_unknown_preset_lists_the_names() -> None:
    for name in ("deepseek", None, 3):
        with pytest.raises(ValueError, match=r"preset name must be one of .*v3\.2.*glm-5\.2"):
            raw(preset)(name)
    assert set(PRESETS) == set(PUBLISHED) | {"smollm2-packed"}


def test_rope_of_another_width_than_the_rotary_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rope\.dim must be qk_rope_head_dim = 64, got 32"):
        replace(preset("v3"), rope=replace(preset("v3").rope, dim=32))

"""Bytes a token: published models by hand, and rows that do not fit their format."""

import dataclasses

import pytest
from tests.support import raw

from mla_ref.cache import bytes_per_token
from mla_ref.layers import IndexerConfig, MLAConfig, RopeConfig, preset


def small(**changes: int) -> MLAConfig:
    dims = {"kv_lora_rank": 32, "qk_rope_head_dim": 16} | changes
    return MLAConfig(
        name="small",
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        q_lora_rank=None,
        qk_nope_head_dim=4,
        v_head_dim=4,
        rope=RopeConfig(dims["qk_rope_head_dim"], 1e4, interleaved=True),
        rms_norm_eps=1e-6,
        softmax_scale=0.2,
        **dims,
    )


@pytest.mark.parametrize(
    ("name", "cache_format", "expected"),
    [
        ("v3", "fp8", 61 * 656),
        ("v3", "bf16", 61 * 1152),
        ("v3.2", "fp8", 48_068),
        ("v3.2", "bf16", 61 * (1152 + 132)),
        ("glm-5", "fp8", 78 * (656 + 132)),
        ("glm-5.2", "fp8", 53_940),
        ("glm-5.2", "bf16", 78 * 1152 + 21 * 132),
        ("smollm2-packed", "fp8", 30 * 656 + 9 * 132),
    ],
)
def test_B151_what_a_token_costs_in_all_layers(name: str, cache_format: str, expected: int) -> None:
    assert bytes_per_token(preset(name), cache_format) == expected


def test_fp8_is_the_default() -> None:
    assert bytes_per_token(preset("v3.2")) == 48_068


def test_dimensions_of_any_size_in_bf16() -> None:
    assert bytes_per_token(small(), "bf16") == 3 * 2 * 48


@pytest.mark.parametrize("changed", [{"kv_lora_rank": 512}, {"qk_rope_head_dim": 64}])
def test_B156_an_fp8_row_of_other_dimensions_is_refused(changed: dict[str, int]) -> None:
    config = small(**changed)
    dims = f"{config.kv_lora_rank} \\+ {config.qk_rope_head_dim}"
    with pytest.raises(
        ValueError, match=f"656-byte row holds 512 \\+ 64 numbers, small has {dims}"
    ):
        bytes_per_token(config)


@pytest.mark.parametrize("cache_format", ["fp8", "bf16"])
def test_an_index_key_of_another_width_is_refused(cache_format: str) -> None:
    config = dataclasses.replace(preset("v3.2"), indexer=IndexerConfig(4, (0,), head_dim=64))
    with pytest.raises(ValueError, match="index key holds 128 numbers, v3.2 has 64"):
        bytes_per_token(config, cache_format)


@pytest.mark.parametrize("wrong", ["fp4", None, 8])
def test_an_unknown_format_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match="cache_format must be one of bf16, fp8"):
        raw(bytes_per_token)(preset("v3"), wrong)


def test_what_is_no_config_is_named() -> None:
    with pytest.raises(TypeError, match="config"):
        raw(bytes_per_token)("v3")

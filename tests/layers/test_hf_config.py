"""config.json of published checkpoints gives the presets; what is not known is refused."""

from typing import Any

import pytest

from mla_ref.layers import YarnConfig, preset
from mla_ref.layers.hf_config import mla_config_from_hf

# The parts of the published files that concern attention.
V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "hidden_size": 7168,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "v_head_dim": 128,
}
GLM52: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "head_dim": 192,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "v_head_dim": 256,
}
V2_LITE: dict[str, Any] = V32 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": V32["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}


@pytest.mark.parametrize(
    "config, name",
    [
        (V32, "v3.2"),
        (V32 | {"model_type": "deepseek_v3"}, "v3"),
        (GLM52, "glm-5.2"),
        (V2_LITE, "deepseek-v2-lite"),
    ],
)
def test_published_files_give_the_presets(config, name):
    assert mla_config_from_hf(config, name=name) == preset(name)


def test_both_spellings_of_the_rope_mean_the_same():
    newer = {key: value for key, value in V32.items() if key not in ("rope_scaling", "rope_theta")}
    scaling = {key: value for key, value in V32["rope_scaling"].items() if key != "type"}
    newer["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert mla_config_from_hf(newer) == mla_config_from_hf(V32)


def test_yarn_without_mscales_stretches_cos_and_sin_and_not_the_scale():
    bare = {key: value for key, value in V32["rope_scaling"].items() if "mscale" not in key}
    config = mla_config_from_hf(V32 | {"rope_scaling": bare})
    assert config.rope.yarn == YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=0.0)
    assert config.softmax_scale == 192**-0.5


def test_half_split_rope_is_taken_over():
    config = mla_config_from_hf(V32 | {"model_type": "deepseek_v3", "rope_interleave": False})
    assert config.rope.interleaved is False


def yarn(**changes: Any) -> dict[str, Any]:
    return V32 | {"rope_scaling": V32["rope_scaling"] | changes}


@pytest.mark.parametrize(
    "config, message",
    [
        (V32 | {"model_type": "llama"}, "model_type must be one of deepseek_v2, .* got 'llama'"),
        (V32 | {"model_type": None}, "model_type must be one of"),
        (V32 | {"attention_bias": True}, "attention_bias is true"),
        (V32 | {"num_key_value_heads": 8}, "num_key_value_heads must equal .* 128, got 8"),
        (V32 | {"rope_interleave": False}, "rope_interleave must be true for deepseek_v32"),
        (V32 | {"rope_theta": None}, "rope_theta is missing"),
        (V32 | {"rope_parameters": {"rope_type": "default"}}, "must not both be given"),
        (yarn(type="longrope"), "rope_type must be one of default, yarn, got 'longrope'"),
        (yarn(attention_factor=1.2), "not known here: attention_factor"),
        (yarn(type="default"), "not known here: beta_fast"),
        (yarn(mscale=0), "mscale and mscale_all_dim must be given both"),
        (
            V32 | {"rope_scaling": {"type": "yarn", "factor": 40}},
            "original_max_position_embeddings is missing",
        ),
        (
            {key: value for key, value in V32.items() if key != "v_head_dim"},
            "v_head_dim is missing",
        ),
        (
            {key: value for key, value in V32.items() if key != "q_lora_rank"},
            "q_lora_rank is missing",
        ),
        (V32 | {"qk_rope_head_dim": 7}, "must be even"),
    ],
)
def test_what_is_not_known_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        mla_config_from_hf(config)

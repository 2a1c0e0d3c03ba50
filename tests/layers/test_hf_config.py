"""config.json of published checkpoints gives the presets; what is not known is refused."""

from typing import Any

import pytest

from mla_ref.layers import IndexerConfig, YarnConfig, preset
from mla_ref.layers.hf_config import mla_config_from_hf

# The parts of the published files that concern attention.
V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
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
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
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


COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_topk_freq",
    "index_skip_topk_offset",
)


@pytest.mark.parametrize("wrong", [None, "x", [64], True, 6.5], ids=str)
def test_a_value_of_another_kind_is_named_by_its_key(wrong: Any) -> None:
    for key in COUNTS:
        if key == "q_lora_rank" and wrong is None:  # queries that are not compressed
            continue
        config = V32 | ({"num_key_value_heads": None} if key == "num_attention_heads" else {})
        with pytest.raises(ValueError, match=f"^{key} must be a whole number, got"):
            mla_config_from_hf(config | {key: wrong})
    with pytest.raises(ValueError, match="^original_max_position_embeddings must be a whole"):
        mla_config_from_hf(yarn(original_max_position_embeddings=wrong))
    if wrong == 6.5:
        return
    for key in ("rope_theta", "rms_norm_eps"):
        with pytest.raises(ValueError, match=f"^{key} (must be a number, got|is missing)"):
            mla_config_from_hf(V32 | {key: wrong})
    for key in ("factor", "beta_fast", "beta_slow"):
        with pytest.raises(ValueError, match=f"^{key} must be a number, got"):
            mla_config_from_hf(yarn(**{key: wrong}))
    if wrong is not None:
        for key in ("mscale", "mscale_all_dim"):
            with pytest.raises(ValueError, match=f"^{key} must be a number, got"):
                mla_config_from_hf(yarn(**{key: wrong}))
        for key in ("rope_parameters", "rope_scaling"):
            with pytest.raises(ValueError, match=f"^{key} must be an object, got"):
                mla_config_from_hf(V32 | {"rope_scaling": None} | {key: wrong})


# --- the indexer


def indexer_of(config: dict[str, Any]) -> IndexerConfig:
    found = mla_config_from_hf(config).indexer
    assert found is not None
    return found


def test_the_dimensions_of_the_indexer() -> None:
    config = V32 | {"index_n_heads": 5, "index_head_dim": 96, "index_topk": 77}
    assert indexer_of(config) == IndexerConfig(5, tuple(range(61)), head_dim=96, topk=77)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_dense_model_has_no_indexer_whatever_its_file_says(model_type: str) -> None:
    assert mla_config_from_hf(V32 | {"model_type": model_type}).indexer is None


@pytest.mark.parametrize("published", [V32, GLM52])
@pytest.mark.parametrize("interleaved", [True, False])
def test_B024_the_flag_of_the_indexer_is_read(published: dict, interleaved: bool) -> None:
    config = published | {"indexer_rope_interleave": interleaved}
    assert indexer_of(config).rope_interleaved is interleaved
    # It is the indexer's alone: the attention stays as it was.
    assert mla_config_from_hf(config).rope == mla_config_from_hf(published).rope


def test_B024_without_the_flag_each_model_is_what_it_was_trained_as() -> None:
    for published, interleaved in ((V32, False), (GLM52, True)):
        config = {k: v for k, v in published.items() if k != "indexer_rope_interleave"}
        assert indexer_of(config).rope_interleaved is interleaved


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"indexer_types": ["full", "shared", "shared", "full"]}, (0, 3)),
        ({"index_topk_pattern": "FSSF"}, (0, 3)),
        ({"index_topk_pattern": list("FFFF")}, (0, 1, 2, 3)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3)),
        ({}, (0, 1, 2, 3)),
        # The list of names is the most explicit, and wins over the pattern and the formula.
        ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FSSF"}, (0, 1, 2, 3)),
        ({"index_topk_pattern": "FSSF", "index_topk_freq": 1}, (0, 3)),
    ],
    ids=str,
)
def test_the_layers_with_an_indexer(said: dict, expected: tuple[int, ...]) -> None:
    plain = {
        k: v for k, v in GLM52.items() if k not in ("index_topk_freq", "index_skip_topk_offset")
    }
    assert indexer_of(plain | {"num_hidden_layers": 4} | said).full_layers == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V32 | {"indexer_rope_interleave": 1}, "indexer_rope_interleave must be true or false"),
        (V32 | {"indexer_rope_interleave": None}, "indexer_rope_interleave must be true or false"),
        (V32 | {"indexer_types": ["full"] * 60}, "indexer_types must .* each of 61 layers"),
        (V32 | {"indexer_types": ["half"] * 61}, "indexer_types must say full or shared"),
        (V32 | {"indexer_types": [["full"]] * 61}, "indexer_types must say full or shared"),
        (V32 | {"indexer_types": [["full"]]}, "indexer_types must say full or shared"),
        (V32 | {"indexer_types": 61}, "indexer_types must say full or shared"),
        (V32 | {"indexer_types": {"full": 61}}, "indexer_types must say full or shared"),
        (V32 | {"index_topk_pattern": 61}, "indexer_types must say full or shared"),
        (V32 | {"index_topk_pattern": "S" + "F" * 60}, "full_layers must rise from 0"),
        (V32 | {"index_topk_freq": 0}, "freq must be at least 1"),
        (V32 | {"index_n_heads": 0}, "num_heads must be at least 1"),
        (V32 | {"index_head_dim": 32}, "indexer.head_dim must hold the 64 rotary numbers"),
        *(
            ({k: v for k, v in V32.items() if k != name}, f"{name} is missing")
            for name in ("index_n_heads", "index_head_dim", "index_topk")
        ),
    ],
)
def test_an_indexer_that_is_not_known_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_config_from_hf(config)

"""Attention dimensions of published models, from their configuration files.

DeepSeek-V2-Lite, V3, V3.2: `inference/configs/*.json` of DeepSeek's repositories. GLM-5, GLM-5.2:
transformers' `GlmMoeDsaConfig` and the published config.json (rope theta 8e6 for GLM-5.2; the 1e6
of GLM-5 is from a test configuration and less sure). The `head_dim` field in GLM's file means
nothing for attention. smollm2-packed is this project's exact rewriting of SmolLM2-135M's
grouped-query attention in the cached geometry of the others, see `mla_ref.models`.
"""

from types import MappingProxyType

from mla_ref.checks import require_choice
from mla_ref.layers.config import MLAConfig, default_softmax_scale
from mla_ref.layers.index_share import full_layers
from mla_ref.layers.indexer_config import IndexerConfig
from mla_ref.layers.rope import RopeConfig, YarnConfig


def _deepseek(
    name: str,
    hidden_size: int,
    layers: int,
    heads: int,
    q_lora_rank: int | None,
    mscale: float,
    indexer: IndexerConfig | None = None,
) -> MLAConfig:
    yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=mscale)
    return MLAConfig(
        name=name,
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeConfig(64, 1e4, interleaved=True, yarn=yarn),
        rms_norm_eps=1e-6,
        softmax_scale=default_softmax_scale(128, 64, yarn),
        indexer=indexer,
    )


def _glm(name: str, theta: float, full: tuple[int, ...]) -> MLAConfig:
    return MLAConfig(
        name=name,
        hidden_size=6144,
        num_layers=78,
        num_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        rope=RopeConfig(64, theta, interleaved=True),
        rms_norm_eps=1e-5,
        softmax_scale=default_softmax_scale(192, 64, None),
        indexer=IndexerConfig(32, full, rope_interleaved=True),
    )


_SMOLLM2_PACKED = MLAConfig(
    name="smollm2-packed",
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    rope=RopeConfig(64, 1e5, interleaved=True),
    rms_norm_eps=1e-5,
    # Its rotary key is 64 zeros that fill the row, so only 64 of the 128 numbers count.
    softmax_scale=64**-0.5,
    # Trained for this project on the model's own attention, shared as GLM-5.2 shares.
    indexer=IndexerConfig(
        4, full_layers(30, freq=4, offset=3), topk=256, rope_interleaved=True, scale_rule="fp32"
    ),
)

PRESETS = MappingProxyType(
    {
        config.name: config
        for config in (
            _deepseek("deepseek-v2-lite", 2048, 27, 16, None, 0.707),
            _deepseek("v3", 7168, 61, 128, 1536, 1.0),
            _deepseek("v3.2", 7168, 61, 128, 1536, 1.0, IndexerConfig(64, full_layers(61))),
            _glm("glm-5", 1e6, full_layers(78)),
            _glm("glm-5.2", 8e6, full_layers(78, freq=4, offset=3)),
            _SMOLLM2_PACKED,
        )
    }
)


def preset(name: str) -> MLAConfig:
    """Dimensions of a published model by name; a ValueError lists the names there are."""
    return PRESETS[require_choice("preset name", name, tuple(PRESETS))]

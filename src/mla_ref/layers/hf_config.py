"""MLAConfig from a checkpoint's config.json, in the format of Hugging Face transformers.

The file says the same thing in more than one way, and every library fills in what it leaves out
with a default of its own. So what this reader does not know, it refuses: a guessed YaRN factor or a
bias that nobody adds gives a model that runs and is subtly worse.
"""

from collections.abc import Mapping
from typing import Any

from mla_ref.checks import describe, require_choice
from mla_ref.layers.config import MLAConfig, default_softmax_scale
from mla_ref.layers.index_share import full_layers
from mla_ref.layers.indexer_config import IndexerConfig
from mla_ref.layers.rope import RopeConfig, YarnConfig

# `rope_interleave` False is honoured by transformers for deepseek_v3 alone; the others ignore it.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")

_YARN_KEYS = frozenset(
    {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    }
)
# Names of the embedding itself, not of a stretch. "type" is the older spelling of "rope_type".
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta"})


def mla_config_from_hf(config: Mapping[str, Any], *, name: str | None = None) -> MLAConfig:
    """Attention dimensions of one checkpoint.

    The softmax scale is derived: (qk_nope + qk_rope)^-0.5, times mscale^2 where YaRN has an
    `mscale_all_dim`. `head_dim` and `qk_head_dim` are not read: GLM's files hold 64 or 192 there,
    and neither means anything for attention.

    Args:
        config: The parsed config.json.
        name: What to call the model in errors and tables; its model_type if left out.

    Raises:
        ValueError: A key is missing, a model_type or a kind of rope is not known, or the file asks
            for something that the layers here lack: biases, fewer KV heads than heads.
    """
    model_type = require_choice("model_type", config.get("model_type"), MODEL_TYPES)
    if config.get("attention_bias", False):
        raise ValueError(
            "attention_bias is true: layers with biases are not supported, and no "
            "released checkpoint has them"
        )
    heads = _count(config, "num_attention_heads")
    # MLA has one latent for all heads; DeepSeek's files repeat the number of heads here.
    if config.get("num_key_value_heads") not in (None, heads):
        raise ValueError(
            f"num_key_value_heads must equal num_attention_heads = {heads}, got "
            f"{describe(config['num_key_value_heads'])}"
        )
    interleaved = config.get("rope_interleave", True)
    if interleaved is not True and (interleaved is not False or model_type != "deepseek_v3"):
        raise ValueError(
            f"rope_interleave must be true for {model_type}, got {describe(interleaved)}"
        )
    nope, rope_dim = _count(config, "qk_nope_head_dim"), _count(config, "qk_rope_head_dim")
    theta, yarn = _rope(config)
    return MLAConfig(
        name=name or model_type,
        hidden_size=_count(config, "hidden_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=heads,
        q_lora_rank=_count(config, "q_lora_rank", or_null=True),
        kv_lora_rank=_count(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=_count(config, "v_head_dim"),
        rope=RopeConfig(rope_dim, theta, interleaved=interleaved, yarn=yarn),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        softmax_scale=default_softmax_scale(nope, rope_dim, yarn),
        indexer=_indexer(config) if model_type in ("deepseek_v32", "glm_moe_dsa") else None,
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, YarnConfig | None]:
    """Base and stretch, from `rope_parameters` or from the older `rope_theta` + `rope_scaling`."""
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise ValueError(
            "rope_parameters and rope_scaling must not both be given: which one holds is undefined"
        )
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise ValueError(f"{name} must be an object, got {describe(given)}")
    rope = dict(given)
    holder = rope if "rope_theta" in rope else config
    if holder.get("rope_theta") is None:
        raise ValueError("rope_theta is missing; libraries differ in the default they put there")
    theta = _number(holder, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_choice("rope_type", kind, ("default", "yarn"))
    unknown = set(rope) - _ROPE_KEYS - (_YARN_KEYS if kind == "yarn" else frozenset())
    if unknown:
        raise ValueError(
            f"rope_parameters of type {kind} hold keys that are not known here: "
            f"{', '.join(sorted(unknown))}"
        )
    if kind == "default":
        return theta, None
    # With one of the two alone, DeepSeek's own code and transformers compute different factors.
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        raise ValueError(
            "mscale and mscale_all_dim must be given both or not at all, got "
            f"{rope.get('mscale')!r} and {rope.get('mscale_all_dim')!r}"
        )
    # Without them the factor 0.1 ln(factor) + 1 goes to cos and sin, none to the scale.
    mscales = rope if rope.get("mscale") else {"mscale": 1.0, "mscale_all_dim": 0.0}
    return theta, YarnConfig(
        factor=_number(rope, "factor"),
        original_max_position_embeddings=_count(rope, "original_max_position_embeddings"),
        beta_fast=_number({"beta_fast": 32} | rope, "beta_fast"),
        beta_slow=_number({"beta_slow": 1} | rope, "beta_slow"),
        mscale=_number(mscales, "mscale"),
        mscale_all_dim=_number(mscales, "mscale_all_dim"),
    )


def _indexer(config: Mapping[str, Any]) -> IndexerConfig:
    """The indexer's dimensions.

    `indexer_rope_interleave` is a flag that transformers does not read: its DeepSeek class is
    half-split and its GLM class interleaved (since 5.13; before, wrongly, half-split). vLLM reads
    it. Here it holds where it is given, and where it is not, each model is what it was trained as.
    """
    interleaved = config.get("indexer_rope_interleave", config["model_type"] == "glm_moe_dsa")
    if not isinstance(interleaved, bool):
        raise ValueError(
            f"indexer_rope_interleave must be true or false, got {describe(interleaved)}"
        )
    return IndexerConfig(
        num_heads=_count(config, "index_n_heads"),
        full_layers=_full_layers(config),
        head_dim=_count(config, "index_head_dim"),
        topk=_count(config, "index_topk"),
        rope_interleaved=interleaved,
    )


def _full_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """From `indexer_types`, a pattern such as "FSSF", or freq and offset, in this order."""
    layers = _count(config, "num_hidden_layers")
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        said = {"index_topk_freq": 1, "index_skip_topk_offset": 2, **config}
        return full_layers(
            layers,
            freq=_count(said, "index_topk_freq"),
            offset=_count(said, "index_skip_topk_offset"),
        )
    words = {"F": True, "full": True, "S": False, "shared": False}
    listed = isinstance(kinds, (str, list, tuple)) and len(kinds) == layers
    if not listed or not all(isinstance(kind, str) and kind in words for kind in kinds):
        raise ValueError(
            f"indexer_types must say full or shared for each of {layers} layers, got {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds) if words[kind])


def _required(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing from the configuration")
    return config[key]


def _count(config: Mapping[str, Any], key: str, *, or_null: bool = False) -> Any:
    """A whole number; what range it must lie in is checked where it is used."""
    value = _required(config, key)
    if (value is None and or_null) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{key} must be a whole number, got {describe(value)}")


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} must be a number, got {describe(value)}")
    return float(value)

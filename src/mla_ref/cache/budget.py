"""How many bytes a token costs, over all layers of a model."""

from mla_ref.cache.fp8_rows import LATENT, ROPE, ROW_BYTES
from mla_ref.cache.index_keys import INDEX_HEAD_DIM, KEY_BYTES
from mla_ref.checks import describe, require_choice
from mla_ref.layers import MLAConfig

FORMATS = ("bf16", "fp8")


def bytes_per_token(config: MLAConfig, cache_format: str = "fp8") -> int:
    """Bytes that one token holds in the caches of all layers.

    Every layer caches a row; a layer with its own indexer an index key of 132 bytes as well, which
    is easily forgotten when memory is planned (sglang#11309). DeepSeek-V3.2 in FP8:
    61 * (656 + 132) = 48,068. GLM-5.2: 78 * 656 + 21 * 132 = 53,940. An MTP layer, not counted
    here, has a row and an index key of its own: 788 more.

    Args:
        config: The model's dimensions.
        cache_format: "bf16": two bytes a number; "fp8": rows of 656 bytes.

    Raises:
        TypeError: `config` is no MLAConfig.
        ValueError: An unknown format, or dimensions that an FP8 row or an index key does not hold.
    """
    if not isinstance(config, MLAConfig):
        raise TypeError(f"config must be an MLAConfig, got {describe(config)}")
    require_choice("cache_format", cache_format, FORMATS)
    row = 2 * config.kv_row_dim
    if cache_format == "fp8":
        if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT, ROPE):
            raise ValueError(
                f"a 656-byte row holds {LATENT} + {ROPE} numbers, {config.name} has "
                f"{config.kv_lora_rank} + {config.qk_rope_head_dim}"
            )
        row = ROW_BYTES
    if config.indexer is None:
        return config.num_layers * row
    if config.indexer.head_dim != INDEX_HEAD_DIM:
        raise ValueError(
            f"an index key holds {INDEX_HEAD_DIM} numbers, {config.name} has "
            f"{config.indexer.head_dim}"
        )
    return config.num_layers * row + len(config.indexer.full_layers) * KEY_BYTES

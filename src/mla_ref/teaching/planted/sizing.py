"""A bug in planning memory, as a published library had it."""

from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.layers import MLAConfig


def bytes_without_index_keys(config: MLAConfig, cache_format: str = "fp8") -> int:
    """BUG: counts the rows of the attention and forgets the indexer's keys.

    Right for every model without an indexer, so for each one that the server ran before. With
    DeepSeek-V3.2 it makes the pool a fifth larger than the memory set aside for it.
    """
    row = ROW_BYTES if cache_format == "fp8" else 2 * config.kv_row_dim
    return config.num_layers * row

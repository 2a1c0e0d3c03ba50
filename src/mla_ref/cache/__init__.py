"""Where keys and values live between steps: pages, slots and rows."""

from mla_ref.cache.fp8_rows import pack_fp8_rows, unpack_fp8_rows
from mla_ref.cache.index_keys import (
    new_index_cache,
    quantise_index_keys,
    read_index_keys,
    write_index_keys,
)
from mla_ref.cache.pages import gather_rows, pages_needed, slot_mapping, write_rows

__all__ = [
    "gather_rows",
    "new_index_cache",
    "pack_fp8_rows",
    "pages_needed",
    "quantise_index_keys",
    "read_index_keys",
    "slot_mapping",
    "unpack_fp8_rows",
    "write_index_keys",
    "write_rows",
]

"""Where keys and values live between steps: pages, slots and rows."""

from mla_ref.cache.budget import bytes_per_token
from mla_ref.cache.fp8_rows import pack_fp8_rows, unpack_fp8_rows, write_fp8_rows
from mla_ref.cache.index_keys import (
    index_keys_of_pages,
    new_index_cache,
    page_size_of,
    quantise_index_keys,
    read_index_keys,
    write_index_keys,
)
from mla_ref.cache.pages import gather_rows, pages_needed, slot_mapping, write_rows

__all__ = [
    "bytes_per_token",
    "gather_rows",
    "index_keys_of_pages",
    "new_index_cache",
    "pack_fp8_rows",
    "page_size_of",
    "pages_needed",
    "quantise_index_keys",
    "read_index_keys",
    "slot_mapping",
    "unpack_fp8_rows",
    "write_fp8_rows",
    "write_index_keys",
    "write_rows",
]

"""Index keys: 132 bytes a token, planar in each page.

A page of 64 tokens holds first all keys, then all scales:

    bytes     0 .. 8191   64 keys of 128 E4M3 numbers
    bytes  8192 .. 8447   64 float32 scales, one a key

The layout of DeepGEMM's paged index logits and of vLLM's indexer cache. Keys lie together so that
a kernel can load a tile of them in one aligned copy.
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_ref.cache.pages import write_rows
from mla_ref.checks import describe, require_count, require_float, require_size
from mla_ref.numerics.float8 import from_e4m3, group_scale, read_scale, to_e4m3

INDEX_HEAD_DIM = 128
KEY_BYTES = INDEX_HEAD_DIM + 4


def new_index_cache(
    num_pages: int, page_size: int = 64, device: torch.device | None = None
) -> UInt8[Tensor, "pages page_bytes"]:
    """An index-key cache of zeros: every page is page_size * 132 bytes."""
    require_count("num_pages", num_pages)
    require_count("page_size", page_size, at_least=1)
    return torch.zeros(num_pages, page_size * KEY_BYTES, dtype=torch.uint8, device=device)


def index_planes(
    cache: UInt8[Tensor, "pages page_bytes"],
) -> tuple[UInt8[Tensor, "pages page_size 128"], UInt8[Tensor, "pages page_size 4"]]:
    """The keys' bytes and the scales' bytes of a cache, as views of it."""
    if not isinstance(cache, Tensor) or cache.dtype != torch.uint8 or cache.ndim != 2:
        raise TypeError(
            f"cache must be a uint8 tensor [pages, page_size * {KEY_BYTES}], got {describe(cache)}"
        )
    page_size, rest = divmod(cache.shape[1], KEY_BYTES)
    if rest or page_size == 0:
        raise ValueError(
            f"cache must have pages of a multiple of {KEY_BYTES} bytes, got {cache.shape[1]}"
        )
    split = page_size * INDEX_HEAD_DIM
    return (
        cache[:, :split].unflatten(1, (page_size, INDEX_HEAD_DIM)),
        cache[:, split:].unflatten(1, (page_size, 4)),
    )


def quantise_index_keys(
    keys: Float[Tensor, "*shape 128"], scale_rule: str = "pow2-floor"
) -> tuple[UInt8[Tensor, "*shape 128"], Float[Tensor, "*shape"]]:
    """E4M3 bytes and one scale a vector; used for index keys and index queries alike."""
    scale = group_scale(keys.to(torch.float32).abs().amax(dim=-1), scale_rule)
    return to_e4m3(keys.to(torch.float32) / scale[..., None]), scale


def write_index_keys(
    cache: UInt8[Tensor, "pages page_bytes"],
    keys: Float[Tensor, "num_tokens 128"],
    slots: Int[Tensor, " num_tokens"],
    *,
    scale_rule: str = "pow2-floor",
    validate: bool = True,
) -> None:
    """Quantise keys and write each into its slot, in place; slot -1 is not written.

    Args:
        cache: From `new_index_cache`.
        keys: One key a token, after norm and RoPE.
        slots: As in `write_rows`.
        scale_rule: Default is DeepSeek-V3.2's power of two; DeepGEMM's own tests use "fp32-floor".
        validate: As in `write_rows`.
    """
    require_float("keys", keys, "num_tokens 128")
    require_size("keys", keys, 1, INDEX_HEAD_DIM, "the width of an index key")
    data, scale = quantise_index_keys(keys, scale_rule)
    key_plane, scale_plane = index_planes(cache)
    write_rows(key_plane, data, slots, validate=validate)
    write_rows(scale_plane, scale[:, None].view(torch.uint8), slots, validate=validate)


def read_index_keys(
    cache: UInt8[Tensor, "pages page_bytes"],
    block_table_row: Int[Tensor, " max_pages"],
    first: int,
    count: int,
    *,
    scale_reader: str = "stored",
) -> Float[Tensor, "count 128"]:
    """The float32 keys at positions first .. first + count - 1 of one request."""
    key_plane, scale_plane = index_planes(cache)
    page_size = key_plane.shape[1]
    positions = torch.arange(first, first + count, device=cache.device)
    pages, offsets = block_table_row.long()[positions // page_size], positions % page_size
    scale = scale_plane[pages, offsets].view(torch.float32)
    return from_e4m3(key_plane[pages, offsets]) * read_scale(scale, scale_reader)

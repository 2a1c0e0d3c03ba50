"""Index keys: 132 bytes a token, planar in each page, or plain numbers.

As served, a page of 64 tokens holds first all keys, then all scales:

    bytes     0 .. 8191   64 keys of 128 E4M3 numbers
    bytes  8192 .. 8447   64 float32 scales, one a key

The layout of DeepGEMM's paged index logits and of vLLM's indexer cache. Keys lie together so that
a kernel can load a tile of them in one aligned copy. A cache of plain numbers [pages, page_size, d]
is what that is checked against.
"""

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from mla_ref.cache.pages import pages_needed, require_page_size, write_rows
from mla_ref.checks import (
    describe,
    require_choice,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)
from mla_ref.numerics.float8 import (
    SCALE_READERS,
    SCALE_RULES,
    from_e4m3,
    group_scale,
    read_scale,
    to_e4m3,
)

INDEX_HEAD_DIM = 128
KEY_BYTES = INDEX_HEAD_DIM + 4


def new_index_cache(
    num_pages: int,
    page_size: int = 64,
    *,
    dtype: torch.dtype = torch.uint8,
    head_dim: int = INDEX_HEAD_DIM,
    device: torch.device | None = None,
) -> Shaped[Tensor, "pages *page"]:
    """An index-key cache of zeros.

    Args:
        num_pages: Pages.
        page_size: Tokens a page.
        dtype: uint8 for FP8 keys, page_size * 132 bytes a page; or a floating-point dtype for plain
            numbers [num_pages, page_size, head_dim].
        head_dim: Width of a key; FP8 keys have 128.
        device: Where.
    """
    require_count("num_pages", num_pages)
    require_count("page_size", page_size, at_least=1)
    require_count("head_dim", head_dim, at_least=1)
    if not isinstance(dtype, torch.dtype) or not (dtype == torch.uint8 or dtype.is_floating_point):
        raise TypeError(f"dtype must be uint8 or a floating-point dtype, got {describe(dtype)}")
    if dtype != torch.uint8:
        return torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device)
    if head_dim != INDEX_HEAD_DIM:
        raise ValueError(f"head_dim must be {INDEX_HEAD_DIM} for FP8 keys, got {head_dim}")
    return torch.zeros(num_pages, page_size * KEY_BYTES, dtype=torch.uint8, device=device)


def page_size_of(cache: Shaped[Tensor, "pages *page"], name: str = "cache") -> int:
    """Tokens a page of an index-key cache of either kind; `name` is what an error calls it."""
    if isinstance(cache, Tensor) and cache.is_floating_point():
        require_float(name, cache, "pages page_size d_i")
        require_page_size(name, cache)
        return cache.shape[1]
    return index_planes(cache, name)[0].shape[1]


def index_planes(
    cache: UInt8[Tensor, "pages page_bytes"], name: str = "cache"
) -> tuple[UInt8[Tensor, "pages page_size 128"], UInt8[Tensor, "pages page_size 4"]]:
    """The keys' bytes and the scales' bytes of a cache, as views; `name` as in `page_size_of`."""
    if not isinstance(cache, Tensor) or cache.dtype != torch.uint8 or cache.ndim != 2:
        raise TypeError(
            f"{name} must be a uint8 tensor [pages, page_size * {KEY_BYTES}], got {describe(cache)}"
        )
    page_size, rest = divmod(cache.shape[1], KEY_BYTES)
    if rest or page_size == 0:
        raise ValueError(
            f"{name} must have pages of a multiple of {KEY_BYTES} bytes, got {cache.shape[1]}"
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
    require_choice("scale_rule", scale_rule, SCALE_RULES)
    if not isinstance(keys, Tensor) or not keys.is_floating_point():
        raise TypeError(f"keys must be a floating-point tensor, got {describe(keys)}")
    if keys.ndim == 0 or keys.shape[-1] != INDEX_HEAD_DIM:
        raise ValueError(
            f"keys must have {INDEX_HEAD_DIM} numbers in the last dimension, got {describe(keys)}"
        )
    scale = group_scale(keys.to(torch.float32).abs().amax(dim=-1), scale_rule)
    return to_e4m3(keys.to(torch.float32) / scale[..., None]), scale


def write_index_keys(
    cache: Shaped[Tensor, "pages *page"],
    keys: Float[Tensor, "num_tokens d_i"],
    slots: Int[Tensor, " num_tokens"],
    *,
    scale_rule: str = "pow2-floor",
    validate: bool = True,
) -> None:
    """Write each key into its slot, quantised if the cache is; slot -1 is not written.

    Args:
        cache: From `new_index_cache`.
        keys: One key a token, after norm and RoPE.
        slots: As in `write_rows`.
        scale_rule: Default is DeepSeek-V3.2's power of two; DeepGEMM's own tests use "fp32-floor".
        validate: As in `write_rows`.
    """
    require_float("keys", keys, "num_tokens d_i")
    require_integer("slots", slots, "num_tokens")
    require_size("slots", slots, 0, keys.shape[0], "one a key")
    require_choice("scale_rule", scale_rule, SCALE_RULES)
    page_size_of(cache)
    width = cache.shape[2] if cache.is_floating_point() else INDEX_HEAD_DIM
    require_size("keys", keys, 1, width, "the width of an index key")
    require_same_device({"cache": cache, "keys": keys, "slots": slots})
    if cache.is_floating_point():
        write_rows(cache, keys, slots, validate=validate)
        return
    data, scale = quantise_index_keys(keys, scale_rule)
    key_plane, scale_plane = index_planes(cache)
    write_rows(key_plane, data, slots, validate=validate)
    write_rows(scale_plane, scale[:, None].view(torch.uint8), slots, validate=validate)


def read_index_keys(
    cache: Shaped[Tensor, "pages *page"],
    block_table_row: Int[Tensor, " max_pages"],
    first: int,
    count: int,
    *,
    scale_reader: str = "stored",
) -> Float[Tensor, "count d_i"]:
    """The keys at positions first .. first + count - 1 of one request; float32 if they were FP8.

    Raises:
        ValueError: The request's pages do not reach so far, or one of them is not in the cache:
            page -1 would be the last one.
    """
    page_size = page_size_of(cache)
    require_integer("block_table_row", block_table_row, "max_pages")
    require_count("first", first)
    require_count("count", count)
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    if first + count > block_table_row.shape[0] * page_size:
        raise ValueError(
            f"block_table_row has {block_table_row.shape[0]} pages of {page_size}, too few for "
            f"first {first} + count {count}"
        )
    # Whole pages and then a cut: a page is one copy, where a gather by token is 64.
    start, skipped = divmod(first, page_size)
    used = pages_needed(skipped + count, page_size) if count else 0
    pages = block_table_row[start : start + used].long()
    wrong = pages[(pages < 0) | (pages >= cache.shape[0])]
    if wrong.numel():
        raise ValueError(
            f"block_table_row names page {int(wrong[0])}, but the cache has pages 0 to "
            f"{cache.shape[0] - 1}"
        )

    return _keys_of(cache, pages, slice(skipped, skipped + count), scale_reader)


def index_keys_of_pages(
    cache: Shaped[Tensor, "pages *page"],
    block_table_row: Int[Tensor, " max_pages"],
    *,
    scale_reader: str = "stored",
) -> Float[Tensor, "keys d_i"]:
    """The keys in all pages of a request; nothing is read back to the host, for captured steps.

    A page outside the cache gives the keys of page 0, or zeros where the cache has no page: whoever
    reads here knows the length and masks what lies behind it. Keys that nobody has written may be
    NaN.
    """
    require_integer("block_table_row", block_table_row, "max_pages")
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    page_size = page_size_of(cache)
    if cache.shape[0] == 0:
        cache = cache.new_zeros(1, *cache.shape[1:])
    there = (block_table_row >= 0) & (block_table_row < cache.shape[0])
    pages = torch.where(there, block_table_row, 0).long()
    return _keys_of(cache, pages, slice(0, pages.shape[0] * page_size), scale_reader)


def _keys_of(
    cache: Shaped[Tensor, "pages *page"],
    pages: Int[Tensor, " used"],
    keys: slice,
    scale_reader: str,
) -> Float[Tensor, "count d_i"]:
    """Some of the keys of these pages; float32 if they were FP8."""

    def cut(plane: Tensor) -> Tensor:
        return plane[pages].flatten(0, 1)[keys]

    if cache.is_floating_point():
        return cut(cache)
    key_plane, scale_plane = index_planes(cache)
    scale = cut(scale_plane).contiguous().view(torch.float32)
    return from_e4m3(cut(key_plane)) * read_scale(scale, scale_reader)

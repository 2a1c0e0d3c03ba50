"""The Triton attention kernel of rung 14 in NumPy: a tile model, the same steps in the same order.

It is for FP8 rows and one program: one query row, its heads, one split of its list. NumPy's arrays
take the place of tiles, `Memory.load` that of `tl.load`, and a product of float16 operands is
summed in float32 as tensor cores do. What it leaves out is what makes the kernel fast: threads,
shared memory, copies in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_ref.cache.fp8_rows import GROUP, GROUPS, LATENT, ROPE, ROW_BYTES
from mla_ref.checks import describe, require_count, require_scale, require_size
from mla_ref.numerics import AttentionResult, merge_many
from mla_ref.teaching.tile_memory import Array, Memory

LOG2E = np.float32(1.4426950408889634)
LN2 = np.float32(0.6931471805599453)
TOP = np.float32(14.0)  # weights times scales lie below 2^14, so float16 holds them
LEAST = -100  # scales below 2^-100 share its exponent


@dataclass(frozen=True)
class Place:
    """Where a paged cache lies.

    Attributes:
        start: Address of its first byte.
        page_size: Tokens of a page.
        page_stride: Bytes from a page to the next.
        slot_stride: Bytes from a row to the next within a page.
        capacity: Slots.
    """

    start: int
    page_size: int
    page_stride: int
    slot_stride: int
    capacity: int


Addresses = Callable[[Array, Place], Array]


def row_addresses(slots: Array, place: Place) -> Array:
    """The address of each slot's first byte, in 64 bits."""
    page, offset = slots // place.page_size, slots % place.page_size
    page, offset = page.astype(np.int64), offset.astype(np.int64)
    return place.start + page * place.page_stride + offset * place.slot_stride


@dataclass(frozen=True)
class Query:
    """The heads of one row, transposed and ready to multiply.

    Attributes:
        latent: [512, heads] in float16, each head divided by a power of two.
        up: [heads], what each was divided by.
        rope: [64, heads] in float32.
    """

    latent: Array
    up: Array
    rope: Array


@dataclass(frozen=True)
class Tile:
    """Gathered tokens; those that the list does not name are 0.

    Attributes:
        listed: [tokens], whether an entry names a slot.
        codes: [tokens, 512] in float16, E4M3 numbers without their scales.
        scales: [tokens, 4] in float32.
        rope: [tokens, 64] in float32.
    """

    listed: Array
    codes: Array
    scales: Array
    rope: Array


@dataclass(frozen=True)
class State:
    """The online softmax, in base 2.

    Attributes:
        highest: [heads], the running maximum.
        total: [tokens of a tile, heads], the running sum, not yet added up over tokens.
        out: [512, heads], not normalised.
    """

    highest: Array
    total: Array
    out: Array


def load_query(q: Array) -> Query:
    """One row's heads, [heads, 576] in float32; each head's largest number becomes 16 to 32."""
    latent, rope = q.T[:LATENT], q.T[LATENT:]
    top = np.abs(latent).max(axis=0)
    exponent = np.maximum(top.view(np.int32) >> 23, 5)
    down = ((258 - exponent) << 23).view(np.float32)
    up = ((exponent - 4) << 23).view(np.float32)
    return Query((latent * down).astype(np.float16), up, rope)


def load_tile(
    memory: Memory, place: Place, entries: Array, addresses: Addresses = row_addresses
) -> Tile:
    """Gather the rows that a tile's entries name. Masked means untouched: no memory is read."""
    listed = (entries >= 0) & (entries < place.capacity)
    at = addresses(np.where(listed, entries, 0).astype(np.int32), place)

    def load(first: int, count: int, size: int, dtype: str) -> Array:
        where = at[:, None] + first + size * np.arange(count, dtype=at.dtype)
        return memory.load(where, dtype, np.broadcast_to(listed[:, None], where.shape))

    return Tile(
        listed,
        load(0, LATENT, 1, "e4m3"),
        load(LATENT, GROUPS, 4, "float32"),
        load(LATENT + 4 * GROUPS, ROPE, 2, "bfloat16"),
    )


def score_tile(tile: Tile, query: Query, softmax_scale: float) -> Array:
    """S^T = K Q^T, [tokens, heads]: tokens on M, heads on N; times the scale, in base 2."""
    scores = np.zeros((len(tile.listed), query.latent.shape[1]), np.float32)
    for group in range(GROUPS):
        d = slice(group * GROUP, (group + 1) * GROUP)
        scores += _dot(tile.codes[:, d], query.latent[d]) * tile.scales[:, group, None]
    scores = scores * query.up + _dot(tile.rope, query.rope)
    scores = scores * np.float32(np.float32(softmax_scale) * LOG2E)
    return np.where(tile.listed[:, None], scores, np.float32(-np.inf))


def add_tile(state: State, tile: Tile, scores: Array) -> State:
    """The online softmax takes one tile more."""
    exponent = (tile.scales.max(axis=1).view(np.int32) >> 23) - 126
    heights = scores + (np.maximum(exponent, LEAST).astype(np.float32) - TOP)[:, None]
    highest = np.maximum(state.highest, heights.max(axis=0))
    # -inf minus -inf is NaN: nothing has been seen yet if a list begins with a tile of -1.
    anchor = np.where(highest == -np.inf, np.float32(0.0), highest)
    shrink = np.exp2(state.highest - anchor)
    weights = np.exp2(scores - anchor)
    out = state.out * shrink
    for group in range(GROUPS):
        d = slice(group * GROUP, (group + 1) * GROUP)
        scaled = (weights * tile.scales[:, group, None]).astype(np.float16)
        out[d] += _dot(tile.codes[:, d].T, scaled)
    return State(highest, state.total * shrink + weights, out)


def finish(state: State) -> tuple[Array, Array]:
    """Output [heads, 512] and natural LSE [heads]; 0 and -inf where nothing was seen."""
    nothing = state.highest == -np.inf
    total = np.where(nothing, np.float32(1.0), state.total.sum(axis=0))
    lse = np.where(nothing, np.float32(-np.inf), (state.highest + np.log2(total)) * LN2)
    return (state.out * (np.float32(1.0) / total)).T, lse


def attend_program(
    q: Array,
    memory: Memory,
    place: Place,
    entries: Array,
    *,
    softmax_scale: float,
    tile: int = 32,
    addresses: Addresses = row_addresses,
) -> tuple[Array, Array]:
    """One program: a row's heads over one split of its list, in tiles.

    Args:
        q: [heads, 576] in float32; its numbers are rounded to 11 binary digits, which is exact
            for bfloat16.
        memory: Where the cache lies.
        place: Where in it.
        entries: Physical slots of the split; outside 0 .. capacity counts as -1.
        softmax_scale: The un-absorbed scale.
        tile: Tokens of a tile.
        addresses: Turns slots into addresses.

    Returns:
        Output [heads, 512] and natural LSE [heads], in float32.
    """
    heads, query = len(q), load_query(q)
    state = State(
        np.full(heads, -np.inf, np.float32),
        np.zeros((tile, heads), np.float32),
        np.zeros((LATENT, heads), np.float32),
    )
    for start in range(0, len(entries), tile):
        some = entries[start : start + tile]
        padded = np.pad(some, (0, tile - len(some)), constant_values=-1)
        gathered = load_tile(memory, place, padded, addresses)
        state = add_tile(state, gathered, score_tile(gathered, query, softmax_scale))
    return finish(state)


def attend_in_tiles(
    q: Float[Tensor, "rows h 576"],
    kv_cache: UInt8[Tensor, "pages page_size 656"],
    indices: Int[Tensor, "rows topk"],
    *,
    softmax_scale: float,
    num_splits: int = 1,
    tile: int = 32,
) -> AttentionResult:
    """Every program of a launch, one after the other, and the merge of the splits.

    Args:
        q: Absorbed queries; float32 ones are rounded as in `attend_program`.
        kv_cache: Contiguous 656-byte rows.
        indices: Physical slots, -1 anywhere for none; an entry outside the cache is like -1.
        softmax_scale: The un-absorbed scale.
        num_splits: Pieces of each list, each a whole number of tiles.
        tile: Tokens of a tile.

    Returns:
        Output [rows, h, 512] and LSE [rows, h] in float32.
    """
    require_count("num_splits", num_splits, at_least=1)
    require_count("tile", tile, at_least=1)
    require_scale("softmax_scale", softmax_scale)
    require_size("kv_cache", kv_cache, 2, ROW_BYTES, "the bytes of an FP8 row")
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache must be contiguous, got {describe(kv_cache)}")
    pages, page_size = kv_cache.shape[:2]
    memory = Memory()
    memory.place(0, kv_cache.numpy())
    place = Place(0, page_size, page_size * ROW_BYTES, ROW_BYTES, pages * page_size)
    length = -(-indices.shape[1] // (num_splits * tile)) * tile
    results = [
        [
            attend_program(
                row.float().numpy(), memory, place, entries[split * length :][:length],
                softmax_scale=softmax_scale, tile=tile,
            )
            for row, entries in zip(q, indices.numpy(), strict=True)
        ]
        for split in range(num_splits)
    ]  # fmt: skip
    outs, lses = (
        torch.from_numpy(np.stack([np.stack([one[part] for one in rows]) for rows in results]))
        for part in (0, 1)
    )
    return merge_many(outs, lses)


def _dot(a: Array, b: Array) -> Array:
    """A matrix product whose sums are float32, whatever the operands are."""
    return np.matmul(a, b, dtype=np.float32)

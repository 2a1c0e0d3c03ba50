"""One warp of the CUDA kernel of rung 15 in NumPy: the same 32 lanes, registers and steps.

It is `decode.cu` for FP8 rows, one query row and eight heads; arrays have the lane first. In the
kernel four such warps share a list, and their parts meet at the end; here one takes all of it.
Where `tile_model` says what is computed, this says which lane computes it.
"""

from dataclasses import dataclass

import numpy as np

from mla_ref.cache.fp8_rows import GROUP, GROUPS, LATENT, ROPE, ROW_BYTES
from mla_ref.checks import describe, require_scale
from mla_ref.teaching.fragments import (
    LANES,
    C,
    G,
    T,
    keys_operand,
    multiply,
    token_of,
    transpose_8x8,
    values_operand,
)
from mla_ref.teaching.tile_memory import Array
from mla_ref.teaching.warp_memory import PIECE, ROWS, Ring

HEADS = 8
LOWEST = np.float32(-3e38)  # in place of -inf, so that a difference of two is 0 and not NaN
TARGET = np.float32(8.0)  # log2 of the largest weight after the anchor rose
LIMIT = np.float16(2.0**15)  # a weight that reaches it makes the anchor rise
LARGEST_SUM = np.float32(2.0**110)  # and so does a sum beyond this
SMALLEST_LOG = np.float32(-100.0)  # a smaller scale counts as 2^-100 where the anchor is chosen
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
ROPE_AT = LATENT + 4 * GROUPS


@dataclass(frozen=True)
class WarpQuery:
    """A row's eight heads as operand B, the lane's numbers of every step.

    Attributes:
        latent: [8 chunks, 4 steps, 32, 4] in float16, each head multiplied by a power of two.
        rope: [2 chunks, 2 steps, 32, 4].
        factor: [8 heads], what takes the power of two back, with the softmax scale in base 2.
        rope_factor: The softmax scale in base 2.
    """

    latent: Array
    rope: Array
    factor: Array
    rope_factor: np.float32


@dataclass
class WarpState:
    """The online softmax of a warp; a lane's heads are 2t and 2t + 1.

    Attributes:
        out: [32, 4 groups, 8 tiles, 4], O^T as fragments of C.
        anchor: [32, 2], the exponent that weights and sums are relative to.
        sum: [32, 2], of the lane's own tokens.
    """

    out: Array
    anchor: Array
    sum: Array


def load_query(q: Array, softmax_scale: float) -> WarpQuery:
    """Lay out a row's eight heads, [8, 576] in float32, in the order of the keys' bytes."""
    latent, rope = q[:, :LATENT], q[:, LATENT:]
    largest = np.abs(latent).max(axis=1)
    exponent = np.where(largest == 0, 0, np.frexp(largest)[1] - 1 - 4).astype(np.int32)
    scaled = np.ldexp(latent, -exponent[:, None]).astype(np.float16)
    # Lane (g, t), chunk c, step j: head g, numbers 64 c + 16 t + 4 j and the next three.
    by_chunk = scaled.reshape(HEADS, 8, 4, 4, 4)[G, :, T]  # [32, chunk, step, 4]
    rotary = rope.reshape(HEADS, 2, 4, 2, 4)[G, :, T]
    scale = np.float32(np.float32(softmax_scale) * LOG2E)
    return WarpQuery(
        by_chunk.transpose(1, 2, 0, 3),
        rotary.transpose(1, 2, 0, 3),
        np.ldexp(scale, exponent),
        scale,
    )


def load_16(tile: Array, row: Array, first: int, piece: Array) -> Array:
    """16 bytes for each lane, [32, 16]."""
    at = first + piece[:, None] * PIECE + np.arange(PIECE)
    return tile[row[:, None], at]


def load_scales(tile: Array) -> tuple[Array, Array]:
    """The four scales of the lane's two tokens, [32, 4] each."""
    scales = np.ascontiguousarray(tile[:, LATENT:ROPE_AT]).view(np.float32)
    return scales[token_of(G)], scales[token_of(G) + 8]


def score_tile(tile: Array, query: WarpQuery) -> Array:
    """S^T as a fragment of C, [32, 4]: 16 tokens on M, 8 heads on N, in base 2."""
    low, high = token_of(G), token_of(G) + 8
    scale_low, scale_high = load_scales(tile)
    sums = np.zeros((LANES, 4), np.float32)
    for group in range(GROUPS):
        part = np.zeros((LANES, 4), np.float32)
        for chunk in (2 * group, 2 * group + 1):
            x, y = (load_16(tile, row, chunk * 64, T) for row in (low, high))
            for j in range(4):
                word = slice(4 * j, 4 * j + 4)
                a = keys_operand(x[:, word], y[:, word])
                part = multiply(part, a, query.latent[chunk, j])
        sums += part * np.stack([scale_low[:, group]] * 2 + [scale_high[:, group]] * 2, axis=1)
    rotary = np.zeros((LANES, 4), np.float32)
    for chunk in range(2):
        x, y = (_bfloat16(load_16(tile, row, ROPE_AT + chunk * 64, T)) for row in (low, high))
        for j in range(2):
            first, last = slice(4 * j, 4 * j + 2), slice(4 * j + 2, 4 * j + 4)
            a = np.concatenate([x[:, first], y[:, first], x[:, last], y[:, last]], axis=1)
            rotary = multiply(rotary, a, query.rope[chunk, j])
    return sums * query.factor[C.column] + rotary * query.rope_factor


def add_tile(state: WarpState, tile: Array, scores: Array) -> None:
    """The online softmax takes one tile more. Scores of absent rows are -inf."""
    low, high = load_scales(tile)
    scales = np.stack([low, low, high, high], axis=2)  # [32, group, number of C]
    p, weights = _weigh(state, scores, scales)
    # Of NaN nothing is known, so it raises nothing; it is in the sums in any case.
    if (weights >= LIMIT).any() or (state.sum + _of_heads(p) > LARGEST_SUM).any():
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.fmax(np.log2(scales.max(axis=1)), SMALLEST_LOG)
        _raise_anchors(state, scores + logs)
        p, weights = _weigh(state, scores, scales)
    state.sum += _of_heads(p)
    for group in range(GROUPS):
        packed = weights[:, group]
        b = np.concatenate([transpose_8x8(packed[:, :2]), transpose_8x8(packed[:, 2:])], axis=1)
        pieces = [load_16(tile, T + r, group * GROUP, token_of(G)) for r in (0, 4, 8, 12)]
        for w in range(4):
            words = np.stack([piece[:, 4 * w : 4 * w + 4] for piece in pieces], axis=1)
            for half, a in enumerate(values_operand(words)):
                out = state.out[:, group, 2 * w + half]
                state.out[:, group, 2 * w + half] = multiply(out, a, b)


def finish(state: WarpState) -> tuple[Array, Array]:
    """Output [8, 512] and natural LSE [8]; 0 and -inf where nothing was seen."""
    heads = 2 * T[:, None] + [0, 1]
    total, anchor = np.zeros(HEADS, np.float32), np.zeros(HEADS, np.float32)
    np.add.at(total, heads, state.sum)
    anchor[heads] = state.anchor
    # Number 16 token_of(g) + 4 w + b of a group is tile 2 w + b / 2, row g + 8 (b % 2).
    out = np.zeros((HEADS, GROUPS, 8, 4, 4), np.float32)
    for w in range(4):
        for b in range(4):
            for e in (0, 1):
                number = state.out[:, :, 2 * w + b // 2, 2 * (b % 2) + e]
                out[2 * T + e, :, token_of(G), w, b] = number
    empty = total == 0
    safe = np.where(empty, np.float32(1.0), total)
    result = out.reshape(HEADS, LATENT) * np.where(empty, 0, 1 / safe)[:, None]
    lse = np.where(empty, np.float32(-np.inf), np.log(safe) + anchor * LN2)
    return result, lse


def attend_warp(
    q: Array, rows: Array, entries: Array, *, softmax_scale: float, ring: Ring | None = None
) -> tuple[Array, Array]:
    """A warp attends with a row's eight heads to the cached rows that its list names.

    Args:
        q: [8, 576] in float32, numbers that bfloat16 holds.
        rows: [slots, 656] bytes.
        entries: [k] slots; outside 0 .. slots - 1 counts as -1, for none.
        softmax_scale: The un-absorbed scale.
        ring: Where tiles are copied to; by default two places, and copies land at the wait.

    Returns:
        Output [8, 512] and natural LSE [8], in float32.
    """
    require_scale("softmax_scale", softmax_scale)
    if q.shape != (HEADS, LATENT + ROPE):
        raise ValueError(f"q must be [8, 576], got {describe(q)}")
    if rows.ndim != 2 or rows.shape[1] != ROW_BYTES:
        raise ValueError(f"rows must be [slots, {ROW_BYTES}], got {describe(rows)}")
    ring = Ring() if ring is None else ring
    listed = (entries >= 0) & (entries < len(rows))
    pad = -len(entries) % ROWS
    slots = np.pad(np.where(listed, entries, 0), (0, pad)).reshape(-1, ROWS)
    present = np.pad(listed, (0, pad)).reshape(-1, ROWS)
    query = load_query(q, softmax_scale)
    state = WarpState(
        np.zeros((LANES, GROUPS, 8, 4), np.float32),
        np.full((LANES, 2), LOWEST, np.float32),
        np.zeros((LANES, 2), np.float32),
    )
    tokens = token_of(C.row)
    # As in the kernel: the first turns only start copies, later ones refill the place just read.
    for i in range(-ring.places, len(slots)):
        if i >= 0:
            ring.wait(i)
            tile = ring.tile(i)
            scores = np.where(present[i][tokens], score_tile(tile, query), np.float32(-np.inf))
            add_tile(state, tile, scores)
        if (ahead := i + ring.places) < len(slots):
            ring.start(ahead, rows[slots[ahead]], present[ahead])
    return finish(state)


def _weigh(state: WarpState, scores: Array, scales: Array) -> tuple[Array, Array]:
    """Powers p = 2^(score - anchor), [32, 4], and p times each scale in float16, [32, 4, 4]."""
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp2(scores - state.anchor[:, [0, 1, 0, 1]])
        return p, (p[:, None] * scales).astype(np.float16)


def _of_heads(p: Array) -> Array:
    """The two tokens of each of a lane's two heads together, [32, 2]."""
    return p[:, :2] + p[:, 2:]


def _raise_anchors(state: WarpState, heights: Array) -> None:
    """Move the anchors up to the largest weight of the tile, and the sums with them."""
    for e in (0, 1):
        high = _over_tokens(np.fmax(heights[:, e], heights[:, 2 + e])) - TARGET
        anchor = np.fmax(state.anchor[:, e], high)
        factor = np.exp2(state.anchor[:, e] - anchor)
        state.anchor[:, e] = anchor
        state.sum[:, e] *= factor
        state.out[..., e::2] *= factor[:, None, None, None]


def _over_tokens(x: Array) -> Array:
    """The largest of the eight lanes that share t, in all of them: three shuffles."""
    for step in (4, 8, 16):
        x = np.fmax(x, x[np.arange(LANES) ^ step])
    return x


def _bfloat16(data: Array) -> Array:
    """Numbers of pairs of bytes, as float32."""
    bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)

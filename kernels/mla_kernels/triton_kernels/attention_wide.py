"""Sparse MLA attention for more than 16 heads over FP8 rows: one warp to a scale group.

Read `attention` first: operands, scales and masks are the same, and so are the arguments. What
differs is who computes what. There a program's warps share every product, so each reads the whole
tile and all queries from shared memory, and with 32 heads that takes longer than the products. Here
the products are batched,

    S[g] = K[g] Q[g]^T      [4, BN, 128] x [4, 128, BH]
    O[g] = P[g] V[g]        [4, BH, BN] x [4, BN, 128]

and Triton gives each of the four products of a batch to one of four warps. Group g of a row is read
by warp g alone, and so is its part of the queries. What the warps must exchange is small: their
four shares of each score, which are added, and the weights. The heads stand on M in the second
product, where 32 of them fill two tiles: the tile has the same orientation in both products then,
and is kept once.

A warp holds 128 numbers of its part of O in each lane, so registers are what is short: BN 32 with
BH 32 takes all 255 of a lane.
"""

import triton
import triton.language as tl

from mla_kernels.triton_kernels.attention import (
    GROUP,
    LATENT,
    LEAST,
    LN2,
    LOG2E,
    ROPE,
    TOP,
    e4m3_to_float16,
)
from mla_kernels.triton_kernels.sink import kept_beside_sink

GROUPS = tl.constexpr(4)


@triton.jit
def _power_of_two(q):
    """For each head the factor that brings its largest number to 16 .. 32, and its inverse."""
    top = tl.max(tl.max(tl.abs(q), 2), 0)
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 5)
    down = ((258 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 4) << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def _sum_of_groups(x, BN: tl.constexpr, BH: tl.constexpr):
    """[4, BN, BH] to [BN, BH]: one exchange, then each lane adds what it holds.

    `tl.sum` would leave the sum with every warp, and each would compute every weight.
    """
    x = tl.reshape(tl.permute(x, (1, 2, 0)), (BN, BH, 2, 2))
    even, odd = tl.split(x)
    first, second = tl.split(even + odd)
    return first + second


@triton.jit
def sparse_attention_wide_kernel(
    q_ptr, latent_ptr, scale_ptr, rope_ptr, indices_ptr, counts_ptr, sink_ptr, out_ptr, lse_ptr,
    heads, topk, split_length, capacity, softmax_scale,
    q_row, q_head, page_stride, slot_stride, indices_row, sink_head,
    out_split, out_row, out_head, lse_split, lse_row, lse_head,
    PAGE_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    CAST_BY_ASM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Attention of one row, BH heads and one split; grid (rows * head blocks, splits).

    Args as those of `sparse_attention_kernel`, for FP8 rows; DTYPE is float16.
    """
    blocks = tl.cdiv(heads, BH)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # 64 bits: rows * q_row passes 2^31
    split = tl.program_id(1)
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    real = head < heads

    group = tl.arange(0, GROUPS)
    d = group[:, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    d_rope = tl.arange(0, ROPE)
    q_at = q_ptr + row * q_row
    q = tl.load(q_at + head[None, :, None] * q_head + d, mask=real[None, :, None], other=0.0)
    qr = tl.load(
        q_at + LATENT + head[None, :] * q_head + d_rope[:, None], mask=real[None, :], other=0.0
    ).to(ROPE_DTYPE)
    q = q.to(tl.float32)
    down, up = _power_of_two(q)
    q = tl.permute((q * down[None, :, None]).to(DTYPE), (0, 2, 1))

    first = split * split_length
    last = tl.minimum(first + split_length, topk)
    if counts_ptr is not None:
        last = tl.minimum(last, tl.load(counts_ptr + row)).to(tl.int32)
    capacity = capacity.to(tl.uint64)

    highest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BN, BH], tl.float32)  # summed over its tokens once, behind the loop
    o = tl.zeros([GROUPS, BH, GROUP], tl.float32)
    for start in range(first, last, BN):
        entry = start + tl.arange(0, BN)
        slot = tl.load(indices_ptr + row * indices_row + entry, mask=entry < last, other=-1)
        slot = slot.to(tl.int64)  # before the comparison: 2^40 + 17 is not slot 17
        listed = slot.to(tl.uint64, bitcast=True) < capacity  # -1 without a sign is beyond any
        slot = tl.where(listed, slot, 0).to(tl.uint32)
        # 64 bits: slot 3,273,604 of 656 bytes lies beyond 2^31.
        page, place = (slot // PAGE_SIZE).to(tl.int64), (slot % PAGE_SIZE).to(tl.int64)
        at = page * page_stride + place * slot_stride
        k = tl.load(latent_ptr + at[None, :, None] + d, mask=listed[None, :, None], other=0.0)
        rope_at = at >> 1
        if ALIGNED:
            rope_at = tl.multiple_of(rope_at, 8)
        kr = tl.load(rope_ptr + rope_at[:, None] + d_rope[None, :], mask=listed[:, None], other=0.0)

        c = e4m3_to_float16(k) if CAST_BY_ASM else k.to(DTYPE)
        shares = tl.dot(c, q)
        f = tl.load(
            scale_ptr + (at >> 2)[None, :] + group[:, None], mask=listed[None, :], other=0.0
        )
        scores = _sum_of_groups(shares * f[:, :, None], BN, BH) * up[None, :]
        scores = tl.dot(kr.to(ROPE_DTYPE), qr, scores, input_precision="ieee")
        scores = tl.where(listed[:, None], scores * (softmax_scale * LOG2E), float("-inf"))

        exponent = (tl.max(f, 0).to(tl.int32, bitcast=True) >> 23) - 126
        heights = scores + (tl.maximum(exponent, LEAST).to(tl.float32) - TOP)[:, None]
        above = tl.maximum(highest, tl.max(heights, 0))
        # -inf minus -inf is NaN: nothing has been seen yet if a list begins with a tile of -1.
        anchor = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(highest - anchor)
        weights = tl.exp2(scores - anchor[None, :])
        highest = above
        total = total * shrink[None, :] + weights
        w = tl.permute(weights[None, :, :] * f[:, :, None], (0, 2, 1)).to(DTYPE)
        o = tl.dot(w, c, o * shrink[None, :, None])

    nothing = highest == float("-inf")
    sum_of_weights = tl.where(nothing, 1.0, tl.sum(total, 0))
    lse = tl.where(nothing, 0.0, (highest + tl.log2(sum_of_weights)) * LN2)
    share = 1.0 / sum_of_weights
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head * sink_head, mask=real, other=0.0).to(tl.float32)
        share *= kept_beside_sink(lse, sink)
    out = (o * share[None, :, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + split * out_split + row * out_row + head[None, :, None] * out_head + d
    tl.store(out_at, out, mask=real[None, :, None])
    lse = tl.where(nothing, float("-inf"), lse)
    tl.store(lse_ptr + split * lse_split + row * lse_row + head * lse_head, lse, mask=real)

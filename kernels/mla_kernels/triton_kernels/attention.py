"""Sparse MLA attention in one kernel: decode is several splits of it, extend is one.

A program takes one query row, `BH` of its heads and one split of its list. It walks the split in
tiles of `BN` listed tokens and keeps the online softmax of rung 3: a running maximum, a running sum
and an output that is rescaled when the maximum moves.

**Operands swapped.** A matrix product on tensor cores pads M to 16 and N to 8. Attention by the
book puts the heads on M: 8 heads would be padded to 16 or, in kernels made for 64, to 64. Here
tokens stand on M and heads on N,

    S^T [BN, BH] = K [BN, d] Q^T [d, BH],    O^T [d, BH] = V^T [d, BN] P^T [BN, BH],

so 8 heads fill a tile exactly. Keys and values are one row: the tile that was gathered for S^T is
used again, transposed, for O^T.

**FP8 rows as they are.** A 656-byte row holds 512 E4M3 bytes, 4 scales and 64 bfloat16 numbers;
the kernel reads it through three views of the same memory. E4M3 to float16 is exact and one
instruction, so the operands are float16 and a group's scale stays out of them: each group of 128
has its own product, and its scale multiplies the sum in float32. What float16 cannot hold is moved
by scales that are taken out again in float32:

- q: each head is divided by a power of two, which is exact.
- weights: what the second product needs is P * scale, and scales may lie anywhere in float32. A
  softmax may subtract any number from its scores, as long as it is the same for all of a row. The
  usual one is the largest score; here it is the largest of score + e, with 2^e a power of two above
  the token's scales, less 14. So the largest operand lies just below 2^14 whatever the scales are,
  and nothing has to be put back: the sum of the weights has the same factor.

**Masked means untouched.** An entry that is -1, outside the cache or beyond the row's count loads
zeros: neither the memory of slot 0 nor any other is read for it. Its weight is 0, and its value is
0 too, because 0 * NaN is NaN.
"""

import triton
import triton.language as tl

from mla_kernels.triton_kernels.sink import kept_beside_sink

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(128)  # numbers of a row that share a scale
LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)
# Weights times scales reach up to 2^14, so that float16 has 38 binary digits below the largest.
TOP = tl.constexpr(14.0)
# Scales below 2^-100 share its exponent: a weight is at most 2^114, so that 2,048 can be summed.
LEAST = tl.constexpr(-100)


# Two pairs of E4M3 to two pairs of float16: exact, one instruction each.
CONVERT = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def e4m3_to_float16(x):
    """A cast that stays where it stands, because inline assembly that is not pure does.

    A plain cast would be moved by the compiler behind the changes of layout for the two products
    that use the tile: it would be converted twice, and a load with two users is not pipelined.
    """
    return tl.inline_asm_elementwise(
        CONVERT,
        "=r,=r,r",
        [x.to(tl.uint8, bitcast=True)],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _power_of_two(q0, q1, q2, q3):
    """For each head the factor that brings its largest number to 16 .. 32, and its inverse."""
    top = tl.maximum(tl.max(tl.abs(q0), 0), tl.max(tl.abs(q1), 0))
    top = tl.maximum(top, tl.maximum(tl.max(tl.abs(q2), 0), tl.max(tl.abs(q3), 0)))
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 5)
    down = ((258 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 4) << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def _store(out_ptr, out, share, group: tl.constexpr, real):
    """One group of the output, [128, BH]."""
    d = group * GROUP + tl.arange(0, GROUP)
    out = (out * share[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + d[:, None], out, mask=real[None, :])


@triton.jit
def sparse_attention_kernel(
    q_ptr, latent_ptr, scale_ptr, rope_ptr, indices_ptr, counts_ptr, sink_ptr, out_ptr, lse_ptr,
    heads, topk, split_length, capacity, softmax_scale,
    q_row, q_head, page_stride, slot_stride, indices_row, sink_head,
    out_split, out_row, out_head, lse_split, lse_row, lse_head,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    CAST_BY_ASM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Attention of one row, BH heads and one split; grid (rows * head blocks, splits).

    Args:
        q_ptr: [rows, heads, 576]; `q_row` and `q_head` are its strides.
        latent_ptr: The cache: E4M3 bytes, or numbers if not FP8. A slot lies at its page times
            `page_stride` plus its place in the page times `slot_stride`.
        scale_ptr: The same memory as float32, from the first scale on. Not read if not FP8.
        rope_ptr: The same memory as bfloat16 or as numbers, from the rotary key on.
        indices_ptr: [rows, topk] physical slots; an entry outside 0 .. `capacity` counts as -1.
        counts_ptr: [rows] or None.
        sink_ptr: [heads] or None. Given with one split only: otherwise it belongs to the merge.
        out_ptr: [splits, rows, heads, 512].
        lse_ptr: [splits, rows, heads], natural, without the sink.
        heads: Query heads.
        topk: Width of the lists.
        split_length: Entries of a split, a multiple of BN.
        capacity: Slots of the cache.
        softmax_scale: As the caller passed it.
        DTYPE: Of the products' operands: float16 for FP8 rows, else as the cache, or float32.
        ROPE_DTYPE: The same for the rotary part, whose numbers are bfloat16 in an FP8 row.
        CAST_BY_ASM: E4M3 to float16 by inline assembly; not in the interpreter, which has none.
        ALIGNED: FP8 rows start at multiples of 16 bytes.
    """
    blocks = tl.cdiv(heads, BH)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # 64 bits: rows * q_row passes 2^31
    split = tl.program_id(1)
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    real = head < heads

    d = tl.arange(0, GROUP)
    q_at = q_ptr + row * q_row + head[None, :] * q_head
    q0 = tl.load(q_at + d[:, None], mask=real[None, :], other=0.0).to(tl.float32)
    q1 = tl.load(q_at + (d + GROUP)[:, None], mask=real[None, :], other=0.0).to(tl.float32)
    q2 = tl.load(q_at + (d + 2 * GROUP)[:, None], mask=real[None, :], other=0.0).to(tl.float32)
    q3 = tl.load(q_at + (d + 3 * GROUP)[:, None], mask=real[None, :], other=0.0).to(tl.float32)
    d_rope = tl.arange(0, ROPE)
    qr = tl.load(q_at + (d_rope + LATENT)[:, None], mask=real[None, :], other=0.0)
    qr = qr.to(ROPE_DTYPE)
    NARROW: tl.constexpr = FP8 and tl.float16 == DTYPE
    if NARROW:
        down, up = _power_of_two(q0, q1, q2, q3)
    else:
        down, up = tl.full([BH], 1.0, tl.float32), tl.full([BH], 1.0, tl.float32)
    q0 = (q0 * down[None, :]).to(DTYPE)
    q1 = (q1 * down[None, :]).to(DTYPE)
    q2 = (q2 * down[None, :]).to(DTYPE)
    q3 = (q3 * down[None, :]).to(DTYPE)

    first = split * split_length
    last = tl.minimum(first + split_length, topk)
    if counts_ptr is not None:
        last = tl.minimum(last, tl.load(counts_ptr + row)).to(tl.int32)
    capacity = capacity.to(tl.uint64)

    highest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BN, BH], tl.float32)  # summed over its tokens once, behind the loop
    o0 = tl.zeros([GROUP, BH], tl.float32)
    o1 = tl.zeros([GROUP, BH], tl.float32)
    o2 = tl.zeros([GROUP, BH], tl.float32)
    o3 = tl.zeros([GROUP, BH], tl.float32)
    for start in range(first, last, BN):
        entry = start + tl.arange(0, BN)
        slot = tl.load(indices_ptr + row * indices_row + entry, mask=entry < last, other=-1)
        slot = slot.to(tl.int64)  # before the comparison: 2^40 + 17 is not slot 17
        listed = slot.to(tl.uint64, bitcast=True) < capacity  # -1 without a sign is beyond any
        slot = tl.where(listed, slot, 0).to(tl.uint32)
        # 64 bits: slot 3,273,604 of 656 bytes lies beyond 2^31.
        page, place = (slot // PAGE_SIZE).to(tl.int64), (slot % PAGE_SIZE).to(tl.int64)
        at = page * page_stride + place * slot_stride
        some = listed[:, None]
        k0 = tl.load(latent_ptr + at[:, None] + d[None, :], mask=some, other=0.0)
        k1 = tl.load(latent_ptr + at[:, None] + (d + GROUP)[None, :], mask=some, other=0.0)
        k2 = tl.load(latent_ptr + at[:, None] + (d + 2 * GROUP)[None, :], mask=some, other=0.0)
        k3 = tl.load(latent_ptr + at[:, None] + (d + 3 * GROUP)[None, :], mask=some, other=0.0)
        rope_at = at
        if FP8:
            rope_at = at >> 1
            if ALIGNED:
                rope_at = tl.multiple_of(rope_at, 8)
        kr = tl.load(rope_ptr + rope_at[:, None] + d_rope[None, :], mask=some, other=0.0)

        if CAST_BY_ASM:
            c0, c1 = e4m3_to_float16(k0), e4m3_to_float16(k1)
            c2, c3 = e4m3_to_float16(k2), e4m3_to_float16(k3)
        else:
            c0, c1, c2, c3 = k0.to(DTYPE), k1.to(DTYPE), k2.to(DTYPE), k3.to(DTYPE)
        scores = tl.dot(c0, q0, input_precision="ieee")
        f0, f1, f2, f3 = 1.0, 1.0, 1.0, 1.0
        if FP8:
            f0 = tl.load(scale_ptr + (at >> 2), mask=listed, other=0.0)
            f1 = tl.load(scale_ptr + (at >> 2) + 1, mask=listed, other=0.0)
            f2 = tl.load(scale_ptr + (at >> 2) + 2, mask=listed, other=0.0)
            f3 = tl.load(scale_ptr + (at >> 2) + 3, mask=listed, other=0.0)
            scores = scores * f0[:, None]
            scores += tl.dot(c1, q1, input_precision="ieee") * f1[:, None]
            scores += tl.dot(c2, q2, input_precision="ieee") * f2[:, None]
            scores += tl.dot(c3, q3, input_precision="ieee") * f3[:, None]
            scores *= up[None, :]
        else:
            scores = tl.dot(c1, q1, scores, input_precision="ieee")
            scores = tl.dot(c2, q2, scores, input_precision="ieee")
            scores = tl.dot(c3, q3, scores, input_precision="ieee")
        scores = tl.dot(kr.to(ROPE_DTYPE), qr, scores, input_precision="ieee")
        scores = tl.where(some, scores * (softmax_scale * LOG2E), float("-inf"))

        heights = scores
        if NARROW:
            top = tl.maximum(tl.maximum(f0, f1), tl.maximum(f2, f3))
            exponent = (top.to(tl.int32, bitcast=True) >> 23) - 126
            heights += (tl.maximum(exponent, LEAST).to(tl.float32) - TOP)[:, None]
        above = tl.maximum(highest, tl.max(heights, 0))
        # -inf minus -inf is NaN: nothing has been seen yet if a list begins with a tile of -1.
        anchor = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(highest - anchor)
        weights = tl.exp2(scores - anchor[None, :])
        highest = above
        total = total * shrink[None, :] + weights
        # All four before the first product: they pass through shared memory, and one barrier is
        # cheaper than four.
        w0, w1, w2, w3 = weights, weights, weights, weights
        if FP8:
            w0, w1 = weights * f0[:, None], weights * f1[:, None]
            w2, w3 = weights * f2[:, None], weights * f3[:, None]
        w0, w1, w2, w3 = w0.to(DTYPE), w1.to(DTYPE), w2.to(DTYPE), w3.to(DTYPE)
        again = shrink[None, :]
        o0 = tl.dot(tl.trans(c0), w0, o0 * again, input_precision="ieee")
        o1 = tl.dot(tl.trans(c1), w1, o1 * again, input_precision="ieee")
        o2 = tl.dot(tl.trans(c2), w2, o2 * again, input_precision="ieee")
        o3 = tl.dot(tl.trans(c3), w3, o3 * again, input_precision="ieee")

    nothing = highest == float("-inf")
    sum_of_weights = tl.where(nothing, 1.0, tl.sum(total, 0))
    lse = tl.where(nothing, 0.0, (highest + tl.log2(sum_of_weights)) * LN2)
    share = 1.0 / sum_of_weights
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head * sink_head, mask=real, other=0.0).to(tl.float32)
        share *= kept_beside_sink(lse, sink)
    out_at = out_ptr + split * out_split + row * out_row + head[None, :] * out_head
    _store(out_at, o0, share, 0, real)
    _store(out_at, o1, share, 1, real)
    _store(out_at, o2, share, 2, real)
    _store(out_at, o3, share, 3, real)
    lse = tl.where(nothing, float("-inf"), lse)
    tl.store(lse_ptr + split * lse_split + row * lse_row + head * lse_head, lse, mask=real)

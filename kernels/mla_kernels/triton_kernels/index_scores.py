"""Index scores: what each key may be worth to a row, before attention looks at any of them.

    I[t, s] = k_scale[s] * sum over heads j of  W[t, j] * ReLU(q[t, j] · k[s])

Keys stand on the M side of the product and heads on N: a tile of 64 keys by 64 heads is one
product over 128 numbers. ReLU, weight and the sum over heads follow in registers, so the 64 scores
a key that the heads have never reach memory; 4 bytes do. The key's scale is a factor of the whole
sum, since it is positive and ReLU lets positive factors through: one multiplication a key, not one
a head. The query's scale is folded into W by the caller for the same reason.

Two kernels share that inner part. `index_scores` takes plain keys; `paged_index_scores` the cache
as served, 132 bytes a key, planar in each page, and each row's causal bound. What lies at or beyond
the bound is not read and scores -inf.

E4M3 becomes float16, which holds each of its numbers exactly, and their products are exact in
float32: the result is that of FP8 tensor cores, and the code runs on every GPU. In its interpreter
Triton multiplies bfloat16 wrongly and loses the NaN of E4M3, so there the same numbers are
multiplied in float32 (DOT).
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.triton_kernels.outputs import out_or_new, require_runnable
from mla_kernels.triton_kernels.rounding import from_e4m3
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.cache.index_keys import INDEX_HEAD_DIM, page_size_of
from mla_ref.checks import (
    describe,
    require_float,
    require_integer,
    require_same_device,
    require_size,
    require_tensor,
)
from mla_ref.indexer.scores import require_scoring
from mla_ref.platform import interpreter_active
from mla_ref.platform.stream import current_device

KEYS = 64  # keys a program
MAX_HEADS = 64  # heads a product


@triton.jit
def _weighted_heads(
    k, q, weights, heads, q_head_stride, q_number_stride, weight_stride, d,
    BH: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Sum over heads of weight * ReLU(k . q) for a tile of keys [BK, BD]; q is one row's heads."""
    number = tl.arange(0, BD)
    total = tl.zeros([BK], tl.float32)
    for first in range(0, heads, BH):
        head = first + tl.arange(0, BH)
        inside = (number[:, None] < d) & (head[None, :] < heads)
        at = number[:, None] * q_number_stride + head[None, :] * q_head_stride
        q_tile = _operand(tl.load(q + at, mask=inside, other=0), FP8, DOT)
        w = tl.load(weights + head * weight_stride, mask=head < heads, other=0).to(tl.float32)
        s = tl.dot(k, q_tile, input_precision="ieee")
        # Not maximum(s, 0): that drops NaN, and a key that is NaN must not score 0.
        s = tl.where((s < 0) | (head[None, :] >= heads), 0.0, s)
        total += tl.sum(s * w[None, :], axis=1)
    return total


@triton.jit
def _operand(x, FP8: tl.constexpr, DOT: tl.constexpr):
    """Loaded bytes or numbers in the dtype that is multiplied."""
    if FP8:
        if DOT.is_fp32():
            operand = from_e4m3(x)
        else:
            operand = x.to(tl.float8e4nv, bitcast=True).to(DOT)
    else:
        operand = x.to(DOT)
    return operand


@triton.jit
def index_scores_kernel(
    q, k, weights, scores, heads, s_kv, d,
    q_row_stride, q_head_stride, q_number_stride, key_stride, key_number_stride,
    weight_row_stride, weight_stride,
    BH: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a row and tile of plain keys; `scores` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1).to(tl.int64) * BK + tl.arange(0, BK)
    number = tl.arange(0, BD)
    at = key[:, None] * key_stride + number[None, :] * key_number_stride
    inside = (key[:, None] < s_kv) & (number[None, :] < d)
    k_tile = _operand(tl.load(k + at, mask=inside, other=0), False, DOT)
    total = _weighted_heads(
        k_tile, q + row * q_row_stride, weights + row * weight_row_stride, heads,
        q_head_stride, q_number_stride, weight_stride, d, BH, BD, BK, False, DOT,
    )  # fmt: skip
    tl.store(scores + row * s_kv + key, total, mask=key < s_kv)


@triton.jit
def paged_index_scores_kernel(
    q, weights, index_cache, block_table, request_of_row, visible_lens, scores,
    heads, s_kv, pages, page_size, requests, table_width,
    q_row_stride, q_head_stride, q_number_stride, weight_row_stride, weight_stride,
    page_stride, byte_stride, table_stride, column_stride, request_stride, len_stride,
    BH: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a row and tile of positions; `scores` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1).to(tl.int64) * BK + tl.arange(0, BK)
    scores += row * s_kv + position
    visible = tl.load(visible_lens + row * len_stride).to(tl.int64)
    request = tl.load(request_of_row + row * request_stride).to(tl.int64)
    column = position // page_size
    known = (request >= 0) & (request < requests) & (position < visible) & (column < table_width)
    page = tl.load(
        block_table + request * table_stride + column * column_stride, mask=known, other=-1
    ).to(tl.int64)
    readable = (page >= 0) & (page < pages) & (position < s_kv)
    if tl.max(readable.to(tl.int32), axis=0) == 0:
        tl.store(scores, tl.full([BK], float("-inf"), tl.float32), mask=position < s_kv)
        return

    base = index_cache + page * page_stride
    offset = position % page_size
    number = tl.arange(0, 128)[None, :]
    key_bytes = tl.load(
        base[:, None] + (offset[:, None] * 128 + number) * byte_stride,
        mask=readable[:, None], other=0,
    )  # fmt: skip
    total = _weighted_heads(
        _operand(key_bytes, True, DOT), q + row * q_row_stride, weights + row * weight_row_stride,
        heads, q_head_stride, q_number_stride, weight_stride, 128, BH, 128, BK, True, DOT,
    )  # fmt: skip

    # The scales lie behind all keys of the page; by bytes, since a page may begin anywhere.
    part = tl.arange(0, 4)[None, :]
    scale_bytes = tl.load(
        base[:, None] + (page_size * 128 + offset[:, None] * 4 + part) * byte_stride,
        mask=readable[:, None], other=0,
    )  # fmt: skip
    scale_bits = tl.sum(scale_bytes.to(tl.uint32) << (8 * part), axis=1)
    total *= scale_bits.to(tl.uint32).to(tl.float32, bitcast=True)
    tl.store(scores, tl.where(readable, total, float("-inf")), mask=position < s_kv)


def index_scores(
    q: Float[Tensor, "rows index_heads d_i"],
    k: Float[Tensor, "s_kv d_i"],
    weights: Float[Tensor, "rows index_heads"],
    *,
    out: Float[Tensor, "rows s_kv"] | None = None,
) -> Float[Tensor, "rows s_kv"]:
    """`mla_ref.indexer.index_scores` as a kernel: every key for every row, in float32.

    Args:
        q: Index queries; bfloat16 or float16 as the keys, else both are multiplied in float32.
        k: Index keys.
        weights: One factor a head.
        out: Where to write; a new tensor if None.

    Raises:
        TypeError: An input is float64, which the twin serves and this kernel does not.
    """
    require_scoring(q, k, weights)
    for name, tensor in (("q", q), ("k", k), ("weights", weights)):
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {describe(tensor)}")
    require_runnable("q", q)
    rows, heads, d = q.shape
    scores = out_or_new("out", out, (rows, k.shape[0]), torch.float32, q)
    if scores.numel():
        with current_device(q.device):
            index_scores_kernel[(rows, triton.cdiv(k.shape[0], KEYS))](
                q, k, weights, scores, heads, k.shape[0], d,
                *q.stride(), *k.stride(), *weights.stride(),
                BH=_head_block(heads), BD=max(16, triton.next_power_of_2(d)), BK=KEYS,
                DOT=_dot_dtype(q.dtype if q.dtype == k.dtype else torch.float32),
            )  # fmt: skip
    return scores


def paged_index_scores(
    q: UInt8[Tensor, "rows index_heads 128"],
    weights: Float[Tensor, "rows index_heads"],
    index_cache: UInt8[Tensor, "pages page_bytes"],
    block_table: Int[Tensor, "b max_pages"],
    request_of_row: Int[Tensor, " rows"],
    visible_lens: Int[Tensor, " rows"],
    s_kv: int,
    *,
    out: Float[Tensor, "rows s_kv"] | None = None,
) -> Float[Tensor, "rows s_kv"]:
    """Scores of the keys of each row's own request, from the FP8 cache as served: no part yet.

    Args:
        q: E4M3 bytes of the index queries, from `quantise_index_keys`.
        weights: One factor a head, times the scale of the head's query.
        index_cache: From `new_index_cache`, any page stride.
        block_table: Pages of each request.
        request_of_row: Which request each row belongs to.
        visible_lens: Causal length of each row: keys at and beyond it are not read.
        s_kv: Width of the result, at least the longest length.
        out: Where to write; a new tensor if None.

    Returns:
        float32. -inf, which no top-k selects, at and beyond a row's length, where the block table
        names no page of the cache, and in a row whose request is outside the table.
    """
    _require_paged(q, weights, index_cache, block_table, request_of_row, visible_lens)
    require_runnable("q", q)
    page_size = page_size_of(index_cache, "index_cache")
    rows, heads = q.shape[:2]
    scores = out_or_new("out", out, (rows, s_kv), torch.float32, q)
    if scores.numel():
        with current_device(q.device):
            paged_index_scores_kernel[(rows, triton.cdiv(s_kv, KEYS))](
                q, weights, index_cache, block_table, request_of_row, visible_lens, scores,
                heads, s_kv, index_cache.shape[0], page_size, *block_table.shape,
                *q.stride(), *weights.stride(), *index_cache.stride(), *block_table.stride(),
                request_of_row.stride(0), visible_lens.stride(0),
                BH=_head_block(heads), BK=KEYS, DOT=_dot_dtype(torch.float16),
            )  # fmt: skip
    return scores


def _require_paged(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    request_of_row: Tensor,
    visible_lens: Tensor,
) -> None:
    if require_tensor("q", q, "rows index_heads 128").dtype != torch.uint8:
        raise TypeError(f"q must hold E4M3 numbers as uint8 bytes, got {describe(q)}")
    require_size("q", q, 2, INDEX_HEAD_DIM, "the width of an index key")
    require_float("weights", weights, "rows index_heads")
    for dim in (0, 1):
        require_size("weights", weights, dim, q.shape[dim], "as q")
    if require_tensor("index_cache", index_cache, "pages page_bytes").dtype != torch.uint8:
        raise TypeError(f"index_cache must hold uint8 bytes, got {describe(index_cache)}")
    require_integer("block_table", block_table, "b max_pages")
    tensors = {"request_of_row": request_of_row, "visible_lens": visible_lens}
    for name, tensor in tensors.items():
        require_size(name, require_integer(name, tensor, "rows"), 0, q.shape[0], "one a row of q")
    tensors |= {"q": q, "weights": weights, "index_cache": index_cache, "block_table": block_table}
    require_same_device(tensors)


def _head_block(heads: int) -> int:
    return min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))


def _dot_dtype(dtype: torch.dtype) -> tl.dtype:
    if interpreter_active():
        return tl.float32
    named = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return named[dtype]


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: plain bfloat16 and float32 keys, and pages, with 32 and 64 heads."""
    sizes = ("q_row_stride", "q_head_stride", "weight_row_stride")
    plain = dict.fromkeys(("heads", "s_kv", "d", *sizes, "key_stride"), "i32")
    shape = ("heads", "s_kv", "pages", "page_size", "requests", "table_width")
    paged = dict.fromkeys((*shape, *sizes, "page_stride", "table_stride"), "i32")
    unit = dict.fromkeys(("q_number_stride", "weight_stride"), 1)
    found = []
    for heads in (32, 64):
        for name, dot in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
            pointers = {"q": f"*{name}", "k": f"*{name}", "weights": "*fp32", "scores": "*fp32"}
            found.append(
                Compilation(
                    name=f"index_scores/{name}-{heads}",
                    fn=index_scores_kernel,
                    signature=pointers | plain,
                    constexprs=unit
                    | {"key_number_stride": 1, "BH": heads, "BD": 128, "BK": KEYS, "DOT": dot},
                    aligned=(*pointers, "heads", "d", *sizes, "key_stride"),
                )
            )
        names = ("block_table", "request_of_row", "visible_lens")
        pointers = {"q": "*u8", "weights": "*fp32", "index_cache": "*u8"}
        pointers |= dict.fromkeys(names, "*i32") | {"scores": "*fp32"}
        strides = ("byte_stride", "column_stride", "request_stride", "len_stride")
        found.append(
            Compilation(
                name=f"index_scores/paged-{heads}",
                fn=paged_index_scores_kernel,
                signature=pointers | paged,
                constexprs=unit
                | dict.fromkeys(strides, 1)
                | {"BH": heads, "BK": KEYS, "DOT": tl.float16},
                aligned=(*pointers, "heads", "page_size", *sizes, "page_stride"),
            )
        )
    return tuple(found)

"""Faulty kernels, one fault each, for the test that the cases find them and say what it is.

`kernel` is a decode as a GPU does it: splits of the list, blocks of 16 entries with a running
maximum, a merge of the splits. Each fault is one of its keyword arguments.
"""

import math
import os
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mla_ref.cache import unpack_fp8_rows, write_fp8_rows
from mla_ref.indexer import index_scores, positions_to_slots, select_topk
from mla_ref.numerics import AttentionResult, merge_many
from mla_ref.speculative.rejection import race, rejection_sample
from mla_ref.teaching.planted import (
    rejection_sample_counting_all,
    rejection_sample_residual_at_the_draft,
)

BLOCK = 16


def kernel(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    softmax_scale: float,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fault: str = "",
) -> tuple[Tensor, Tensor]:
    """Right without a fault."""
    if fault == "scale of 576":
        softmax_scale = 576**-0.5
    if fault == "k_pe ignored":
        q = torch.cat([q[..., :512], torch.zeros_like(q[..., 512:])], dim=-1)
    if fault == "q stride ignored" and not q.is_contiguous():
        q = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride())
    if fault == "page stride ignored" and not kv_cache.is_contiguous():
        kv_cache = kv_cache.as_strided(kv_cache.shape, torch.empty(kv_cache.shape).stride())
    kv, valid = _gather(kv_cache, indices.long(), counts, fault)
    queries = q.float()
    if fault == "scaled q rounded":
        queries, softmax_scale = (queries * softmax_scale).to(q.dtype).float(), 1.0
    if fault == "rows in bfloat16":
        kv = kv.bfloat16().float()
    if fault == "q in place":
        q.mul_(softmax_scale)
    parts = []
    splits = 2
    for entries in torch.arange(kv.shape[1]).tensor_split(splits):
        part = _split(queries, kv[:, entries], valid[:, entries], softmax_scale, fault)
        if sink is not None and fault == "sink per split":
            part = AttentionResult(part.out * _share(part.lse, sink), part.lse)
        parts.append(part)
    if fault == "row 0 in one split" and len(q):
        whole = _split(queries[:1], kv[:1], valid[:1], softmax_scale, fault)
        for p, part in enumerate(parts):
            part.out[0], part.lse[0] = (whole.out[0], whole.lse[0]) if p == 0 else (0, -math.inf)
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    if fault in ("0 / 0", "first block", "overflow"):
        weights = torch.exp(lses - torch.logsumexp(lses, 0))
        merged = AttentionResult((outs * weights[..., None]).sum(0), torch.logsumexp(lses, 0))
    else:
        merged = merge_many(outs, lses, validate=False)
    result, natural = merged
    if sink is not None and fault not in ("sink per split", "sink ignored"):
        result = result * _share(natural, sink)
    if fault == "LSE in base 2":
        natural = natural / math.log(2.0)
    if fault == "LSE with sink" and sink is not None:
        natural = torch.logaddexp(natural, sink.expand_as(natural))
    if fault == "LSE rounded":
        natural = natural.bfloat16().float()
    if fault == "LSE in bfloat16":
        natural = natural.bfloat16()
    if fault == "empty LSE +inf":
        natural = natural.masked_fill(natural == -math.inf, math.inf)
    if fault == "heads dropped":
        result[:, 8 * (result.shape[1] // 8) :] = 0
    result = result.to(q.dtype if out_dtype is None or fault == "out_dtype ignored" else out_dtype)
    if fault == "other bits" and result.numel():
        result = result.clone()
        result.view(-1)[int(time.perf_counter_ns()) % result.numel()] += 1e-3
        natural = natural + 1e-6 * torch.rand_like(natural)
    if fault != "buffers ignored":
        result = result if out is None else out.copy_(result)
        natural = natural if lse is None else lse.copy_(natural)
    return result, natural


def _gather(
    cache: Tensor, slots: Tensor, counts: Tensor | None, fault: str
) -> tuple[Tensor, Tensor]:
    """Rows and which of them count."""
    page_size = cache.shape[1]
    capacity = cache.shape[0] * page_size
    valid = (slots >= 0) & (slots < capacity)
    if fault == "-1 is the last row":
        valid, slots = valid | (slots == -1), torch.where(slots == -1, capacity - 1, slots)
    if fault == "-1 is slot 0":
        valid, slots = valid | (slots == -1), torch.where(slots == -1, 0, slots)
    if fault == "clamped":
        valid, slots = slots >= 0, slots.clamp(max=capacity - 1)
    if fault == "32 bits":
        row = cache.shape[2] * cache.element_size()
        slots = ((slots * row + 2**31) % 2**32 - 2**31) // row % capacity
    if fault == "wrapped":
        valid, slots = slots >= 0, slots % capacity
    if fault == "slot 0 is none":
        valid = valid & (slots != 0)
    if fault == "ends at -1":
        valid = valid & (slots == -1).cumsum(dim=1).eq(0)
    if fault == "once":
        earlier = (slots[:, :, None] == slots[:, None]).tril(-1).any(dim=2)
        valid = valid & ~earlier
    if counts is not None and fault != "counts ignored":
        counts = counts + {"counts + 1": 1, "counts - 1": -1}.get(fault, 0)
        valid = valid & (torch.arange(slots.shape[1]) < counts[:, None])
    if fault == "last block open" and slots.shape[1] % BLOCK:
        rest = BLOCK - slots.shape[1] % BLOCK
        slots = torch.nn.functional.pad(slots, (0, rest))
        valid = torch.nn.functional.pad(valid, (0, rest), value=True)
    slots = torch.where(valid, slots, 0)
    if fault == "page size a power of two":
        shift = int(math.log2(page_size))
        page, offset = (slots >> shift) % cache.shape[0], slots & (2**shift - 1)
    else:
        page, offset = slots // page_size, slots % page_size
    rows = cache[page, offset]
    if rows.dtype == torch.uint8:
        reader = "truncated" if fault == "scales as E8M0" else "stored"
        rows = unpack_fp8_rows(rows, scale_reader=reader)
    if fault != "0 * NaN":
        rows = torch.where(valid[..., None], rows, 0.0)
    return rows.float(), valid


def _split(q: Tensor, kv: Tensor, valid: Tensor, softmax_scale: float, fault: str) -> Any:
    """Blocks with a running maximum."""
    top = q.new_full(q.shape[:2], -math.inf)
    total = q.new_zeros(q.shape[:2])
    acc = q.new_zeros(*q.shape[:2], 512)
    masked = -1e30 if fault == "finite mask" else -math.inf
    for first in range(0, kv.shape[1], BLOCK):
        rows, seen = kv[:, first : first + BLOCK], valid[:, first : first + BLOCK]
        scores = (q @ rows.mT * softmax_scale).masked_fill(~seen[:, None], masked)
        new = torch.maximum(top, scores.amax(dim=-1))
        if fault == "overflow":
            new = torch.zeros_like(new)
        anchor = new.masked_fill(new == -math.inf, 0)
        if fault in ("first block", "overflow"):
            anchor = new
        keep = torch.exp(top - anchor)
        keep = torch.where(first == torch.tensor(0), 0.0, keep) if fault == "overflow" else keep
        weights = torch.exp(scores - anchor[..., None])
        total = total * keep + weights.sum(dim=-1)
        acc = acc * keep[..., None] + weights @ rows[..., :512]
        top = new
    if fault in ("0 / 0", "first block", "overflow"):
        return AttentionResult(acc / total[..., None], torch.log(total) + top)
    safe = torch.where(total == 0, 1.0, total)
    anchor = top.masked_fill(top == -math.inf, 0)
    return AttentionResult(acc / safe[..., None], torch.log(total) + anchor)


def _share(lse: Tensor, sink: Tensor) -> Tensor:
    difference = torch.where(sink == -math.inf, math.inf, lse - sink)
    return torch.sigmoid(difference)[..., None]


def aborting(*args: Any, **kwargs: Any) -> Any:
    """Ends the process in a call for 9 heads, as a wrong address does."""
    if args[0].shape[1] == 9:
        os.abort()
    return kernel(*args, **kwargs)


def hanging(*args: Any, **kwargs: Any) -> Any:
    """Never returns from a call for 9 heads."""
    if args[0].shape[1] == 9:
        time.sleep(600)
    return kernel(*args, **kwargs)


def cuda_lost(*args: Any, **kwargs: Any) -> Any:
    """Fails as torch does after an illegal address on a GPU."""
    raise RuntimeError(f"CUDA error: an illegal memory access was encountered ({os.getpid()})")


def only_out(*args: Any, **kwargs: Any) -> Any:
    """Forgets the LSE."""
    return kernel(*args, **kwargs)[0]


def bare(q: Tensor, kv_cache: Tensor, indices: Tensor, *, softmax_scale: float) -> Any:
    """Takes nothing that is optional."""
    print("a kernel may print", flush=True)
    return kernel(q, kv_cache, indices, softmax_scale=softmax_scale)


def merge(outs: Tensor, lses: Tensor, fault: str = "") -> Any:
    """Right without a fault."""
    if fault == "swapped":
        return AttentionResult(merge_many(outs, lses.flip(0)).out, merge_many(outs, lses).lse)
    if fault == "base 2":
        scaled = merge_many(outs, lses * math.log(2.0))
        return AttentionResult(scaled.out, merge_many(outs, lses).lse)
    if fault == "0 * NaN":
        shares = torch.softmax(lses, dim=0).nan_to_num(0)
        return AttentionResult((outs * shares[..., None]).sum(0), torch.logsumexp(lses, 0))
    if fault == "no maximum":
        weights = torch.exp(lses)
        clean = torch.where(weights[..., None] > 0, outs, 0)
        total = weights.sum(0)
        return AttentionResult((clean * weights[..., None]).sum(0) / total[..., None], total.log())
    if fault == "rounds":
        return merge_many(outs.bfloat16().float(), lses)
    if fault == "scaled":
        return merge_many(outs * (1 + 2**-22), lses)
    return merge_many(outs, lses)


def topk(scores: Tensor, visible_lens: Tensor, k: int, fault: str = "") -> Tensor:
    """Right without a fault."""
    if fault == "higher position":
        n = scores.shape[1]
        hidden = torch.arange(n) >= visible_lens[:, None]
        flipped = scores.masked_fill(hidden, -math.inf).flip(1)
        found = select_topk(flipped, torch.full_like(visible_lens, n), k)
        return torch.where(found < 0, -1, n - 1 - found)
    if fault == "NaN wins":
        return select_topk(scores.nan_to_num(math.inf, math.inf, -math.inf), visible_lens, k)
    if fault == "signed zero":
        below = (scores == 0) & scores.signbit()
        return select_topk(scores.masked_fill(below, -1e-30), visible_lens, k)
    if fault == "length + 1":
        return select_topk(scores, (visible_lens + 1).clamp(max=scores.shape[1]), k)
    if fault == "lowest":
        return select_topk(-scores, visible_lens, k)
    if fault == "shuffled":
        return select_topk(scores, visible_lens, k).flip(1)
    return select_topk(scores, visible_lens, k)


def convert(
    positions: Tensor, request_of_row: Tensor, block_table: Tensor, page_size: int, fault: str = ""
) -> Tensor:
    """Right without a fault."""
    if fault == "stride":
        dense = torch.empty(block_table.shape, device="meta").stride()
        block_table = block_table.as_strided(block_table.shape, dense)
    if fault == "beyond":
        positions = positions.clamp(max=block_table.shape[1] * page_size - 1)
    if fault == "request":
        request_of_row = request_of_row.clamp(0, block_table.shape[0] - 1)
    slots = positions_to_slots(positions, request_of_row, block_table, page_size)
    return slots.clamp(min=0) if fault == "slot 0" else slots


def cache_write(
    cache: Tensor, kv_rows: Tensor, slots: Tensor, *, scale_rule: str = "fp32", fault: str = ""
) -> None:
    """Right without a fault."""
    if fault == "last row":
        free = cache.shape[0] * cache.shape[1] - 1
        slots = torch.where(slots < 0, free, slots)
        write_fp8_rows(cache, kv_rows, slots, scale_rule=scale_rule, validate=False)
        return
    if fault == "page stride":
        dense = torch.empty(cache.shape, device="meta").stride()
        cache = cache.as_strided(cache.shape, dense)
    write_fp8_rows(cache, kv_rows, slots, scale_rule=scale_rule)
    pages, offsets = slots[slots >= 0] // cache.shape[1], slots[slots >= 0] % cache.shape[1]
    written, rows = cache[pages, offsets], kv_rows[slots >= 0].float()
    scales = written[:, 512:528].clone().view(torch.float32)
    latent = rows[:, :512].unflatten(1, (4, 128))
    if fault == "multiplies":
        quantised = (latent * scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        written[:, :512] = quantised.view(torch.uint8).flatten(1)
    if fault == "inverse":
        written[:, 512:528] = (1 / scales).view(torch.uint8)
    if fault == "one scale":
        shared = scales.amax(dim=1, keepdim=True)
        quantised = (latent / shared[..., None]).to(torch.float8_e4m3fn)
        written[:, :512] = quantised.view(torch.uint8).flatten(1)
        written[:, 512:528] = shared.expand(-1, 4).contiguous().view(torch.uint8)
    if fault == "k_pe scaled":
        k_pe = (rows[:, 512:] / scales[:, :1]).bfloat16()
        written[:, 528:] = k_pe.view(torch.uint8)
    cache[pages, offsets] = written


def scores(q: Tensor, k: Tensor, weights: Tensor, fault: str = "") -> Tensor:
    """Right without a fault."""
    products = q.float() @ k.float().T
    if fault == "no ReLU":
        return (products * weights[..., None]).sum(1)
    if fault == "ReLU late":
        return torch.relu((products * weights[..., None]).sum(1))
    if fault == "weights in bfloat16":
        weights = weights.bfloat16().float()
    return index_scores(q, k, weights)


def sampler(*arguments: Any, fault: str = "") -> Any:
    """Right without a fault."""
    p, starts, drafts, q, uniform, exponential, most = arguments
    if fault == "counts all":
        return rejection_sample_counting_all(*arguments)
    if fault == "at the draft":
        return rejection_sample_residual_at_the_draft(*arguments)
    if fault == "ids clamped":
        drafts = drafts.clamp(0, p.shape[1] - 1)
    tokens, kept = rejection_sample(p, starts, drafts, q, uniform, exponential, most)
    if fault == "from p":
        rows = race(p, exponential)
        for r, (start, end) in enumerate(pairwise(starts.tolist())):
            if end > start:
                tokens[r, kept[r]] = rows[start + kept[r]]
    return tokens, kept - 1 if fault == "one short" else kept


RIGHT = {
    "decode": kernel,
    "extend": kernel,
    "merge": merge,
    "topk": topk,
    "convert": convert,
    "cache_write": cache_write,
    "index_scores": scores,
    "sampler": sampler,
}

# Fault, the case that is meant for it, words that the report must hold.
FAULTS = (
    ("LSE in base 2", "decode/plain", r"base 2"),
    ("LSE in base 2", "decode/row-empty", r"base 2"),
    ("LSE with sink", "decode/sink", r"the sink is in the LSE"),
    ("LSE rounded", "decode/plain", r"rounded to bfloat16"),
    ("LSE in bfloat16", "decode/plain", r"lse: is a bfloat16 tensor .* must be a float32"),
    ("counts + 1", "decode/counts-ragged", r"one too high"),
    ("counts + 1", "extend/counts-and-none", r"one too high"),
    ("counts - 1", "decode/counts-ragged-fp8", r"one too low"),
    ("counts ignored", "decode/counts-ragged", r"counts are ignored"),
    ("counts ignored", "decode/counts-nan-behind", r"counts are ignored"),
    ("-1 is the last row", "decode/none-strewn", r"-1 is read as the last row"),
    ("-1 is the last row", "decode/none-nan-in-last-slot-fp8", r"-1 is read as the last row"),
    ("-1 is the last row", "decode/row-empty-sink", r"-1 is read as the last row"),
    ("-1 is slot 0", "decode/none-strewn-fp8", r"-1 is read as slot 0"),
    ("-1 is slot 0", "decode/none-nan-in-slot-0", r"-1 is read as slot 0"),
    ("ends at -1", "decode/none-strewn", r"a list ends at its first -1"),
    ("slot 0 is none", "decode/slots-at-both-ends", r"slot 0 is taken for none"),
    ("clamped", "decode/slots-too-large", r"clamped to its last row"),
    ("wrapped", "decode/slots-too-large", r"slots outside the cache wrap around"),
    ("once", "decode/slots-repeated", r"listed twice counts once"),
    ("0 * NaN", "decode/poison-nan", r"one of 0 is multiplied with NaN"),
    ("0 * NaN", "decode/poison-inf-fp8", r"one of 0 is multiplied with NaN"),
    ("scale of 576", "decode/softmax-scale", r"softmax_scale is 576\^-0\.5"),
    ("scale of 576", "decode/plain", r"softmax_scale is 576\^-0\.5"),
    ("scaled q rounded", "decode/plain", r"after it was multiplied with softmax_scale"),
    ("rows in bfloat16", "decode/plain-fp8", r'declare maths="bfloat16"'),
    ("k_pe ignored", "decode/plain", r"\(k_pe\) is not in the scores"),
    ("0 / 0", "decode/row-empty", r"is NaN: 0 / 0"),
    ("empty LSE +inf", "decode/row-empty", r'has LSE \+inf, not -inf; declare empty_lse="\+inf"'),
    ("finite mask", "decode/rows-all-empty", r"finite LSE: its mask is a large negative number"),
    ("first block", "decode/none-first-16", r"NaN on one side only(.|\n)*is the first block all"),
    ("overflow", "decode/scores-large", r"on one side only(.|\n)*exp overflows"),
    ("sink per split", "decode/sink", r"the sink is applied in each of 2 splits"),
    ("sink ignored", "decode/sink-fp8", r"the sink is ignored"),
    ("page stride ignored", "decode/gaps-between-pages", r"page stride of kv_cache is ignored"),
    ("page stride ignored", "decode/gaps-between-pages-fp8", r"page stride of kv_cache is ignored"),
    ("q stride ignored", "decode/gaps-between-queries", r"strides of q are ignored"),
    ("scales as E8M0", "decode/scales-fp32-fp8", r"scales are read as E8M0"),
    ("scales as E8M0", "decode/plain-fp8", r"scales are read as E8M0"),
    ("last block open", "decode/topk-65", r"is the last block masked"),
    ("heads dropped", "decode/heads-9", r"are heads padded to a block"),
    ("page size a power of two", "decode/page-size-53", r"no power of two assumed"),
    ("32 bits", "decode/far", r"is an offset computed in 32 bits"),
    ("32 bits", "extend/far-fp8", r"is an offset computed in 32 bits"),
    ("buffers ignored", "decode/out-and-lse-given", r"still holds the NaN that it came with"),
    ("out_dtype ignored", "decode/out-float32", r"out: is a bfloat16 .* must be a float32"),
    ("q in place", "decode/plain", r"q\[.*the call has changed its argument"),
    ("other bits", "decode/bits-twice", r"other bits the second time"),
    ("row 0 in one split", "decode/bits-permuted", r"other bits when the rows stand in another"),
    ("swapped", "merge/two", r"weights of the parts are swapped"),
    ("base 2", "merge/two", r"natural LSEs are read as base 2"),
    ("0 * NaN", "merge/empty-parts", r"0 \* NaN of a part that is empty"),
    ("no maximum", "merge/large", r"take the maximum off first"),
    ("no maximum", "merge/all-empty", r"-inf minus -inf where all are"),
    ("rounds", "merge/sixteen", r"beyond the limit"),
    ("scaled", "merge/identity", r"merging with nothing has changed the bits"),
    ("higher position", "topk/ties", r"ties go to the higher position"),
    ("higher position", "topk/lengths-ties", r"ties go to the higher position"),
    ("NaN wins", "topk/nan", r"NaN ranks as the greatest number"),
    ("signed zero", "topk/signed-zeros", r"-0\.0 ranks below 0\.0"),
    ("length + 1", "topk/lengths", r"behind a row's length"),
    ("lowest", "topk/plain", r"the lowest scores are selected"),
    ("shuffled", "topk/plain", r"the highest first"),
    ("slot 0", "convert/none", r"slot 0, which is real data"),
    ("stride", "convert/strided", r"is its stride read"),
    ("beyond", "convert/beyond", r"beyond the block table are -1"),
    ("request", "convert/request-none", r"belongs to no request"),
    ("multiplies", "cache_write/plain", r"multiplied with the scale, not divided"),
    ("inverse", "cache_write/plain", r"the stored scale is 1 / scale"),
    ("one scale", "cache_write/plain", r"one scale stands for the whole row"),
    ("k_pe scaled", "cache_write/plain", r"k_pe\["),
    ("last row", "cache_write/padding", r"outside the named slots has been written"),
    ("page stride", "cache_write/gaps", r"is the page stride read"),
    ("no ReLU", "index_scores/negative-weights", r"the ReLU is missing"),
    ("ReLU late", "index_scores/negative-weights", r"ReLU stands after the sum"),
    ("weights in bfloat16", "index_scores/heads-64", r"beyond the limit"),
    ("from p", "sampler/hard", r"drawn from p, not from what q covers too little"),
    ("at the draft", "sampler/hard", r"taken at the draft alone"),
    ("counts all", "sampler/sampled", r"num_accepted\["),
    ("one short", "sampler/chosen", r"num_accepted\["),
    ("ids clamped", "sampler/ids", r"outside the vocabulary is none"),
)


def faulty(kind: str, fault: str) -> Any:
    """The function of a kind with one fault."""
    return partial(RIGHT[kind], fault=fault)


def last_row(*args: Any, **kwargs: Any) -> Any:
    """A fault by the name of an object in a module, as the command line takes it."""
    return kernel(*args, **kwargs, fault="-1 is the last row")

"""The rejection sampler: which drafts of a batch stand, and the token after the last of them.

A draft x is kept if p(x) / q(x) >= u. If not, the token is drawn from what q covers too little,
max(p - q, 0), over the whole vocabulary; a row without a draft draws from p itself. A draw is a
race: token v arrives at time E_v / w_v, and the first one wins, so it is an argmax of w / E.

All that is large is in the race: p, q and E of 129,280 tokens are 1.5 MB a row. So the first kernel
cuts each row into splits and keeps the winner of each, of the race with max(p - q, 0) and of that
with p, since only the whole row tells which one counts: q may be no law, or p - q empty. The second
kernel, one program a request, merges the splits, judges the drafts in float64 and walks.

Which draft a row has, and whether it is judged, the first kernel need not know: the walk takes the
winner of the race that is due. Nothing depends on the batch around a request.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.triton_kernels.outputs import divide, out_or_new, require_runnable
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.checks import describe
from mla_ref.platform.stream import current_device
from mla_ref.speculative.rejection import require_judged
from mla_ref.speculative.walk import Verified

BLOCK = 1024  # tokens at a time
MAX_SPLITS = 16


@triton.jit
def _faster(best, winner, weight, exponential, token, inside):
    """Each lane's best so far and its token; a lane sees tokens from left to right."""
    # Weight 0 never wins, not even where all quotients underflow to 0. div_rn as torch divides.
    time = tl.where(weight > 0, tl.div_rn(weight, exponential), -1.0)
    # Strictly greater: of equal quotients the lower token stays. Lanes beyond the vocabulary never
    # win, or a row of NaN would give a token that does not exist (vllm#21876).
    wins = inside & (time > best)
    return tl.where(wins, time, best), tl.where(wins, token, winner)


@triton.jit
def race_kernel(
    target_probs, query_start_loc, draft_ids, draft_probs, exponential,
    times, winners, lawful_parts, requests, vocab, split_len,
    p_row_stride, p_stride, q_row_stride, q_stride, e_row_stride, e_stride,
    start_stride, draft_stride,
    HAS_Q: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and split; times and winners [rows, SPLITS, 2]: of the residual, of p."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if row >= tl.load(query_start_loc + requests * start_stride):
        return  # padding behind the last request
    draft = tl.load(draft_ids + row * draft_stride).to(tl.int64)
    first = split * split_len
    end = tl.minimum(first + split_len, vocab)
    best = tl.full([BLOCK], -2.0, tl.float32)
    winner = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    plain_best, plain_winner = best, winner
    lawless = tl.zeros([BLOCK], tl.int32)
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        wide = token.to(tl.int64)
        p = tl.load(target_probs + row * p_row_stride + wide * p_stride, mask=inside, other=0)
        p = tl.where((p > 0) & (p < float("inf")), p, 0.0)
        e = tl.load(exponential + row * e_row_stride + wide * e_stride, mask=inside, other=1)
        if HAS_Q:
            q = tl.load(draft_probs + row * q_row_stride + wide * q_stride, mask=inside, other=0)
            lawless |= 1 - ((q >= 0) & (q < float("inf"))).to(tl.int32)
            weight = p - q
        else:
            weight = tl.where(wide == draft, 0.0, p)
        best, winner = _faster(best, winner, weight, e, token, inside)
        plain_best, plain_winner = _faster(plain_best, plain_winner, p, e, token, inside)
    at = (row * SPLITS + split) * 2
    top, plain_top = tl.max(best, axis=0), tl.max(plain_best, axis=0)
    tl.store(times + at, top)
    tl.store(times + at + 1, plain_top)
    tl.store(winners + at, tl.min(tl.where(best == top, winner, 0x7FFFFFFF), axis=0))
    plain_first = tl.where(plain_best == plain_top, plain_winner, 0x7FFFFFFF)
    tl.store(winners + at + 1, tl.min(plain_first, axis=0))
    tl.store(lawful_parts + row * SPLITS + split, 1 - tl.max(lawless, axis=0))


@triton.jit
def _merged(times, winners, at, inside):
    """The best time of a row's splits, and the lowest token that has it."""
    time = tl.load(times + at, mask=inside, other=-2.0)
    winner = tl.load(winners + at, mask=inside, other=0x7FFFFFFF)
    top = tl.max(time, axis=1)
    return top, tl.min(tl.where(time == top[:, None], winner, 0x7FFFFFFF), axis=1)


@triton.jit
def walk_kernel(
    target_probs, query_start_loc, draft_ids, draft_probs, uniform,
    times, winners, lawful_parts, token_ids, num_accepted, rows, vocab, max_drafts,
    p_row_stride, p_stride, q_row_stride, q_stride, start_stride, draft_stride, uniform_stride,
    HAS_Q: tl.constexpr, SPLITS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One program a request: column j is its row j. token_ids is contiguous."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_loc + request * start_stride).to(tl.int64)
    end = tl.load(query_start_loc + (request + 1) * start_stride).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    row = start + j
    exists = (j <= max_drafts) & (row >= 0) & (row < tl.minimum(end, rows))
    draft = tl.load(draft_ids + row * draft_stride, mask=exists, other=-1).to(tl.int64)
    drafted = exists & (row < end - 1) & (j < max_drafts) & (draft >= 0) & (draft < vocab)

    split = tl.arange(0, SPLITS)[None, :]
    part = row[:, None] * SPLITS + split
    top, recovered = _merged(times, winners, part * 2, exists[:, None])
    _, plain = _merged(times, winners, part * 2 + 1, exists[:, None])
    lawful = tl.min(tl.load(lawful_parts + part, mask=exists[:, None], other=0), axis=1) != 0
    # A row without a draft, with a q that is no law, or with nothing left of p - q draws from p.
    recovered = tl.where(drafted & lawful & (top > -1.0), recovered, plain)

    p_x = tl.load(target_probs + row * p_row_stride + draft * p_stride, mask=drafted, other=0)
    p_x = tl.where((p_x > 0) & (p_x < float("inf")), p_x, 0.0).to(tl.float64)
    # uniform is float64 and never 0: a 0 would let a draft of probability 0 pass.
    u = tl.load(uniform + row * uniform_stride, mask=exists, other=1)
    if HAS_Q:
        q_x = tl.load(draft_probs + row * q_row_stride + draft * q_stride, mask=drafted, other=0)
        possible = drafted & lawful & (q_x > 0)
        accepted = possible & (p_x / tl.where(possible, q_x, 1.0).to(tl.float64) >= u)
    else:
        accepted = drafted & (p_x >= u)

    # The leading accepted rows, not all of them: after a rejection nothing counts (vllm#2658).
    kept = tl.min(tl.where(accepted, BLOCK_J, j), axis=0)
    token = tl.where(accepted, draft, recovered.to(tl.int64))
    token = tl.where(exists & (j <= kept), token, -1)
    tl.store(token_ids + request * (max_drafts + 1) + j, token, mask=j <= max_drafts)
    tl.store(num_accepted + request, kept.to(tl.int64))


def rejection_sample(
    target_probs: Float[Tensor, "rows vocab"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    draft_ids: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"] | None,
    uniform: Float[Tensor, " rows"],
    exponential: Float[Tensor, "rows vocab"],
    max_drafts: int,
    *,
    token_ids: Int[Tensor, "b columns"] | None = None,
    num_accepted: Int[Tensor, " b"] | None = None,
    workspace: UInt8[Tensor, " nbytes"] | None = None,
) -> Verified:
    """`mla_ref.speculative.rejection.rejection_sample` as kernels, the same tokens.

    Args:
        target_probs: p of each row, float32.
        query_start_loc: First row of each request, and the end of the last one.
        draft_ids: The draft that each row judges, -1 for none.
        draft_probs: q of each row, float32, or None for drafts that were chosen, not sampled.
        uniform: In (0, 1], float64.
        exponential: Exp(1) draws above 0, float32.
        max_drafts: Most drafts a request.
        token_ids: Where to write, int64 [b, max_drafts + 1]; a new tensor if None.
        num_accepted: Where to write, int64 [b]; a new tensor if None.
        workspace: From `sampler_workspace`; a new one if None.

    Raises:
        TypeError: Probabilities are not float32, the dtype in which the race runs.
        ValueError: As the twin, or the workspace does not fit.
    """
    require_judged(
        target_probs, query_start_loc, draft_ids, draft_probs, uniform, exponential, max_drafts
    )
    numbers = {"target_probs": target_probs, "exponential": exponential}
    numbers |= {} if draft_probs is None else {"draft_probs": draft_probs}
    for name, tensor in numbers.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {describe(tensor)}")
    require_runnable("target_probs", target_probs)
    rows, vocab = target_probs.shape
    b = query_start_loc.shape[0] - 1
    shape = (b, max_drafts + 1)
    tokens = out_or_new("token_ids", token_ids, shape, torch.int64, target_probs)
    kept = out_or_new("num_accepted", num_accepted, (b,), torch.int64, target_probs)
    if not b:
        return Verified(tokens, kept)
    if workspace is None:
        workspace = sampler_workspace(rows, vocab, target_probs.device)
    splits, split_len = _splits(vocab)
    parts = divide(workspace, _parts(rows, splits), target_probs)
    p_q = (*target_probs.stride(), *((0, 0) if draft_probs is None else draft_probs.stride()))
    shared = {"HAS_Q": draft_probs is not None, "SPLITS": splits}
    with current_device(target_probs.device):
        if rows:
            race_kernel[(rows, splits)](
                target_probs, query_start_loc, draft_ids, draft_probs, exponential, *parts,
                b, vocab, split_len, *p_q, *exponential.stride(), query_start_loc.stride(0),
                draft_ids.stride(0), BLOCK=BLOCK, **shared,
            )  # fmt: skip
        walk_kernel[(b,)](
            target_probs, query_start_loc, draft_ids, draft_probs, uniform, *parts, tokens, kept,
            rows, vocab, max_drafts, *p_q, query_start_loc.stride(0), draft_ids.stride(0),
            uniform.stride(0), BLOCK_J=triton.next_power_of_2(max_drafts + 1), **shared,
        )  # fmt: skip
    return Verified(tokens, kept)


def sampler_workspace(
    rows: int, vocab: int, device: torch.device | None = None
) -> UInt8[Tensor, " nbytes"]:
    """Bytes that `rejection_sample` works in, to be allocated once: 20 a row and split."""
    nbytes = sum(size for size, _ in _parts(rows, _splits(vocab)[0]))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _splits(vocab: int) -> tuple[int, int]:
    """How many splits a row has, a power of two, and the tokens of each."""
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, 4 * BLOCK)))
    return splits, triton.cdiv(triton.cdiv(vocab, splits), BLOCK) * BLOCK


def _parts(rows: int, splits: int) -> tuple[tuple[int, torch.dtype], ...]:
    """Times in float32, winners and lawful parts in int32: bytes and dtype of each."""
    return (
        (rows * splits * 8, torch.float32),
        (rows * splits * 8, torch.int32),
        (rows * splits * 4, torch.int32),
    )


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: with and without draft probabilities, at most three drafts a request."""
    inputs = {"target_probs": "*fp32", "query_start_loc": "*i64", "draft_ids": "*i64"}
    parts = {"times": "*fp32", "winners": "*i32", "lawful_parts": "*i32"}
    unit = dict.fromkeys(("p_stride", "start_stride", "draft_stride"), 1)
    found = []
    for has_q in (False, True):
        name = "sampled" if has_q else "one-hot"
        q = {"draft_probs": "*fp32"} if has_q else {}
        strides = dict.fromkeys(("p_row_stride", *(["q_row_stride"] if has_q else [])), "i32")
        constants: dict[str, Any] = unit | {"q_stride": 1, "HAS_Q": has_q, "SPLITS": MAX_SPLITS}
        if not has_q:
            constants |= {"draft_probs": None, "q_row_stride": 0, "q_stride": 0}
        race = inputs | q | {"exponential": "*fp32"} | parts
        walk = inputs | q | {"uniform": "*fp64"} | parts
        walk |= {"token_ids": "*i64", "num_accepted": "*i64"}
        race_sizes = dict.fromkeys(("requests", "vocab", "split_len"), "i32")
        walk_sizes = dict.fromkeys(("rows", "vocab", "max_drafts"), "i32")
        found += [
            Compilation(
                name=f"sampler/race-{name}",
                fn=race_kernel,
                signature=race | race_sizes | strides | {"e_row_stride": "i32"},
                constexprs=constants | {"e_stride": 1, "BLOCK": BLOCK},
                aligned=(*race, "vocab", "split_len", *strides, "e_row_stride"),
            ),
            Compilation(
                name=f"sampler/walk-{name}",
                fn=walk_kernel,
                signature=walk | walk_sizes | strides,
                constexprs=constants | {"uniform_stride": 1, "BLOCK_J": 4},
                aligned=(*walk, "vocab", *strides),
            ),
        ]
    return tuple(found)

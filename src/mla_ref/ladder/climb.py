"""The climb: activations go up rung by rung, and each result is held against the rung below."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_ref.attention import (
    causal_attention,
    causal_lens,
    mla_absorbed_attention,
    mla_expanded_attention,
    online_attention,
    paged_attention,
    vectorised_attention,
)
from mla_ref.attention.masking import visible_mask
from mla_ref.batching import Step
from mla_ref.cache import pages_needed, write_rows
from mla_ref.ladder.activations import LatentView, LayerActivations
from mla_ref.ladder.rungs import RUNGS, Rung
from mla_ref.numerics import (
    AttentionResult,
    Comparison,
    compare,
    compute_dtype,
    oracle_attention,
)

PAGE_SIZE = 64
TILE = 64

# Relative L2 allowed between neighbours. float32 sums of 500 terms in another order differ by a few
# 1e-7; in bfloat16 rung 5 starts from rounded latents, an error of 2^-9 in each number.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class RungReport:
    """What one rung did.

    Attributes:
        rung: The row of the table.
        out: Comparison of the outputs in the layer where they differ most.
        lse: Comparison of the log-sum-exps in the layer where they differ most.
        layer: The layer of `out`.
        limit: Relative L2 that was allowed.
        seconds: Time of the attention itself over all layers, checks not counted.
        kv_bytes: Bytes cached for one token in one layer.
        shown: One line in plain words.
        ok: Whether all layers agreed.
    """

    rung: Rung
    out: Comparison
    lse: Comparison
    layer: int
    limit: float
    seconds: float
    kv_bytes: int
    shown: str
    ok: bool


@dataclass(frozen=True)
class _Run:
    """One layer on one rung: its result, what it must equal, and how long it took."""

    result: AttentionResult
    expected: AttentionResult
    seconds: float
    extra: tuple[Comparison, ...] = ()


def climb(layers: Sequence[LayerActivations]) -> Iterator[RungReport]:
    """Take every layer up rungs 1 to 6; yields a report after each rung.

    Args:
        layers: From `smollm2_activations` or `random_activations`; at least one.
    """
    if not layers:
        raise ValueError("layers must hold at least one layer's activations, got none")
    limit = LIMITS[layers[0].q.dtype]
    below: list[AttentionResult] = []
    for rung, run in zip(RUNGS, RUNNERS, strict=False):
        runs = [run(layer, *below[index : index + 1]) for index, layer in enumerate(layers)]
        yield _report(rung, layers, runs, limit)
        below = [r.result for r in runs]


def _report(
    rung: Rung, layers: Sequence[LayerActivations], runs: list[_Run], limit: float
) -> RungReport:
    outs = [compare(r.result.out, r.expected.out) for r in runs]
    lses = [compare(r.result.lse, r.expected.lse) for r in runs]
    extras = [c for r in runs for c in r.extra]

    def badness(c: Comparison) -> tuple[int, float]:
        return c.nan_mismatches + c.inf_mismatches, c.rel_l2

    worst = max(range(len(runs)), key=lambda i: badness(outs[i]))
    return RungReport(
        rung=rung,
        out=outs[worst],
        lse=max(lses, key=badness),
        layer=layers[worst].layer,
        limit=limit,
        seconds=sum(r.seconds for r in runs),
        kv_bytes=kv_bytes(rung, layers[0]),
        shown=shown(rung, layers[0]),
        ok=all(c.agrees(rel_l2=limit) for c in (*outs, *lses, *extras)),
    )


def _timed(attention: Callable[[], AttentionResult]) -> tuple[AttentionResult, float]:
    start = time.perf_counter()
    result = attention()
    return result, time.perf_counter() - start


def hand_worked() -> Comparison:
    """Rung 1 on numbers worked out by hand.

    Two query rows of 1, keys 0 and ln 3, values 0 and 4, scale 1. Row 0 sees key 0 alone: output 0,
    LSE 0. Row 1 has weights 1/4 and 3/4: output 3, LSE ln 4.
    """
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    keys = one * torch.tensor([1.0, 3.0], dtype=torch.float64).log()[:, None, None]
    values = one * torch.tensor([0.0, 4.0], dtype=torch.float64)[:, None, None]
    out, lse = causal_attention(one, keys, values, softmax_scale=1.0)
    expected = torch.tensor([[0.0, 3.0], [0.0, math.log(4.0)]], dtype=torch.float64)
    return compare(torch.stack([out.flatten(), lse.flatten()]), expected)


def _causal(layer: LayerActivations) -> _Run:
    q, k, v, scale = layer.q, layer.k, layer.v, layer.softmax_scale
    result, seconds = _timed(lambda: causal_attention(q, k, v, softmax_scale=scale))
    visible = visible_mask(causal_lens(q.shape[0], k.shape[0]), 0, k.shape[0])
    expected = oracle_attention(q, k, v, visible, softmax_scale=scale)
    return _Run(result, expected, seconds, (hand_worked(),))


def _vectorised(layer: LayerActivations, below: AttentionResult) -> _Run:
    q, k, v = layer.q[None], layer.k[None], layer.v[None]
    batched, seconds = _timed(
        lambda: vectorised_attention(q, k, v, softmax_scale=layer.softmax_scale)
    )
    return _Run(AttentionResult(batched.out[0], batched.lse[0]), below, seconds)


def _online(layer: LayerActivations, below: AttentionResult) -> _Run:
    result, seconds = _timed(
        lambda: online_attention(
            layer.q, layer.k, layer.v, softmax_scale=layer.softmax_scale, block_size=TILE
        )
    )
    return _Run(result, below, seconds)


def _paged(layer: LayerActivations, below: AttentionResult) -> _Run:
    def run(q: Tensor, step: Step, *caches: Tensor) -> AttentionResult:
        return paged_attention(q, *caches, **_batch(step), softmax_scale=layer.softmax_scale)

    return _on_pages(run, (layer.q,), (layer.k, layer.v), below)


def _expanded(layer: LayerActivations, below: AttentionResult) -> _Run:
    runs = [
        _on_pages(
            _latent(mla_expanded_attention, layer, view),
            (view.q_nope, view.q_pe),
            (view.kv_rows,),
            below,
        )
        for view in layer.latent
    ]
    # Every view must agree; the last is the one that goes on to rung 6.
    others = tuple(c for r in runs[:-1] for c in (compare(r.result.out, below.out), *r.extra))
    return replace(runs[-1], extra=(*runs[-1].extra, *others))


def _absorbed(layer: LayerActivations, below: AttentionResult) -> _Run:
    view = layer.latent[-1]
    run = _latent(mla_absorbed_attention, layer, view)
    return _on_pages(run, (view.q_nope, view.q_pe), (view.kv_rows,), below)


RUNNERS: tuple[Callable[..., _Run], ...] = (
    _causal,
    _vectorised,
    _online,
    _paged,
    _expanded,
    _absorbed,
)


def _latent(
    attention: Callable[..., AttentionResult], layer: LayerActivations, view: LatentView
) -> Callable[..., AttentionResult]:
    def run(q_nope: Tensor, q_pe: Tensor, step: Step, kv_cache: Tensor) -> AttentionResult:
        return attention(
            q_nope,
            q_pe,
            kv_cache,
            view.w_uk,
            view.w_uv,
            **_batch(step),
            softmax_scale=layer.softmax_scale,
        )

    return run


def _batch(step: Step) -> dict[str, Tensor]:
    return {
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "block_table": step.block_table,
    }


def _on_pages(
    run: Callable[..., AttentionResult],
    queries: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    below: AttentionResult,
) -> _Run:
    """Run a whole text on pages, timed, and then a ragged batch of its beginnings.

    Pages lie in shuffled order and every slot that is not written holds NaN: if a tail or a foreign
    page leaked into a result, it would show. The ragged batch is a third of the text of which only
    the last 4 tokens are new, an empty request, and the first token alone.
    """
    n = queries[0].shape[0]
    whole, caches = _filled_pages((0,), (n,), rows)
    result, seconds = _timed(lambda: run(*queries, whole, *caches))

    third = max(n // 3, 1)
    new = min(4, third)
    picked = torch.tensor([*range(third - new, third), 0])
    ragged, caches = _filled_pages((third - new, 0, 0), (new, 0, 1), rows)
    part = run(*(q[picked] for q in queries), ragged, *caches)
    extra = (compare(part.out, below.out[picked]), compare(part.lse, below.lse[picked]))
    return _Run(result, below, seconds, extra)


def _filled_pages(
    computed_lens: Sequence[int], query_lens: Sequence[int], rows: tuple[Tensor, ...]
) -> tuple[Step, list[Tensor]]:
    """A step, and caches that hold the first rows of the text for each of its requests."""
    lens = [c + q for c, q in zip(computed_lens, query_lens, strict=True)]
    pages = [pages_needed(n, PAGE_SIZE) for n in lens]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0))
    table = torch.full((len(lens), max(pages)), -1)
    for request, count in enumerate(pages):
        first = sum(pages[:request])
        table[request, :count] = order[first : first + count]
    everything = Step.build([0] * len(lens), lens, table, PAGE_SIZE)
    caches = []
    for row in rows:
        cache = row.new_full((len(order), PAGE_SIZE, *row.shape[1:]), torch.nan)
        write_rows(cache, row[everything.positions], everything.slot_mapping)
        caches.append(cache)
    return Step.build(computed_lens, query_lens, table, PAGE_SIZE), caches


def kv_bytes(rung: Rung, layer: LayerActivations) -> int:
    """Bytes cached for one token in one layer: K and V of all KV heads, or one latent row."""
    if rung.number >= 5:
        row = layer.latent[-1].kv_rows[0]
        return row.numel() * row.element_size()
    return (layer.k[0].numel() + layer.v[0].numel()) * layer.k.element_size()


def shown(rung: Rung, layer: LayerActivations) -> str:
    """One line in plain words: what agreement of this rung shows."""
    n, heads = layer.q.shape[:2]
    score_mb = compute_dtype(layer.q).itemsize / 1e6
    scores_mb = n * n * heads * score_mb
    tile_mb = n * min(TILE, n) * heads * score_mb
    view = layer.latent[-1]
    forms = " and ".join(v.name for v in layer.latent)
    return {
        1: "each row takes the keys up to its own: this is the definition",
        2: f"one masked product gives every row at once and holds {scores_mb:.1f} MB of scores",
        3: f"tiles of {TILE} keys give the same with {tile_mb:.1f} MB of scores at a time",
        4: "shuffled pages, NaN in every unused slot and ragged requests change nothing",
        5: f"K and V of {heads} heads come back from one row of {view.kv_rows.shape[1]} numbers "
        f"({forms})",
        6: "no key or value is rebuilt: every head reads the cached row itself",
    }[rung.number]

"""How a layer's activations run on rungs 7 to 10: FP8 rows, indexer, sparse extend and decode."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.attention import (
    absorb_query,
    fp8_latent_attention,
    mla_absorbed_attention,
    project_values,
    sparse_decode,
    sparse_extend,
)
from mla_ref.batching import Step
from mla_ref.cache import new_index_cache, pack_fp8_rows, quantise_index_keys, write_index_keys
from mla_ref.cache.fp8_rows import GROUPS, LATENT
from mla_ref.indexer import index_scores, positions_to_slots, select_positions
from mla_ref.ladder.activations import IndexView, LatentView, LayerActivations
from mla_ref.ladder.run import PAGE_SIZE, Run, filled_pages, on_pages, timed
from mla_ref.numerics import AttentionResult, compare, oracle_attention
from mla_ref.numerics.float8 import from_e4m3, group_scale, to_e4m3


@dataclass(frozen=True)
class Selection:
    """What rung 8 hands on.

    Attributes:
        positions: Keys that each row attends to.
        dense: Rung 7's result, for the case that a list covers all.
    """

    positions: Int[Tensor, "n topk"]
    dense: AttentionResult


@dataclass(frozen=True)
class SparseResult:
    """What rungs 9 and 10 hand on.

    Attributes:
        result: Its attention.
        positions: The keys that each row attended to.
    """

    result: AttentionResult
    positions: Int[Tensor, "n topk"]


def fp8_cache(layer: LayerActivations, below: AttentionResult) -> Run:
    """Rung 7 on bytes, against rung 6 on the numbers that quantising leaves."""
    view = layer.latent[-1]
    numbers = rounded_rows(view.kv_rows)
    whole, (cache,) = filled_pages((0,), (len(numbers),), (numbers,))
    expected = mla_absorbed_attention(
        view.q_nope,
        view.q_pe,
        cache,
        view.w_uk,
        view.w_uv,
        **whole.batch,
        softmax_scale=layer.softmax_scale,
    )

    def run(q_nope: Tensor, q_pe: Tensor, step: Step, cache: Tensor) -> AttentionResult:
        q = absorbed_query(view, q_nope, q_pe)
        latent = fp8_latent_attention(q, cache, **step.batch, softmax_scale=layer.softmax_scale)
        return projected(view, latent, q_nope.dtype)

    error = compare(expected.out, below.out).rel_l2
    note = f"656 bytes a row; against rows that are not rounded the output is off by {error:.1e}"
    rows = (pack_fp8_rows(view.kv_rows),)
    return on_pages(run, (view.q_nope, view.q_pe), rows, expected, note)


def rounded_rows(kv_rows: Float[Tensor, "n 576"]) -> Float[Tensor, "n 576"]:
    """The numbers that FP8 rows hold, by arithmetic alone: no bytes are laid out."""
    latent = kv_rows[:, :LATENT].float().unflatten(1, (GROUPS, -1))
    scale = group_scale(latent.abs().amax(dim=-1))[..., None]
    rounded = from_e4m3(to_e4m3(latent / scale)) * scale
    k_pe = kv_rows[:, LATENT:].to(torch.bfloat16).float()
    wide = torch.float64 if kv_rows.dtype == torch.float64 else torch.float32
    return torch.cat([rounded.flatten(1), k_pe], dim=1).to(wide)


def lightning_indexer(layer: LayerActivations, below: AttentionResult) -> Run:
    """Rung 8: scores from FP8 queries and keys against float64, and the lists they give."""
    index = index_of(layer)
    n = index.q.shape[0]
    step, _ = filled_pages((0,), (n,), ())
    cache = new_index_cache(int(step.block_table.max()) + 1, PAGE_SIZE).fill_(0xFF)
    write_index_keys(cache, index.k, step.slot_mapping, scale_rule=index.scale_rule)
    positions, seconds = timed(
        lambda: select_positions(
            index.q,
            index.weights,
            cache,
            **step.batch,
            topk=index.topk,
            scale_rule=index.scale_rule,
        )
    )
    q, k = (
        from_e4m3(data) * scale[..., None]
        for data, scale in (quantise_index_keys(t, index.scale_rule) for t in (index.q, index.k))
    )
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    exact = index_scores(q.double(), k.double(), index.weights.double())
    exact = exact.masked_fill(future, -torch.inf)
    scores = index_scores(q, k, index.weights).masked_fill(future, -torch.inf)
    # Scores that are equal to rounding may change places, so lists are compared by their scores.
    best = exact.topk(min(index.topk, n), dim=1).values
    chosen = _scores_at(exact, positions)[:, : best.shape[1]].sort(dim=1, descending=True).values
    share = _attention_share(layer, mask_of(positions, n))
    note = f"the best {index.topk} of up to {n} keys carry {share:.0%} of the attention weight"
    checks = {"out": compare(scores, exact), "chosen": compare(chosen, best)}
    return Run(Selection(positions, below), checks, seconds, note)


def extend(layer: LayerActivations, below: Selection) -> Run:
    """Rung 9 over FP8 rows, against dense attention with the lists as a mask, in float64."""
    view = layer.latent[-1]
    n = view.kv_rows.shape[0]
    rows = rounded_rows(view.kv_rows)[:, None]
    q = absorbed_query(view, view.q_nope, view.q_pe)
    visible = mask_of(below.positions, n)
    masked = oracle_attention(
        q, rows, rows[..., :LATENT], visible, softmax_scale=layer.softmax_scale
    )
    expected = AttentionResult(
        project_values(masked.out, view.w_uv.double()).to(view.q_nope.dtype), masked.lse
    )
    packed = (pack_fp8_rows(view.kv_rows),)
    queries = (view.q_nope, view.q_pe)
    run = on_pages(_sparse(sparse_extend, layer, below.positions), queries, packed, expected)

    everything = torch.arange(n).expand(n, n)
    everything = everything.masked_fill(everything > everything.T, -1).int()
    dense = on_pages(_sparse(sparse_extend, layer, everything), queries, packed, below.dense)
    error = compare(expected.out, below.dense.out).rel_l2
    note = f"a list of all keys gives rung 7; with {below.positions.shape[1]} keys the output "
    checks = run.checks | {f"all keys, {name}": c for name, c in dense.checks.items()}
    sparse = SparseResult(run.result, below.positions)
    return Run(sparse, checks, run.seconds, note + f"moves by {error:.1e}")


def decode(layer: LayerActivations, below: SparseResult) -> Run:
    """Rung 10: the same lists in 4 pieces, and in 1 and 7."""
    view = layer.latent[-1]
    packed = (pack_fp8_rows(view.kv_rows),)

    def in_pieces(splits: int) -> Run:
        attention = _sparse(sparse_decode, layer, below.positions, num_splits=splits)
        return on_pages(attention, (view.q_nope, view.q_pe), packed, below.result)

    run = in_pieces(4)
    others = {
        f"{splits} splits, {name}": check
        for splits in (1, 7)
        for name, check in in_pieces(splits).checks.items()
    }
    note = "each list in 4 pieces that are merged by their LSE (1 and 7 as well)"
    result = SparseResult(run.result, below.positions)
    return Run(result, run.checks | others, run.seconds, note)


def mask_of(positions: Int[Tensor, "n topk"], n: int) -> Bool[Tensor, "n n"]:
    """The lists as a mask over n keys."""
    mask = torch.zeros(positions.shape[0], n + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(positions < 0, n, positions).long(), True)[:, :n]


def _sparse(
    attention: Callable[..., AttentionResult],
    layer: LayerActivations,
    positions: Int[Tensor, "n topk"],
    **kwargs: int,
) -> Callable[..., AttentionResult]:
    view = layer.latent[-1]

    def run(q_nope: Tensor, q_pe: Tensor, step: Step, cache: Tensor) -> AttentionResult:
        # Every request is a beginning of the text, so a token's list is that of its position.
        lists = positions[step.positions]
        slots = positions_to_slots(lists, step.request_of_row, step.block_table, step.page_size)
        q = absorbed_query(view, q_nope, q_pe)
        latent = attention(q, cache, slots, softmax_scale=layer.softmax_scale, **kwargs)
        return projected(view, latent, q_nope.dtype)

    return run


def absorbed_query(view: LatentView, q_nope: Tensor, q_pe: Tensor) -> Float[Tensor, "n h 576"]:
    """Absorbed in float32 at least, as rung 6 does: bfloat16 would round the query once more."""
    wide = torch.promote_types(q_nope.dtype, torch.float32)
    return absorb_query(q_nope.to(wide), q_pe.to(wide), view.w_uk.to(wide))


def projected(view: LatentView, latent: AttentionResult, dtype: torch.dtype) -> AttentionResult:
    """Back from latent space to the heads' outputs."""
    out = project_values(latent.out, view.w_uv.to(latent.out.dtype))
    return AttentionResult(out.to(dtype), latent.lse)


def index_of(layer: LayerActivations) -> IndexView:
    """The layer's index activations; a ValueError without."""
    if layer.index is None:
        raise ValueError(f"layer {layer.layer} has no index activations; rung 8 needs them")
    return layer.index


def _scores_at(
    scores: Float[Tensor, "n n"], positions: Int[Tensor, "n topk"]
) -> Float[Tensor, "n topk"]:
    found = scores.gather(1, positions.clamp(min=0).long())
    return found.masked_fill(positions < 0, -torch.inf)


def _attention_share(layer: LayerActivations, chosen: Bool[Tensor, "n n"]) -> float:
    """Share of the attention weight on chosen keys, over the rows that had to leave some out."""
    q = layer.q.float().unflatten(1, (layer.k.shape[1], -1))
    scores = torch.einsum("sgqd,tgd->gqst", q * layer.softmax_scale, layer.k.float())
    n = chosen.shape[0]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).mean(dim=(0, 1))
    sparse = (~chosen & ~hidden).any(dim=1)
    if not sparse.any():
        return 1.0
    return float(weights.masked_fill(~chosen, 0.0)[sparse].sum(dim=1).mean())

"""How a layer's activations run on rungs 11 and 13: verifier batches, and a cache on many ranks."""

import torch
from torch import Tensor

from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import ServingLimits, Step, attend_along, plan_scratch, route
from mla_ref.batching.verifier import one_row_requests
from mla_ref.cache import new_index_cache, pack_fp8_rows, write_index_keys
from mla_ref.indexer import positions_to_slots, select_positions
from mla_ref.ladder.activations import LayerActivations
from mla_ref.ladder.run import PAGE_SIZE, Run, against, filled_pages, timed
from mla_ref.ladder.sparse_runs import SparseResult, absorbed_query, index_of, projected
from mla_ref.numerics import AttentionResult, Comparison, compare
from mla_ref.parallel import simulate_ranks

DRAFTS = 3
# Query rows of rung 13; all rows of the text are in the cache.
LAST_ROWS = 64
# Ranks, and neighbouring positions that stay together.
WORLDS = ((2, 1), (4, 1), (4, 16))


def verifier(layer: LayerActivations, below: SparseResult) -> Run:
    """Rung 11: 1 + 3 rows a request, selected and attended to in one step, against single rows.

    Three requests are beginnings of the text, ragged: all drafts, two of them, none. Rung 10 gave
    every row by itself, so its rows are what one-token steps give.
    """
    view, index = layer.latent[-1], index_of(layer)
    n = view.kv_rows.shape[0]
    new = [min(DRAFTS + 1, n), min(DRAFTS, max(n // 2, 1)), 1]
    computed = [n - new[0], max(n // 2, 1) - new[1], 0]
    rows = (pack_fp8_rows(view.kv_rows),)
    step, (cache,) = filled_pages(computed, new, rows, prompt_lens=computed)
    text = step.positions
    index_cache = new_index_cache(cache.shape[0], PAGE_SIZE).fill_(0xFF)
    everything, _ = filled_pages(
        [0] * len(new), [c + q for c, q in zip(computed, new, strict=True)], ()
    )
    write_index_keys(
        index_cache,
        index.k[everything.positions],
        everything.slot_mapping,
        scale_rule=index.scale_rule,
    )

    def selected(batch: Step) -> Tensor:
        return select_positions(
            index.q[text],
            index.weights[text],
            index_cache,
            **batch.batch,
            topk=index.topk,
            scale_rule=index.scale_rule,
        )

    lists = selected(step)
    slots = positions_to_slots(lists, step.request_of_row, step.block_table, PAGE_SIZE)
    q = absorbed_query(view, view.q_nope[text], view.q_pe[text])
    spec = AttnSpec(q.shape[1], topk=index.topk, page_size=PAGE_SIZE, q_dtype=q.dtype)
    limits = ServingLimits(len(new), 64, num_speculative_tokens=DRAFTS)
    plans = plan_scratch(TorchBackend(), spec, limits)
    taken = route(step, plans)
    latent, seconds = timed(
        lambda: attend_along(taken, plans, q, cache, slots, softmax_scale=layer.softmax_scale)
    )
    alone = [
        plans.extend.extend(
            q[i : i + 1], cache, slots[i : i + 1], softmax_scale=layer.softmax_scale
        )
        for i in range(len(text))
    ]
    single = AttentionResult(*(torch.cat(parts) for parts in zip(*alone, strict=True)))
    dtype = view.q_nope.dtype
    expected = AttentionResult(below.result.out[text], below.result.lse[text])
    checks = against(projected(view, latent, dtype), expected)
    others = {
        "row by row": projected(view, single, dtype).out,
    }
    checks |= {name: compare(out, expected.out) for name, out in others.items()}
    for name, found in (("lists", lists), ("flattened lists", selected(one_row_requests(step)))):
        wanted = below.positions[text]
        checks[name] = compare(found.double(), wanted.double())
    note = f"1 + {DRAFTS} rows a request go to {taken.kind} ({taken.reason}) and see their drafts"
    return Run(below, checks, seconds, note)


def ranks(layer: LayerActivations, below: SparseResult) -> Run:
    """Rung 13: the cached rows dealt to 2 and 4 ranks, the last queries against one rank."""
    view = layer.latent[-1]
    n = view.kv_rows.shape[0]
    rows, last = pack_fp8_rows(view.kv_rows), torch.arange(max(n - LAST_ROWS, 0), n)
    q = absorbed_query(view, view.q_nope[last], view.q_pe[last])
    expected = AttentionResult(below.result.out[last], below.result.lse[last])
    checks: dict[str, Comparison] = {}
    seconds = 0.0
    for world, interleave in WORLDS:
        latent, seconds = timed(
            lambda world=world, interleave=interleave: simulate_ranks(  # type: ignore[misc]
                q,
                [rows],
                below.positions[last],
                last + 1,
                softmax_scale=layer.softmax_scale,
                world=world,
                interleave=interleave,
                page_size=PAGE_SIZE,
            )
        )
        found = against(projected(view, latent, view.q_nope.dtype), expected)
        prefix = "" if (world, interleave) == WORLDS[-1] else f"{world} ranks, "
        checks |= {f"{prefix}{name}": check for name, check in found.items()}
    note = "a quarter of the rows on each of 4 ranks, partial results merged by their LSE"
    return Run(below, checks, seconds, note)

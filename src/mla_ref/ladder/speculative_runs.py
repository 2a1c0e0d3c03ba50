"""How a layer's activations run on rung 12: drafts are verified, and the wrong ones rolled back."""

import random

import torch

from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import ServingLimits, Step, attend_along, plan_scratch, route
from mla_ref.cache import new_index_cache, pack_fp8_rows, write_index_keys, write_rows
from mla_ref.indexer import positions_to_slots, select_positions
from mla_ref.ladder.activations import LayerActivations
from mla_ref.ladder.run import PAGE_SIZE, Run, against, filled_pages, timed
from mla_ref.ladder.serving_runs import DRAFTS
from mla_ref.ladder.sparse_runs import SparseResult, absorbed_query, index_of, projected
from mla_ref.numerics import AttentionResult, compare
from mla_ref.speculative import AcceptanceStats, SamplingParams, verify

# Tokens that are decoded; those before them are the prompt.
NEW_TOKENS = 48


def speculative(layer: LayerActivations, below: SparseResult) -> Run:
    """Rung 12: the end of the text, decoded with drafts that are right, half right or wrong.

    A token's id is its position, and the model says what the text says. A wrong draft is a token of
    another place, whose row, index key and query come from there. Rows that the verifier accepts
    must be those of plain decoding, which rung 10 gave; what rejected drafts wrote stays in the
    cache until the next step lies over it.
    """
    view, index = layer.latent[-1], index_of(layer)
    n = view.kv_rows.shape[0]
    first = max(n - NEW_TOKENS, 0)
    rows = pack_fp8_rows(view.kv_rows)
    prompt, (cache,) = filled_pages([0], [n], (rows,))
    cache.fill_(0xFF)
    keys = new_index_cache(cache.shape[0], PAGE_SIZE).fill_(0xFF)
    queries = absorbed_query(view, view.q_nope, view.q_pe)
    heads, dtype = queries.shape[1], queries.dtype
    spec = AttnSpec(heads, topk=index.topk, page_size=PAGE_SIZE, q_dtype=dtype)
    plans = plan_scratch(TorchBackend(), spec, ServingLimits(1, 64, num_speculative_tokens=DRAFTS))

    def write(step: Step, tokens: torch.Tensor) -> None:
        write_rows(cache, rows[tokens], step.slot_mapping)
        write_index_keys(keys, index.k[tokens], step.slot_mapping, scale_rule=index.scale_rule)

    write(Step.build([0], [first], prompt.block_table, PAGE_SIZE), torch.arange(first))
    draw, stats = random.Random(0), AcceptanceStats()
    outs, lses, lists, text, seconds = [], [], [], [], 0.0
    computed = first
    while computed < n:
        right = draw.randrange(DRAFTS + 1)
        places = range(1, min(DRAFTS, n - 1 - computed) + 1)
        drafts = [computed + i if i <= right else (computed + i + n // 2) % n for i in places]
        tokens = torch.tensor([computed, *drafts])
        step = Step.build(
            [computed], [len(tokens)], prompt.block_table, PAGE_SIZE, prompt_lens=[computed]
        )
        write(step, tokens)
        chosen = select_positions(
            index.q[tokens],
            index.weights[tokens],
            keys,
            **step.batch,
            topk=index.topk,
            scale_rule=index.scale_rule,
        )
        slots = positions_to_slots(chosen, step.request_of_row, step.block_table, PAGE_SIZE)
        q, taken = queries[tokens], route(step, plans)
        latent, spent = timed(
            lambda q=q, slots=slots, taken=taken: attend_along(  # type: ignore[misc]
                taken, plans, q, cache, slots, softmax_scale=layer.softmax_scale
            )
        )
        logits = torch.nn.functional.one_hot(tokens + 1, n + 1).float()
        said = verify(logits, [drafts], [SamplingParams()], [computed - first])
        accepted = said.num_accepted[0]
        stats.add(len(drafts), accepted)
        text += said.token_ids[0]
        kept = 1 + accepted
        outs.append(latent.out[:kept])
        lses.append(latent.lse[:kept])
        lists.append(chosen[:kept])
        seconds += spent
        computed += kept
    found = AttentionResult(torch.cat(outs), torch.cat(lses))
    expected = AttentionResult(below.result.out[first:], below.result.lse[first:])
    checks = against(projected(view, found, view.q_nope.dtype), expected)
    checks["lists"] = compare(torch.cat(lists).double(), below.positions[first:].double())
    wanted = torch.arange(first + 1, n + 1, dtype=torch.float64)
    checks["text"] = compare(torch.tensor(text, dtype=torch.float64), wanted)
    note = (
        f"{len(text)} tokens in {len(outs)} steps, {stats.num_accepted} of {stats.num_drafted} "
        "drafts accepted, rejected rows written over"
    )
    return Run(below, checks, seconds, note)

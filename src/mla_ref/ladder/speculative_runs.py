"""How a layer's activations run on rung 12: drafts are verified, and the wrong ones rolled back."""

import random
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

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


@dataclass
class Decoded:
    """What the steps of a decoding have given so far; of rejected drafts, nothing.

    Attributes:
        text: New tokens.
        results: Attention of the rows that stand, one a step.
        lists: Positions that those rows attended to, [rows, topk] each.
        stats: How many drafts were accepted.
        seconds: Time in the attention.
    """

    text: list[int] = field(default_factory=list)
    results: list[AttentionResult] = field(default_factory=list)
    lists: list[Tensor] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: float = 0.0


def speculative(layer: LayerActivations, below: SparseResult) -> Run:
    """Rung 12: the end of the text, decoded with drafts that are right, half right or wrong.

    A token's id is its position, and the model says what the text says. A wrong draft is a token of
    another place, whose row, index key and query come from there. Rows that the verifier accepts
    must be those of plain decoding, which rung 10 gave; what rejected drafts wrote stays in the
    cache until the next step lies over it.
    """
    view, n = layer.latent[-1], layer.latent[-1].kv_rows.shape[0]
    first = max(n - NEW_TOKENS, 0)
    decoded = _decode(layer, first)
    found = AttentionResult(
        torch.cat([result.out for result in decoded.results]),
        torch.cat([result.lse for result in decoded.results]),
    )
    expected = AttentionResult(below.result.out[first:], below.result.lse[first:])
    checks = against(projected(view, found, view.q_nope.dtype), expected)
    lists = torch.cat(decoded.lists)
    checks["lists"] = compare(lists.double(), below.positions[first:].double())
    wanted = torch.arange(first + 1, n + 1, dtype=torch.float64)
    checks["text"] = compare(torch.tensor(decoded.text, dtype=torch.float64), wanted)
    stats = decoded.stats
    note = (
        f"{len(decoded.text)} tokens in {len(decoded.results)} steps, {stats.num_accepted} of "
        f"{stats.num_drafted} drafts accepted, rejected rows written over"
    )
    return Run(below, checks, decoded.seconds, note)


def _decode(layer: LayerActivations, first: int) -> Decoded:
    """Decode the text from position `first` on, one verifier step after the other."""
    view, index = layer.latent[-1], index_of(layer)
    n = view.kv_rows.shape[0]
    rows = pack_fp8_rows(view.kv_rows)
    prompt, (cache,) = filled_pages([0], [n], (rows,))
    cache.fill_(0xFF)
    keys = new_index_cache(cache.shape[0], PAGE_SIZE).fill_(0xFF)
    queries = absorbed_query(view, view.q_nope, view.q_pe)
    spec = AttnSpec(queries.shape[1], topk=index.topk, page_size=PAGE_SIZE, q_dtype=queries.dtype)
    plans = plan_scratch(TorchBackend(), spec, ServingLimits(1, 64, num_speculative_tokens=DRAFTS))

    def write(step: Step, tokens: Int[Tensor, " rows"]) -> None:
        write_rows(cache, rows[tokens], step.slot_mapping)
        write_index_keys(keys, index.k[tokens], step.slot_mapping, scale_rule=index.scale_rule)

    write(Step.build([0], [first], prompt.block_table, PAGE_SIZE), torch.arange(first))
    draw, decoded, computed = random.Random(0), Decoded(), first
    while computed < n:
        drafts = _drafts(draw, computed, n)
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
        kept = 1 + said.num_accepted[0]
        decoded.stats.add(len(drafts), said.num_accepted[0])
        decoded.text += said.token_ids[0]
        decoded.results.append(AttentionResult(latent.out[:kept], latent.lse[:kept]))
        decoded.lists.append(chosen[:kept])
        decoded.seconds += spent
        computed += kept
    return decoded


def _drafts(draw: random.Random, computed: int, n: int) -> list[int]:
    """Up to three drafts after a token: some that are right, then tokens of another place."""
    right = draw.randrange(DRAFTS + 1)
    places = range(1, min(DRAFTS, n - 1 - computed) + 1)
    return [computed + i if i <= right else (computed + i + n // 2) % n for i in places]

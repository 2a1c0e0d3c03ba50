"""From what the scheduler has planned to what a model runs: rows, lengths, flags, block table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.batching import ServingLimits, Step, VerifierRows, reorder_batch
from mla_ref.engine.graphs import GraphSizes
from mla_ref.engine.scheduler import Scheduled


@dataclass(frozen=True)
class Batch:
    """One step's rows, on the host.

    Attributes:
        items: Requests in the order of their rows.
        first_rows: First row of each.
        step: The batch as attention, cache and router have it described.
        token_ids: New tokens of all requests; 0 in padded rows.
        logits_rows: Rows whose logits are needed: all of a verifier's, the last of a prompt that
            ends, none of a prompt that goes on.
        fits_graph: Whether it has been padded to a size of graphs.
    """

    items: tuple[Scheduled, ...]
    first_rows: tuple[int, ...]
    step: Step
    token_ids: Int[Tensor, " padded_tokens"]
    logits_rows: Int[Tensor, " rows"]
    fits_graph: bool

    @classmethod
    def build(
        cls,
        items: Sequence[Scheduled],
        page_size: int,
        limits: ServingLimits,
        pad_to: int = 1,
        graph_sizes: GraphSizes | None = None,
    ) -> "Batch":
        """Put the requests in order and lay out their rows.

        The order is that of `reorder_batch`: verifiers in front, chunks of prompts behind. No
        result depends on it, since no row looks at another request's. But where each request is
        routed by itself, decode and extend are then one segment each.

        Args:
            items: What runs.
            page_size: Tokens a page.
            limits: Of the server.
            pad_to: Requests and tokens are padded to multiples of it, as for a graph that was
                captured at those sizes; requests to max_num_seqs at most.
            graph_sizes: Sizes of graphs, to one of which a batch without a prompt is padded.
        """
        order = reorder_batch(
            [item.num_tokens for item in items],
            [item.state.num_computed for item in items],
            [item.state.num_prefill for item in items],
            decode_threshold=1 + limits.num_speculative_tokens,
        ).order
        items = tuple(items[place] for place in order)
        lens = [item.num_tokens for item in items]
        tokens = [token_id for item in items for token_id in item.token_ids]
        pages = [item.state.pages for item in items]
        width = max(map(len, pages))
        size = None
        if graph_sizes and not any(item.state.is_prefilling for item in items):
            size = graph_sizes.padded(lens)
        num_reqs = max(min(_round_up(len(items), pad_to), limits.max_num_seqs), len(items))
        num_reqs, num_tokens = size or (num_reqs, _round_up(len(tokens), pad_to))
        step = Step.build(
            [item.state.num_computed for item in items],
            lens,
            torch.tensor([p + [-1] * (width - len(p)) for p in pages]),
            page_size,
            prompt_lens=[item.state.num_prefill for item in items],
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
        )
        tokens += [0] * (step.num_tokens_padded - len(tokens))
        return cls(
            items=items,
            first_rows=tuple(sum(lens[:place]) for place in range(len(lens))),
            step=step,
            token_ids=torch.tensor(tokens),
            logits_rows=logits_rows(
                lens, [len(item.drafts) for item in items], [item.samples for item in items]
            ),
            fits_graph=size is not None,
        )


def logits_rows(
    query_lens: Sequence[int], num_drafts: Sequence[int], samples: Sequence[bool]
) -> Int[Tensor, " rows"]:
    """The rows of `VerifierRows`, without those of requests that choose no token in this step.

    The last projection reads the whole vocabulary for each row, so no row goes there in vain.
    """
    rows = VerifierRows.of(query_lens, num_drafts).logits
    wanted = [s for s, drafts in zip(samples, num_drafts, strict=True) for _ in range(1 + drafts)]
    return rows[torch.tensor(wanted, dtype=torch.bool)]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

"""A small batch with everything that a routed step needs, real enough to be attended to.

Every slot that no token occupies holds NaN, and so does the query of every padded row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ref.attention import sparse_extend
from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import (
    Route,
    ScratchPlan,
    ServingLimits,
    SpecMode,
    Step,
    attend_along,
    plan_scratch,
)
from mla_ref.indexer import positions_to_slots
from mla_ref.numerics import AttentionResult

SPEC = AttnSpec(
    num_heads=3,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    topk=130,
    page_size=4,
    cache_format="bf16",
    q_dtype=torch.float64,
)
SCALE = 0.4


def small_plan(
    mode: str | SpecMode = "auto", *, seqs: int = 8, tokens: int = 64, n: int = 3, max_q: int = 8
) -> ScratchPlan:
    """Plans of the torch backend for a small server; decode merges two splits or more."""
    backend = TorchBackend(multiprocessors=200)
    return plan_scratch(backend, SPEC, ServingLimits(seqs, tokens, n, max_q), mode)


@dataclass(frozen=True)
class RoutedProblem:
    """A step, a cache, queries, and for each row the slots that it may see the best of."""

    step: Step
    q: Tensor
    kv_cache: Tensor
    indices: Tensor

    def attend(self, route: Route, plan: ScratchPlan) -> AttentionResult:
        """Along a route."""
        return attend_along(route, plan, self.q, self.kv_cache, self.indices, softmax_scale=SCALE)

    def rung_9(self) -> AttentionResult:
        """The same without any route, row by row."""
        real = self.step.num_tokens
        return sparse_extend(
            self.q[:real],
            self.kv_cache,
            self.indices[:real],
            softmax_scale=SCALE,
            kv_lora_rank=SPEC.kv_lora_rank,
            rows_at_once=1,
        )


def routed_problem(
    requests: Sequence[tuple[int, int, int]],
    *,
    num_reqs_padded: int | None = None,
    num_tokens_padded: int | None = None,
    seeds: Sequence[int] | None = None,
) -> RoutedProblem:
    """Requests as (computed, new, prompt); request r is made from seeds[r] and nothing else."""
    seeds = range(len(requests)) if seeds is None else seeds
    width = max((-(-(c + q) // SPEC.page_size) for c, q, _ in requests), default=0)
    pages = len(requests) * width + 1
    # Page 0 belongs to nobody.
    table = torch.arange(1, pages, dtype=torch.int32).view(len(requests), width)
    step = Step.build(
        [c for c, _, _ in requests],
        [q for _, q, _ in requests],
        table,
        SPEC.page_size,
        prompt_lens=[p for _, _, p in requests],
        num_reqs_padded=num_reqs_padded,
        num_tokens_padded=num_tokens_padded,
    )
    cache = torch.full((pages, SPEC.page_size, SPEC.row_dim), torch.nan, dtype=SPEC.q_dtype)
    rows = step.num_tokens_padded
    q = torch.full((rows, SPEC.num_heads, SPEC.row_dim), torch.nan, dtype=SPEC.q_dtype)
    positions = torch.full((rows, SPEC.topk), -1, dtype=torch.int32)
    row = 0
    for request, ((computed, new, _), seed) in enumerate(zip(requests, seeds, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        length = computed + new
        rows_of_request = torch.randn(length, SPEC.row_dim, generator=generator, dtype=SPEC.q_dtype)
        at = torch.arange(length)
        cache[table[request, at // SPEC.page_size].long(), at % SPEC.page_size] = rows_of_request
        shape = (new, SPEC.num_heads, SPEC.row_dim)
        q[row : row + new] = torch.randn(shape, generator=generator, dtype=SPEC.q_dtype)
        for p in range(computed, length):
            # At most 12 keys, strewn over the columns so that every split has some.
            chosen = torch.randperm(p + 1, generator=generator)[:12]
            columns = torch.randperm(SPEC.topk, generator=generator)[: len(chosen)]
            positions[row, columns] = chosen.int()
            row += 1
    slots = positions_to_slots(
        positions, step.request_of_row, step.block_table.int(), SPEC.page_size
    )
    return RoutedProblem(step, q, cache, slots)

"""One attention step of a mixed batch: verifier requests, and one chunk of a prompt among them.

The same rows are set up twice: in the order in which they came, for a router that decides once for
the batch, and in the order of `reorder_batch`, for one that asks each request. Both orders attend
with the same queries to the same cache by the same lists, so their rows must be equal.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import sparse_extend
from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import (
    KernelCost,
    Route,
    ScratchPlan,
    ServingLimits,
    Step,
    attend_along,
    kernel_cost,
    plan_scratch,
    reorder_batch,
    route,
    route_per_request,
)
from mla_ref.cache import pages_needed
from mla_ref.indexer import positions_to_slots
from mla_ref.numerics import AttentionResult

DRAFTS = 3
VERIFIER_ROWS = 1 + DRAFTS
PAGE_SIZE = 64
SOFTMAX_SCALE = 192**-0.5  # of DeepSeek-V3.2: 128 + 64 numbers a head before absorption


@dataclass(frozen=True)
class RoutedStep:
    """A step with a route, ready to run.

    Attributes:
        step: The batch.
        way: Where its rows go.
        plan: Buffers of both kernels.
        q: Absorbed queries.
        kv_cache: Pages.
        indices: Slots that each row attends to.
    """

    step: Step
    way: Route
    plan: ScratchPlan
    q: Float[Tensor, "rows h d_row"]
    kv_cache: Float[Tensor, "pages page_size d_row"]
    indices: Int[Tensor, "rows topk"]

    def __call__(self) -> AttentionResult:
        """Run it."""
        return attend_along(
            self.way,
            self.plan,
            self.q,
            self.kv_cache,
            self.indices,
            softmax_scale=SOFTMAX_SCALE,
        )

    def expected(self) -> AttentionResult:
        """All rows by rung 9 in float64, whatever the route."""
        return sparse_extend(
            self.q.double(), self.kv_cache, self.indices, softmax_scale=SOFTMAX_SCALE
        )

    def costs(self, multiprocessors: int) -> tuple[KernelCost, ...]:
        """What each segment would launch on a GPU, counted."""
        visible = self.step.visible_lens.tolist()
        return tuple(
            kernel_cost(
                s.kind,
                visible[s.row_start : s.row_end],
                self.plan.spec,
                multiprocessors=multiprocessors,
                num_splits=splits_of(self.plan) if s.kind == "decode" else None,
            )
            for s in self.way.segments
        )


@dataclass(frozen=True)
class MixedBatch:
    """The two ways to run one batch.

    Attributes:
        batch_wide: In the order in which the requests came, one kernel for all.
        alone: In the order of `reorder_batch`, each request routed by itself.
        rows: Which row of `batch_wide` each row of `alone` is.
    """

    batch_wide: RoutedStep
    alone: RoutedStep
    rows: Int[Tensor, " rows"]

    @classmethod
    def random(
        cls,
        num_verifiers: int,
        chunk: int,
        *,
        heads: int,
        topk: int,
        context: int,
        multiprocessors: int,
    ) -> "MixedBatch":
        """Random queries and rows; random lists of `topk` positions, as many as a row may see.

        Args:
            num_verifiers: Requests of 1 + 3 rows.
            chunk: Rows of the request in their midst that still runs its prompt.
            heads: Query heads.
            topk: Width of the lists.
            context: Tokens that the cache holds of each request before the step.
            multiprocessors: Of the GPU for which decode is cut into splits.
        """
        place = num_verifiers // 2
        new = [VERIFIER_ROWS] * num_verifiers
        new.insert(place, chunk)
        # A verifier's prompt lies behind it. The chunk is followed by another one.
        prompts = [context] * len(new)
        prompts[place] = context + chunk + 1
        spec = AttnSpec(
            num_heads=heads,
            topk=topk,
            page_size=PAGE_SIZE,
            cache_format="bf16",
            q_dtype=torch.float32,
        )
        limits = ServingLimits(len(new), sum(new), DRAFTS)
        plan = plan_scratch(TorchBackend(multiprocessors), spec, limits)
        generator = torch.Generator().manual_seed(chunk)
        pages = pages_needed(context + max(new), PAGE_SIZE)
        table = torch.arange(len(new) * pages, dtype=torch.int32).view(len(new), pages)
        kv_cache = torch.randn(len(new) * pages, PAGE_SIZE, spec.row_dim, generator=generator)
        computed = [context] * len(new)
        step = Step.build(computed, new, table, PAGE_SIZE, prompt_lens=prompts)
        q = torch.randn(sum(new), heads, spec.row_dim, generator=generator)
        lists = torch.full((sum(new), topk), -1, dtype=torch.int32)
        for row, length in enumerate(step.visible_lens.tolist()):
            chosen = torch.randperm(length, generator=generator)[:topk]
            lists[row, : len(chosen)] = chosen.int()
        indices = positions_to_slots(lists, step.request_of_row, table, PAGE_SIZE)
        batch_wide = RoutedStep(step, route(step, plan), plan, q, kv_cache, indices)
        # The chunk goes behind the verifiers, so that there are two segments and not three.
        order = reorder_batch(new, computed, prompts, decode_threshold=VERIFIER_ROWS).order
        rows = torch.cat([torch.arange(sum(new)).split(new)[r] for r in order])
        sorted_step = Step.build(
            computed,
            [new[r] for r in order],
            table[list(order)],
            PAGE_SIZE,
            prompt_lens=[prompts[r] for r in order],
        )
        alone = replace(
            batch_wide,
            step=sorted_step,
            way=route_per_request(sorted_step, plan),
            q=q[rows],
            indices=indices[rows],
        )
        return cls(batch_wide, alone, rows)


def splits_of(plan: ScratchPlan) -> int:
    """Splits of the decode plan, which a captured graph keeps however few rows a step has."""
    return getattr(plan.decode, "num_splits", 1)

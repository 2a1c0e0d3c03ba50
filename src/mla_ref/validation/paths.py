"""The ways to attend that are compared. Each is an `Attend`: it takes a layer's place for a step.

    decode, extend   the backend's kernels
    token_wise       the ground truth: torch's own attention, one row at a time
    without_earlier  a wrong way on purpose: later candidates do not see earlier ones
    masked           for prompts, which are not measured: the same, many rows at once

`HeadShards` gives each rank its heads.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_ref.attention.selected import gather_slots
from mla_ref.backends import Plan
from mla_ref.batching import Step
from mla_ref.models.sparse import Attend
from mla_ref.numerics import AttentionResult, compute_dtype


@dataclass(frozen=True)
class Kernel:
    """A plan's decode or extend, so many rows a call as the plan holds.

    Attributes:
        plan: Of the backend.
        kind: "decode" or "extend".
        rows_at_once: Rows a call.
    """

    plan: Plan
    kind: str
    rows_at_once: int

    def __call__(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        *,
        softmax_scale: float,
    ) -> AttentionResult:
        """See `Attend`."""
        run = self.plan.decode if self.kind == "decode" else self.plan.extend
        parts = [
            run(
                q[first : first + self.rows_at_once],
                kv_cache,
                indices[first : first + self.rows_at_once],
                softmax_scale=softmax_scale,
            )
            for first in range(0, q.shape[0], self.rows_at_once)
        ]
        return AttentionResult(
            torch.cat([part.out for part in parts]),
            torch.cat([part.lse for part in parts]),
        )


@dataclass(frozen=True)
class HeadShards:
    """Tensor parallelism in one process: every rank has a share of the heads and the whole cache.

    Attributes:
        attend: Each rank's way, for num_heads / ranks heads.
        num_shards: Ranks.
    """

    attend: Attend
    num_shards: int

    def __call__(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        *,
        softmax_scale: float,
    ) -> AttentionResult:
        """See `Attend`."""
        # A rank's queries are a tensor of its own on a server, so they are here too.
        parts = [
            self.attend(heads.contiguous(), kv_cache, indices, softmax_scale=softmax_scale)
            for heads in q.chunk(self.num_shards, dim=1)
        ]
        return AttentionResult(
            torch.cat([part.out for part in parts], dim=1),
            torch.cat([part.lse for part in parts], dim=1),
        )


@dataclass(frozen=True)
class WithoutEarlier:
    """Attention in which a candidate does not see the candidates before it in its own step.

    What the original's authors feared of decode: that it takes each row for a request of its own.
    It is the positive control: a validation that does not see this error sees none.

    Attributes:
        attend: The right way.
        hidden: Slots that each row loses.
    """

    attend: Attend
    hidden: Int[Tensor, "rows most"]

    @classmethod
    def of(cls, attend: Attend, step: Step) -> "WithoutEarlier":
        """For a step: the slots of earlier rows of the same request; -1 fills up."""
        slots = step.slot_mapping
        rows = torch.arange(slots.shape[0], device=slots.device)
        same = step.request_of_row[:, None] == step.request_of_row
        return cls(attend, torch.where(same & (rows < rows[:, None]), slots, -1))

    def __call__(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        *,
        softmax_scale: float,
    ) -> AttentionResult:
        """See `Attend`."""
        lost = (indices[:, :, None] == self.hidden[:, None]).any(dim=-1)
        seen = indices.masked_fill(lost, -1)
        return self.attend(q, kv_cache, seen, softmax_scale=softmax_scale)


def token_wise(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows topk"],
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
) -> AttentionResult:
    """Each row alone, over its own keys, by torch's scaled_dot_product_attention.

    No mask: a row's list already ends at its own position, so the listed rows, read back as numbers
    in float32 (float64 for float64), are all that it gets. The heads share the keys, so they stand
    where queries usually do. There is no LSE in the result (NaN): torch does not hand it out.
    """
    dtype = compute_dtype(q, kv_cache)
    out = torch.zeros(*q.shape[:2], kv_lora_rank, dtype=dtype, device=q.device)
    for row, listed in enumerate(indices):
        kv, valid = gather_slots(kv_cache, listed[None], None, dtype)
        kv = kv[0, valid[0]]
        if len(kv):
            out[row] = scaled_dot_product_attention(
                q[row].to(dtype)[None], kv[None], kv[None, :, :kv_lora_rank], scale=softmax_scale
            )[0]
    lse = torch.full(q.shape[:2], torch.nan, dtype=dtype, device=q.device)
    return AttentionResult(out.to(q.dtype), lse)


def masked(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows topk"],
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
) -> AttentionResult:
    """All rows over all slots that any of them lists, the others masked: for prompts.

    A chunk of 256 rows of 256 keys reads each cached row once and not 256 times. Its sums have
    another order than the kernels', but all that is measured reads the cache that it leaves.
    """
    dtype = compute_dtype(q, kv_cache)
    slots, place = indices.unique(return_inverse=True)
    kv, _ = gather_slots(kv_cache, slots[None], None, dtype)
    listed = torch.zeros(q.shape[0], len(slots), dtype=torch.bool, device=q.device)
    listed.scatter_(1, place, True)
    listed &= slots >= 0
    scores = (q.to(dtype) * softmax_scale) @ kv[0].T
    scores = scores.masked_fill(~listed[:, None], -torch.inf)
    out = scores.softmax(dim=-1) @ kv[0, :, :kv_lora_rank]
    return AttentionResult(out.to(q.dtype), scores.logsumexp(dim=-1))

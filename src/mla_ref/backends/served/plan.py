"""A run of an emulated kernel: padded heads, splits, merge, and the way back to our conventions."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.selected import require_sparse
from mla_ref.backends.plan_checks import require_outputs, require_planned
from mla_ref.backends.served.arithmetic import TILE, attend_rows, read_rows, round_queries
from mla_ref.backends.served.profile import ServedProfile
from mla_ref.backends.torch_backend import TorchPlan
from mla_ref.cache.fp8_rows import LATENT
from mla_ref.checks import describe
from mla_ref.numerics import AttentionResult, apply_sink, merge_many, to_natural_lse

# Rows gathered together; 2048 entries of 576 float32 numbers are 4.7 MB a row.
_ROWS_AT_ONCE = 16


def lse_as_returned(
    profile: ServedProfile,
    lse: Float[Tensor, "*rows h"],
    sink: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "*rows h"]:
    """The LSE as the profile's kernel returns it, from ours.

    Args:
        profile: Whose conventions.
        lse: Natural, without the sink, -inf for a row without a valid entry.
        sink: What the kernel was given as its sink. It is in the LSE of a profile whose sink is
            "out and lse". It cannot be taken out again where it outweighs the keys, so an adapter
            for such a kernel gives it none and applies the sink afterwards.
    """
    if sink is not None and profile.sink == "out and lse":
        lse = torch.logaddexp(lse, sink.to(lse.dtype))
    foreign = lse / math.log(2.0) if profile.lse_base == "2" else lse
    if profile.empty_lse == "+inf":
        foreign = torch.where(lse == -torch.inf, torch.inf, foreign)
    return foreign


@dataclass(frozen=True)
class ServedPlan(TorchPlan):
    """Buffers of a decode step as the emulated kernel would have them, and its arithmetic.

    Attributes:
        profile: What is emulated.
        num_heads: Heads that the kernel runs with.
        pad_value: What stands in the padded heads of q.
    """

    profile: ServedProfile
    num_heads: int
    pad_value: float

    def decode(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """Each list in splits of whole tiles of 64 entries. See `Plan.decode`."""
        self._require("decode", q, kv_cache, indices, counts, softmax_scale)
        out_dtype = require_outputs(self.spec, q, out, lse, out_dtype, torch.float32)
        found = self._attend(q, kv_cache, indices, counts, softmax_scale, self.num_splits)
        return self._hand_over(found, sink, out, lse, out_dtype)

    def extend(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """The same arithmetic in one pass, without partial results. See `Plan.extend`."""
        self._require("extend", q, kv_cache, indices, counts, softmax_scale)
        out_dtype = require_outputs(self.spec, q, out, lse, out_dtype, torch.float32)
        found = self._attend(q, kv_cache, indices, counts, softmax_scale, 1)
        return self._hand_over(found, sink, out, lse, out_dtype)

    def _require(
        self,
        kind: str,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        softmax_scale: float,
    ) -> None:
        """Raise unless a run fits its plan and the kernel; reads no values."""
        require_planned(self.spec, self.max_rows, self.kinds, kind, q, kv_cache, indices)
        require_sparse(q, kv_cache, indices, counts, softmax_scale, LATENT)
        if kv_cache.dtype not in (torch.uint8, q.dtype):
            raise ValueError(f"kv_cache must hold {q.dtype}, as q, got {describe(kv_cache)}")

    def _attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        softmax_scale: float,
        num_splits: int,
    ) -> AttentionResult:
        """Float32 accumulators and the LSE that the kernel would return, for its padded heads."""
        padding = (0, 0, 0, self.num_heads - q.shape[1])
        padded = torch.nn.functional.pad(q, padding, value=self.pad_value)
        whole = AttentionResult(
            padded.new_empty(*padded.shape[:2], LATENT, dtype=torch.float32),
            padded.new_empty(padded.shape[:2], dtype=torch.float32),
        )
        for first in range(0, len(q), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(q)))
            some = None if counts is None else counts[rows]
            found = self._attend_some(
                padded[rows], kv_cache, indices[rows], some, softmax_scale, num_splits, rows
            )
            for all_rows, part in zip(whole, found, strict=True):
                all_rows[rows] = part
        return AttentionResult(whole.out, lse_as_returned(self.profile, whole.lse))

    def _attend_some(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        softmax_scale: float,
        num_splits: int,
        rows: slice,
    ) -> AttentionResult:
        """Some rows: one split after the other into the plan's buffers, and their merge."""
        arithmetic = self.profile.arithmetic
        queries = round_queries(q, arithmetic)
        length = split_length(self.spec.topk, num_splits)
        outs, lses = self.partials.out[:, rows], self.partials.lse[:, rows]
        for split in range(num_splits):
            first = min(split * length, indices.shape[1])
            left = None if counts is None else (counts - first).clamp(min=0)
            listed = read_rows(kv_cache, indices[:, first : first + length], left, arithmetic)
            out, lse = attend_rows(
                queries,
                listed,
                softmax_scale=softmax_scale,
                weights=arithmetic.weights,
                q_dtype=q.dtype,
            )
            natural = to_natural_lse(lse, base="2")
            if num_splits == 1:
                return AttentionResult(out, natural)
            outs[split], lses[split] = out, natural
        return merge_many(outs.to(torch.float32), lses, validate=False)

    def _hand_over(
        self,
        found: AttentionResult,
        sink: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        out_dtype: torch.dtype,
    ) -> AttentionResult:
        """What the adapter makes of a kernel's result: our LSE, the sink, no padded heads."""
        profile, heads = self.profile, self.spec.num_heads
        natural = to_natural_lse(found.lse, base=profile.lse_base, empty=profile.empty_lse)
        result = AttentionResult(found.out[:, :heads], natural[:, :heads])
        rounded = (result.out if sink is None else apply_sink(result, sink)).to(out_dtype)
        return AttentionResult(
            rounded if out is None else out.copy_(rounded),
            result.lse if lse is None else lse.copy_(result.lse),
        )


def split_length(topk: int, num_splits: int) -> int:
    """Entries of a split: whole tiles, so that each tile lies in one split."""
    return -(-max(topk, 1) // (num_splits * TILE)) * TILE

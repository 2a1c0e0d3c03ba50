"""Ragged batches with lists of global positions, and what one rank makes of them.

Built from seeds, so that processes which share nothing hold the same problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.support import scatter_pages
from torch import Tensor

from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.indexer import positions_to_slots
from mla_ref.numerics import AttentionResult, apply_sink, oracle_attention
from mla_ref.parallel import simulate_ranks

CPU = torch.device("cpu")
PAGE = 16


@dataclass(frozen=True)
class RankProblem:
    """The arguments that all ranks share, and the rows that are dealt to them."""

    q: Tensor
    kv_rows: tuple[Tensor, ...]
    positions: Tensor
    visible_lens: Tensor
    request_of_row: Tensor
    kv_lora_rank: int
    counts: Tensor | None
    sink: Tensor | None
    softmax_scale: float = 0.2

    @property
    def spec(self) -> AttnSpec:
        return AttnSpec(
            num_heads=self.q.shape[1],
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.q.shape[2] - self.kv_lora_rank,
            topk=self.positions.shape[1],
            page_size=PAGE,
            cache_format="fp8" if self.kv_rows[0].dtype == torch.uint8 else "bf16",
            q_dtype=self.q.dtype,
        )

    @property
    def listed(self) -> Tensor:
        """The lists without what a row may not see or does not count."""
        listed = self.positions.masked_fill(self.positions >= self.visible_lens[:, None], -1)
        if self.counts is None:
            return listed
        return listed.masked_fill(torch.arange(listed.shape[1]) >= self.counts[:, None], -1)

    def one_rank(self) -> AttentionResult:
        """Rungs 10 and 11: the whole cache in scattered pages, the lists as they are."""
        poison = 0xFF if self.kv_rows[0].dtype == torch.uint8 else torch.nan
        cache, table = scatter_pages(self.kv_rows, PAGE, poison=poison)
        slots = positions_to_slots(self.listed, self.request_of_row, table, PAGE)
        plan = TorchBackend().plan(self.spec, max_rows=len(self.q), max_requests=9, device=CPU)
        return plan.decode(self.q, cache, slots, softmax_scale=self.softmax_scale, sink=self.sink)

    def simulate(self, world: int, interleave: int = 1, **changed: Any) -> AttentionResult:
        arguments: dict[str, Any] = {
            "q": self.q,
            "kv_rows": self.kv_rows,
            "positions": self.positions,
            "visible_lens": self.visible_lens,
            "softmax_scale": self.softmax_scale,
            "request_of_row": self.request_of_row,
            "kv_lora_rank": self.kv_lora_rank,
            "page_size": PAGE,
            "counts": self.counts,
            "sink": self.sink,
        }
        return simulate_ranks(**(arguments | {"world": world, "interleave": interleave} | changed))

    def oracle(self) -> AttentionResult:
        """From the definition in float64, row by row."""
        results = []
        for row, request in enumerate(self.request_of_row.tolist()):
            rows = self.kv_rows[max(request, 0)]
            rows = (unpack_fp8_rows(rows) if rows.dtype == torch.uint8 else rows).double()
            keys = rows[[p for p in self.listed[row].tolist() if p >= 0 and request >= 0]][:, None]
            seen = torch.ones(1, len(keys), dtype=torch.bool)
            results.append(
                oracle_attention(
                    self.q[row : row + 1].double(),
                    keys,
                    keys[..., : self.kv_lora_rank],
                    seen,
                    softmax_scale=self.softmax_scale,
                )
            )
        result = AttentionResult(*(torch.cat(parts) for parts in zip(*results, strict=True)))
        if self.sink is None:
            return result
        return AttentionResult(apply_sink(result, self.sink.double()), result.lse)


def rank_problem(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    k: int = 11,
    heads: int = 3,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    sink: bool = False,
    counts: bool = False,
    future: bool = False,
    nothing: bool = False,
    padded_rows: int = 0,
    seed: int = 0,
) -> RankProblem:
    """Random queries, rows and lists; the lists hold -1 anywhere and no position twice.

    `future`: lists also hold positions that the row may not see, of rows that are in the cache.
    `nothing`: every second row lists nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    d_c, d_row = (512, 576) if fp8 else (16, 24)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = [normal(length, d_row).to(torch.float32 if fp8 else dtype) for length in seq_lens]
    lists, lens, requests = [], [], []
    for request, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for visible in range(length - new + 1, length + 1):
            some = torch.randperm(length if future else visible, generator=generator)[: k - 1]
            entries = torch.full((k,), -1, dtype=torch.int64)
            places = torch.randperm(k, generator=generator)[: len(some)]
            entries[places] = some
            if nothing and len(lists) % 2:
                entries.fill_(-1)
            lists.append(entries)
            lens.append(visible)
            requests.append(request)
    # A padded row belongs to nobody and sees nothing, whatever stands in its list.
    lists += [torch.arange(k)] * padded_rows
    total = len(lists)
    return RankProblem(
        q=normal(total, heads, d_row).to(dtype),
        kv_rows=tuple(pack_fp8_rows(r) if fp8 else r for r in rows),
        positions=torch.stack(lists).int(),
        visible_lens=torch.tensor(lens + [0] * padded_rows),
        request_of_row=torch.tensor(requests + [-1] * padded_rows),
        kv_lora_rank=d_c,
        counts=torch.randint(0, k + 1, (total,), generator=generator) if counts else None,
        sink=normal(heads).float() if sink else None,
    )


VERIFIER: dict[str, Any] = {"seq_lens": [9, 30, 67], "query_lens": [4, 4, 4]}
CASES: dict[str, dict[str, Any]] = {
    "one token": {"seq_lens": [1], "query_lens": [1]},
    "shorter than the world": {"seq_lens": [1, 2, 3, 7], "query_lens": [1, 1, 3, 2]},
    "decode": {"seq_lens": [5, 17, 133], "query_lens": [1, 1, 1]},
    "verifier": VERIFIER,
    "ragged": {"seq_lens": [3, 50, 12, 1], "query_lens": [2, 5, 1, 1]},
    "odd heads": VERIFIER | {"heads": 5},
    "sink": VERIFIER | {"sink": True},
    "counts": VERIFIER | {"counts": True, "sink": True},
    "lists that look ahead": VERIFIER | {"future": True, "k": 40},
    "rows that list nothing": VERIFIER | {"nothing": True},
    "padded rows": VERIFIER | {"padded_rows": 3, "sink": True},
    "one entry a list": VERIFIER | {"k": 1, "nothing": True},
    "float64": VERIFIER | {"dtype": torch.float64, "sink": True},
    "bfloat16": VERIFIER | {"dtype": torch.bfloat16, "sink": True},
    "fp8": VERIFIER | {"fp8": True, "sink": True},
    "fp8 bfloat16": VERIFIER | {"fp8": True, "dtype": torch.bfloat16},
}
# One rank and several differ by the rounding of a merge, then of the output's dtype.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}

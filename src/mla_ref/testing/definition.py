"""Sparse attention from its definition, in float64: what a case expects.

It shares no code with the rungs: one Python list of slots a row, E4M3 from the bits of each byte,
and the oracle of `mla_ref.numerics` for the softmax. Each choice that kernels get wrong is an
argument here, so that `suspects` can compute what a known fault would give.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mla_ref.numerics import AttentionResult, oracle_attention

Slots = Callable[[list[int], int | None, int], list[int]]
Numbers = Callable[[Tensor], Tensor]


def _e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


E4M3 = torch.tensor([_e4m3_value(byte) for byte in range(256)], dtype=torch.float64)


def numbers_of(rows: Shaped[Tensor, "n row"]) -> Float[Tensor, "n d_row"]:
    """The float64 numbers of rows in a float dtype, or of 656 bytes."""
    return _numbers(rows, lambda scales: scales)


def truncated_numbers_of(rows: Shaped[Tensor, "n row"]) -> Float[Tensor, "n d_row"]:
    """The same by a reader that keeps only the exponent of each scale, as E8M0."""
    return _numbers(rows, lambda s: torch.exp2(torch.floor(torch.log2(s.double()))))


def _numbers(rows: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    if rows.dtype != torch.uint8:
        return rows.double()
    scales = rows[:, 512:528].clone().view(torch.float32)
    latent = E4M3[rows[:, :512].long()] * read(scales).double().repeat_interleave(128, dim=1)
    k_pe = rows[:, 528:].clone().view(torch.bfloat16).double()
    # A reader has float32: the product is rounded to it once.
    return torch.cat([latent.float().double(), k_pe], dim=1)


def listed_slots(entries: list[int], count: int | None, capacity: int) -> list[int]:
    """The slots that a list names: the first `count` entries, without those outside the cache."""
    return [slot for slot in entries[:count] if 0 <= slot < capacity]


def slots_of(arguments: dict[str, Any], read: Slots = listed_slots) -> list[list[int]]:
    """The slots that each query row reads."""
    cache, counts = arguments["kv_cache"], arguments.get("counts")
    capacity = cache.shape[0] * cache.shape[1]
    return [
        read(entries, None if counts is None else int(counts[row]), capacity)
        for row, entries in enumerate(arguments["indices"].tolist())
    ]


def gather(
    arguments: dict[str, Any], *, slots: Slots = listed_slots, numbers: Numbers = numbers_of
) -> list[Float[Tensor, "_n d_row"]]:
    """The cached rows that each query row sees, as numbers."""
    cache = arguments["kv_cache"]
    page_size = cache.shape[1]
    found = (torch.tensor(row, dtype=torch.int64) for row in slots_of(arguments, slots))
    return [numbers(cache[row // page_size, row % page_size]) for row in found]


def attend(
    arguments: dict[str, Any],
    rows: Sequence[Float[Tensor, "_n d_row"]],
    *,
    kv_lora_rank: int = 512,
    softmax_scale: float | None = None,
) -> AttentionResult:
    """Output and LSE, without the sink, of each query row over its own rows."""
    q = arguments["q"].double()
    scale = softmax_scale or arguments["softmax_scale"]
    outs, lses = [], []
    for queries, keys in zip(q, rows, strict=True):
        # All heads read one row, so a head is one more query over one KV head.
        visible = torch.ones(len(queries), len(keys), dtype=torch.bool)
        kv = keys[:, None]
        part = oracle_attention(
            queries[:, None], kv, kv[..., :kv_lora_rank], visible, softmax_scale=scale
        )
        outs.append(part.out[:, 0])
        lses.append(part.lse[:, 0])
    if not outs:
        return AttentionResult(q.new_zeros(0, q.shape[1], kv_lora_rank), q.new_zeros(q.shape[:2]))
    return AttentionResult(torch.stack(outs), torch.stack(lses))


def with_sink(result: AttentionResult, sink: Float[Tensor, " h"] | None) -> AttentionResult:
    """The output with one more key of score `sink` and value 0 for each head; the same LSE."""
    if sink is None:
        return result
    sink = sink.double()
    # exp(lse) / (exp(lse) + exp(sink)), without the exponentials of large numbers.
    share = 1 / (1 + torch.exp(sink - result.lse))
    share = torch.where(sink == -math.inf, 1.0, torch.where(sink == math.inf, 0.0, share))
    return AttentionResult(result.out * share[..., None], result.lse)

"""Known faults of sparse attention, each as the float64 result that it would give.

A fault that has no meaning in a case (no counts, no sink, no gaps) raises a ValueError there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ref.numerics import AttentionResult
from mla_ref.testing import definition
from mla_ref.testing.definition import attend, gather, listed_slots, slots_of, with_sink

Fault = Callable[[dict[str, Any]], AttentionResult]


def _slots(read: definition.Slots) -> Fault:
    def fault(arguments: dict[str, Any]) -> AttentionResult:
        if slots_of(arguments, read) == slots_of(arguments, listed_slots):
            raise ValueError("the fault reads the right slots")
        rows = gather(arguments, slots=read)
        return with_sink(attend(arguments, rows), arguments.get("sink"))

    return fault


def _changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    def fault(arguments: dict[str, Any]) -> AttentionResult:
        changed = arguments | change(arguments)
        return with_sink(attend(changed, gather(changed)), changed.get("sink"))

    return fault


def _none_is(slot: int) -> definition.Slots:
    def read(entries: list[int], count: int | None, capacity: int) -> list[int]:
        places = (slot if s < 0 else s for s in entries[:count] if s < capacity)
        return [s % capacity for s in places]

    return read


def _clamped(entries: list[int], count: int | None, capacity: int) -> list[int]:
    return [min(s, capacity - 1) for s in entries[:count] if s >= 0]


def _wrapped(entries: list[int], count: int | None, capacity: int) -> list[int]:
    return [s % capacity for s in entries[:count] if s >= 0]


def _once(entries: list[int], count: int | None, capacity: int) -> list[int]:
    return list(dict.fromkeys(listed_slots(entries, count, capacity)))


def _not_zero(entries: list[int], count: int | None, capacity: int) -> list[int]:
    return [s for s in listed_slots(entries, count, capacity) if s > 0]


def _stop_at_none(entries: list[int], count: int | None, capacity: int) -> list[int]:
    used = entries[:count]
    return listed_slots(used[: used.index(-1)] if -1 in used else used, None, capacity)


def _counted(change: Callable[[Tensor, int], Tensor | None]) -> Fault:
    def counts(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["counts"] is None:
            raise ValueError("no counts")
        return {"counts": change(arguments["counts"], arguments["indices"].shape[1])}

    return _changed(counts)


def _without_k_pe(arguments: dict[str, Any]) -> dict[str, Any]:
    q = arguments["q"].clone()
    q[..., 512:] = 0
    return {"q": q}


def _scale_of_576(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"softmax_scale": 576**-0.5}


def _scaled_q(arguments: dict[str, Any]) -> dict[str, Any]:
    q = arguments["q"]
    return {"q": (q.float() * arguments["softmax_scale"]).to(q.dtype), "softmax_scale": 1.0}


def _without_sink(arguments: dict[str, Any]) -> dict[str, Any]:
    if "sink" not in arguments:
        raise ValueError("no sink")
    return {"sink": None}


def _as_if_dense(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The tensor as a kernel sees it that takes its rows for neighbours in memory."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        x = arguments[name]
        if x.is_contiguous():
            raise ValueError("no gaps")
        dense = torch.empty(x.shape, device="meta").stride()
        return {name: x.as_strided(x.shape, dense)}

    return change


def _truncated_scales(arguments: dict[str, Any]) -> AttentionResult:
    if arguments["kv_cache"].dtype != torch.uint8:
        raise ValueError("no scales")
    rows = gather(arguments, numbers=definition.truncated_numbers_of)
    return with_sink(attend(arguments, rows), arguments.get("sink"))


def _sink_in_each_of(splits: int) -> Fault:
    def fault(arguments: dict[str, Any]) -> AttentionResult:
        sink = arguments["sink"].double() if "sink" in arguments else None
        if sink is None:
            raise ValueError("no sink")
        plain = attend(arguments, gather(arguments))
        topk = arguments["indices"].shape[1]
        length = -(-topk // splits)
        total = torch.zeros_like(plain.out)
        for first in range(0, topk, length):
            part = arguments | {"indices": arguments["indices"][:, first : first + length]}
            if arguments["counts"] is not None:
                part["counts"] = (arguments["counts"] - first).clamp(min=0)
            piece = attend(part, gather(part))
            weight = torch.where(piece.lse == -math.inf, 0.0, torch.exp(piece.lse - plain.lse))
            total += with_sink(piece, sink).out * weight[..., None]
        return AttentionResult(total, plain.lse)

    return fault


FAULTS: dict[str, Fault] = {
    "-1 is read as the last row of the cache (kv[-1])": _slots(_none_is(-1)),
    "-1 is read as slot 0": _slots(_none_is(0)),
    "a list ends at its first -1": _slots(_stop_at_none),
    "slot 0 is taken for none": _slots(_not_zero),
    "slots outside the cache are clamped to its last row": _slots(_clamped),
    "slots outside the cache wrap around": _slots(_wrapped),
    "a slot that is listed twice counts once": _slots(_once),
    "counts are ignored": _counted(lambda counts, topk: None),
    "counts are read one too high": _counted(lambda counts, topk: (counts + 1).clamp(max=topk)),
    "counts are read one too low": _counted(lambda counts, topk: (counts - 1).clamp(min=0)),
    "softmax_scale is 576^-0.5, whatever was passed": _changed(_scale_of_576),
    "q is rounded to its dtype after it was multiplied with softmax_scale": _changed(_scaled_q),
    "the rotary part of the row (k_pe) is not in the scores": _changed(_without_k_pe),
    "the sink is ignored": _changed(_without_sink),
    "the page stride of kv_cache is ignored": _changed(_as_if_dense("kv_cache")),
    "the strides of q are ignored": _changed(_as_if_dense("q")),
    "the scales are read as E8M0: only their exponent counts": _truncated_scales,
    **{f"the sink is applied in each of {n} splits": _sink_in_each_of(n) for n in (2, 4, 8, 16)},
}

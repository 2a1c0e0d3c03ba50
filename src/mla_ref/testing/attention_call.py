"""One call of a decode or extend under test: how it is made, and what it must leave alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.numerics import AttentionResult, to_natural_lse
from mla_ref.platform import synchronize
from mla_ref.testing.adapter import Adapter
from mla_ref.testing.verdict import Finding, judge, same_bits

POSITIONAL = ("q", "kv_cache", "indices", "counts")


def call(
    function: Callable[..., Any], arguments: dict[str, Any], calling: str, adapter: Adapter
) -> tuple[AttentionResult | None, tuple[Finding, ...]]:
    """The result in this library's conventions, or None and what is wrong with its form."""
    q = arguments["q"]
    given = {k: v for k, v in arguments.items() if k not in POSITIONAL}
    shape = (*q.shape[:2], 512)
    if calling == "buffers":
        given["out"] = torch.full(shape, torch.nan, dtype=q.dtype, device=q.device)
        given["lse"] = torch.full(shape[:2], torch.nan, dtype=torch.float32, device=q.device)
    if calling == "float32 out":
        given["out_dtype"] = torch.float32
    positional = [arguments[name] for name in POSITIONAL[:3]]
    if arguments["counts"] is not None:
        positional.append(arguments["counts"])
    returned = function(*positional, **given)
    synchronize(q.device)
    if calling == "buffers":
        unwritten = [k for k in ("out", "lse") if bool(given[k].isnan().all()) and q.numel()]
        if unwritten:
            words = "was given as a buffer and still holds the NaN that it came with"
            return None, tuple(Finding(f"{k}=", words) for k in unwritten)
        returned = (given["out"], given["lse"])  # whatever came back, the buffers must hold it
    if (
        not isinstance(returned, (tuple, list))
        or len(returned) != 2
        or not all(isinstance(x, Tensor) for x in returned)
    ):
        words = f"the function must return the pair (out, lse), got {_described(returned)}"
        return None, (Finding("result", words),)
    out, lse = returned
    wanted = torch.float32 if calling == "float32 out" else q.dtype
    wrong = [
        Finding(part, f"is {describe(x)}, must be {describe(x.new_empty(size, dtype=dtype))}")
        for part, x, size, dtype in (
            ("out", out, shape, wanted),
            ("lse", lse, shape[:2], torch.float32),
        )
        if x.dtype != dtype or tuple(x.shape) != tuple(size)
    ]
    if wrong:
        return None, tuple(wrong)
    lse = to_natural_lse(lse, base=adapter.lse_base, empty=adapter.empty_lse)
    return AttentionResult(out, lse), ()


def compared(
    result: AttentionResult, expected: AttentionResult, limits: AttentionResult
) -> tuple[Finding, ...]:
    """What is wrong with the numbers of both parts."""
    found = [
        judge(part, getattr(result, part), getattr(expected, part), getattr(limits, part))
        for part in ("out", "lse")
    ]
    return tuple(f for f in found if f)


def repeated(
    function: Callable[..., Any],
    used: dict[str, Any],
    fresh: dict[str, Any],
    calling: str,
    adapter: Adapter,
    first: AttentionResult,
) -> tuple[Finding, ...]:
    """After a right result: arguments that have changed, and a second call with other bits.

    Args:
        function: What is under test.
        used: The arguments that the first call had.
        fresh: The same, built again.
        calling: "twice" and "permuted" call again, with fresh arguments.
        adapter: For the result's conventions.
        first: The first result.
    """
    words = "the call has changed its argument"
    found = [
        same_bits(name, words, fresh[name], used[name])
        for name in ("q", "kv_cache", "indices", "counts", "sink")
        if isinstance(fresh.get(name), Tensor)
    ]
    if calling in ("twice", "permuted"):
        rows = fresh["q"].shape[0]
        order = torch.arange(rows, device=fresh["q"].device)
        if calling == "permuted":
            order = order.roll(1).flip(0)
            for name in ("q", "indices", "counts"):
                if fresh[name] is not None:
                    fresh[name] = fresh[name][order]
        again, wrong = call(function, fresh, "plain", adapter)
        found.extend(wrong)
        words = {
            "twice": "the same call gives other bits the second time",
            "permuted": "the same row gives other bits when the rows stand in another order",
        }[calling]
        if again is not None:
            for part, a, b in zip(("out", "lse"), first, again, strict=True):
                found.append(same_bits(part, words, a[order], b))
    return tuple(f for f in found if f)


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values: {', '.join(map(describe, value))}"
    return describe(value)

"""The log-sum-exp beside an attention output: conventions, foreign conventions, sink.

Ours: natural logarithm, float32, without the sink, -inf for a row that saw nothing. Two bases are
in circulation, sometimes from one library (flashinfer#2113, vllm#28840), and two values for an
empty row (FlashMLA gives +inf, flashinfer#4484). Read a base-2 LSE as natural and a merge
under-weights the newest tokens several times over; so a foreign LSE is converted here, by name.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_choice,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)
from mla_ref.numerics.result import AttentionResult


def to_natural_lse(
    lse: Float[Tensor, "*rows"], *, base: str, empty: str = "-inf"
) -> Float[Tensor, "*rows"]:
    """Convert a foreign LSE to ours: natural logarithm, -inf for an empty row.

    Args:
        lse: float32 or float64.
        base: "e" or "2", the base in which `lse` was taken.
        empty: "-inf" or "+inf", what the peer writes for a row that saw nothing. With "+inf"
            every +inf becomes -inf.

    Raises:
        TypeError: `lse` is bfloat16 or float16, which is too coarse to merge with (aiter#3542).
    """
    require_choice("base", base, ("e", "2"))
    require_choice("empty", empty, ("-inf", "+inf"))
    require_wide("lse", lse)
    natural = lse * math.log(2.0) if base == "2" else lse
    return torch.where(natural == torch.inf, -torch.inf, natural) if empty == "+inf" else natural


def require_wide(name: str, lse: object) -> Tensor:
    """Return `lse` if it is a float32 or float64 tensor, else raise a TypeError."""
    if not isinstance(lse, Tensor) or lse.dtype not in (torch.float32, torch.float64):
        found = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
        raise TypeError(f"{name} must be a float32 or float64 tensor, got {found}")
    return lse


def blank_empty_rows(
    result: AttentionResult, visible_lens: Int[Tensor, " rows"]
) -> AttentionResult:
    """Put (0, -inf) where a row saw nothing, whatever a kernel left there.

    Some kernels return a finite LSE and undefined output for an empty row (vllm#49294); merged as
    it is, that garbage gets weight.

    Args:
        result: `out` [rows, h, d] and `lse` [rows, h].
        visible_lens: Number of keys each row saw.
    """
    _require_result(result, "rows h d")
    require_integer("visible_lens", visible_lens, "rows")
    require_size("visible_lens", visible_lens, 0, result.out.shape[0], "one length a row")
    empty = (visible_lens <= 0)[:, None]
    return AttentionResult(
        torch.where(empty[..., None], 0.0, result.out), torch.where(empty, -torch.inf, result.lse)
    )


def apply_sink(result: AttentionResult, sink: Float[Tensor, " h"]) -> Float[Tensor, "*rows h d"]:
    """Scale an output as if one more key of score `sink` and value 0 had been seen.

    The factor is 1 / (1 + exp(sink - lse)): a sink of 1e5 makes the exponential infinite and the
    factor 0, never inf / inf (flashinfer#5119). Not torch.sigmoid: on a CPU it rounds a number by
    its place in the tensor, so a row's bits would depend on its neighbours.

    Apply it once, after the last merge of splits and ranks; the LSE stays without the sink.

    Args:
        result: The merged `out` [rows, h, d] and `lse` [rows, h].
        sink: Score of the sink for each head, natural-log units. -inf means no sink.
    """
    _require_result(result)
    require_float("sink", sink, "h")
    require_size("sink", sink, 0, result.lse.shape[-1], "one sink a head")
    require_same_device({"result.out": result.out, "sink": sink})
    sink = sink.to(result.lse.dtype)
    # Nothing seen and no sink: -inf minus -inf. The output is 0 already and stays 0.
    difference = torch.where(sink == -torch.inf, torch.inf, result.lse - sink)
    # A bfloat16 output meets the float32 factor, so that it is rounded once and not twice.
    factor = 1 / (1 + torch.exp(-difference))
    return (result.out * factor[..., None]).to(result.out.dtype)


def _require_result(result: object, dims: str | None = None) -> None:
    """Raise unless `result` holds an output and one LSE a row and head of it."""
    if not isinstance(result, AttentionResult):
        raise TypeError(f"result must be an AttentionResult, got {describe(result)}")
    lse = require_wide("result.lse", result.lse)
    if lse.ndim == 0:
        raise ValueError(f"result.lse must have the heads last, got {describe(lse)}")
    out = require_float("result.out", result.out, dims or " ".join("n" * lse.ndim) + " d")
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            "result.lse must have the shape of result.out without its last dimension, got "
            f"{describe(lse)} beside {describe(out)}"
        )
    require_same_device({"result.out": out, "result.lse": lse})

"""Whose result is this? A failed case is computed again with each known fault.

Where the result under test is that of a fault, the report can say so: a kernel author then looks at
one line and not at a million numbers.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from mla_ref.numerics import AttentionResult
from mla_ref.numerics.precision import ulp
from mla_ref.testing.known_faults import FAULTS
from mla_ref.testing.tolerance import finite_part
from mla_ref.testing.verdict import judge


def looks_like(
    arguments: dict[str, Any],
    result: AttentionResult,
    expected: AttentionResult,
    limits: AttentionResult,
) -> tuple[str, ...]:
    """The faults whose result is the one under test, in words; none where the right result is."""
    found = list(_of_the_lse(arguments, result, expected, limits))
    near = AttentionResult(*(4 * limit for limit in limits))
    for words, fault in FAULTS.items():
        try:
            guess = fault(arguments)
        except (ValueError, IndexError, RuntimeError):  # the fault has no meaning in this case
            continue
        # The limits are those of the right numbers; a wrong one may be larger, and rounded.
        rounding = ulp(finite_part(guess.out).abs().amax(dim=-1), result.out.dtype)
        loose = AttentionResult(near.out + 2 * rounding, near.lse + 1e-3)
        same = not any(_differ(part, result, guess, loose) for part in result._fields)
        if same and any(_differ(part, guess, expected, near) for part in result._fields):
            found.append(words)
    seen = result.out.detach().cpu()[expected.lse > -math.inf]
    if not found and not _differ("lse", result, expected, limits) and bool(seen.isnan().any()):
        found.append("the weights are right, but one of 0 is multiplied with NaN, which is NaN")
    return tuple(found or _of_empty_rows(result, expected))


def _differ(part: str, a: AttentionResult, b: AttentionResult, limits: AttentionResult) -> bool:
    return judge(part, *(getattr(x, part) for x in (a, b, limits))) is not None


def _of_the_lse(
    arguments: dict[str, Any],
    result: AttentionResult,
    expected: AttentionResult,
    limits: AttentionResult,
) -> Iterator[str]:
    """Faults of the LSE alone."""
    if judge("lse", result.lse, expected.lse, limits.lse) is None:
        return
    guesses = {
        'the LSE is in base 2; declare lse_base="2"': expected.lse / math.log(2.0),
    }
    if (sink := arguments.get("sink")) is not None:
        guesses["the sink is in the LSE"] = torch.logaddexp(expected.lse, sink.double())
    for words, lse in guesses.items():
        if judge("lse", result.lse, lse, 4 * limits.lse + 1e-5) is None:
            yield words
    rounded = result.lse.detach().cpu()[expected.lse.isfinite()]
    rounded = rounded[rounded.isfinite()]
    if rounded.numel() and torch.equal(rounded.bfloat16().float(), rounded.float()):
        yield "the LSE has been rounded to bfloat16"


def _of_empty_rows(result: AttentionResult, expected: AttentionResult) -> Iterator[str]:
    """Faults where a row has no valid entry: 0 / 0, (-inf) - (-inf), or a number left behind."""
    empty = expected.lse == -math.inf
    if not bool(empty.any()):
        return
    lse, out = result.lse.detach().cpu()[empty], result.out.detach().cpu()[empty]
    if bool((lse == math.inf).any()):
        yield 'a row without a valid entry has LSE +inf, not -inf; declare empty_lse="+inf"'
    if bool(lse.isfinite().any()):
        yield "a row without a valid entry has a finite LSE: its mask is a large negative number"
    if bool(out.isnan().any() or lse.isnan().any()):
        yield "a row without a valid entry is NaN: 0 / 0, or -inf minus -inf"
    elif bool((out != 0).any()):
        yield "a row without a valid entry has an output that is not 0"

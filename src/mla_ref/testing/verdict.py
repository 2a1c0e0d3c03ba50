"""What is said of a wrong result: where it is worst, what the case is about, what it looks like."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.numerics import compare


@dataclass(frozen=True)
class Finding:
    """One way in which a result is wrong.

    Attributes:
        part: "out", "lse", or what else was compared.
        words: What is wrong, in a line.
        index: Where it is worst; empty if it is no matter of numbers.
        actual: The number there.
        expected: What it should be.
        limit: How far apart both may be.
    """

    part: str
    words: str
    index: tuple[int, ...] = ()
    actual: float = math.nan
    expected: float = math.nan
    limit: float = 0.0

    def __str__(self) -> str:
        """One line."""
        if not self.index:
            return f"{self.part}: {self.words}"
        return (
            f"{self.part}{list(self.index)} is {self.actual:.7g} instead of {self.expected:.7g} "
            f"(they may differ by {self.limit:.2g}); {self.words}"
        )


class Mismatch(AssertionError):
    """The code under test fails a case.

    Attributes:
        case: Name of the case.
        about: What the case is about, and the usual fault behind it.
        findings: What is wrong.
        looks_like: Known faults that would give this very result; often empty.
    """

    def __init__(
        self, case: str, about: str, findings: tuple[Finding, ...], looks_like: tuple[str, ...] = ()
    ) -> None:
        lines = [f"{case} fails", *(f"  {finding}" for finding in findings)]
        lines.append(f"  the case: {about}")
        lines.extend(f"  it looks like this: {fault}" for fault in looks_like)
        super().__init__("\n".join(lines))
        self.case = case
        self.about = about
        self.findings = findings
        self.looks_like = looks_like

    def to_json(self) -> dict[str, Any]:
        """The findings as plain data; floats that JSON cannot hold become strings."""
        findings = [
            {
                name: str(v) if isinstance(v, float) and not math.isfinite(v) else v
                for name, v in asdict(finding).items()
            }
            for finding in self.findings
        ]
        return {"findings": findings, "looks_like": list(self.looks_like)}


def judge(
    part: str, actual: Tensor, expected: Tensor, limit: Shaped[Tensor, "..."]
) -> Finding | None:
    """None if every number is within its limit and NaN and inf stand where they should.

    Args:
        part: Which part of a result this is.
        actual: The tensor under test.
        expected: In float64.
        limit: Largest absolute difference, broadcast over the last dimension where it lacks it.
    """
    if actual.shape != expected.shape:
        return Finding(part, f"is {describe(actual)}, must have shape {list(expected.shape)}")
    if limit.ndim < expected.ndim:
        limit = limit[..., None]
    found = compare(actual, expected)
    a, e = actual.detach().to("cpu", torch.float64), expected.to(torch.float64)
    both = a.isfinite() & e.isfinite()
    excess = torch.where(both, (a - e).abs() - limit, 0.0)
    wrong_pattern = found.nan_mismatches + found.inf_mismatches
    too_far = int((excess > 0).sum())
    if not wrong_pattern and not too_far:
        return None
    index = found.worst_index
    if not wrong_pattern:
        worst = np.unravel_index(int(excess.argmax()), excess.shape)
        index = tuple(int(i) for i in worst)
    counted = [
        f"{found.nan_mismatches} times NaN on one side only" if found.nan_mismatches else "",
        f"{found.inf_mismatches} times inf on one side only" if found.inf_mismatches else "",
        f"{too_far} beyond the limit" if too_far else "",
    ]
    words = f"of {a.numel()} numbers: {', '.join(c for c in counted if c)}"
    allowed = float(limit.expand_as(e)[index])
    return Finding(part, words, index, float(a[index]), float(e[index]), allowed)


def same_bits(part: str, words: str, first: Tensor, second: Tensor) -> Finding | None:
    """None if both are equal bit for bit, NaN and the sign of a zero included."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return Finding(part, f"{words}: {describe(second)} after {describe(first)}")
    a, b = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (first, second))
    differs = (a != b).nonzero().flatten()
    if not differs.numel():
        return None
    place = int(differs[0]) // first.element_size()
    index = tuple(int(i) for i in np.unravel_index(place, first.shape))
    return Finding(part, words, index, float(second[index]), float(first[index]), 0.0)

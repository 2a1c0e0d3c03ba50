"""How far two sets of logits are apart, row by row, and what a few thousand rows say together.

KL(p || q) = sum of p (log p - log q) over the vocabulary, p by the reference and q by what is
tested: how many nats a token costs that is drawn from p and coded by q. For decode against extend,
p is extend, which served verifier batches before. Errors this small are the same both ways to
first order. Everything is float64: in float32, a KL of 1e-9 would be the rounding of its own sum.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mla_ref.checks import require_float, require_size

# Best tokens that are compared as sets.
TOP = 10
# Digits that a report keeps: more than a mean needs.
DIGITS, ROW_DIGITS = 6, 4


@dataclass(frozen=True)
class RowDifference:
    """One row's logits by a reference (p) and by what is tested (q).

    Attributes:
        position: 0 for the last accepted token, i for draft i.
        kl: KL(p || q) in nats; NaN where a logit is not finite.
        same_top1: Whether both have the same best token.
        overlap: Share of the 10 best tokens of p that are among the 10 best of q.
        gap: How far p's best token lies above q's best, in p's logits; 0 where they are the same.
        gap_shift: How far q moves the distance between p's two best tokens: what swaps them.
        identical: Whether all logits are equal bit for bit.
    """

    position: int
    kl: float
    same_top1: bool
    overlap: float
    gap: float
    gap_shift: float
    identical: bool

    @property
    def finite(self) -> bool:
        """Whether every logit of both is a finite number."""
        return not math.isnan(self.kl)


def row_differences(
    reference: Float[Tensor, "rows vocab"],
    tested: Float[Tensor, "rows vocab"],
    positions: Sequence[int],
) -> list[RowDifference]:
    """Compare logits row by row.

    Args:
        reference: p.
        tested: q.
        positions: Of each row in its verifier batch.
    """
    require_float("reference", reference, "rows vocab")
    require_float("tested", tested, "rows vocab")
    for dim, why in enumerate(("as reference", "as reference")):
        require_size("tested", tested, dim, reference.shape[dim], why)
    require_size("reference", reference, 0, len(positions), "one position a row")
    p, q = reference.double(), tested.double()
    finite = _finite(p) & _finite(q)
    kl = _kl(p, q).masked_fill(~finite, torch.nan)
    count = min(TOP, p.shape[1])
    best, other = p.topk(count).indices, q.topk(count).indices
    overlap = (best[:, :, None] == other[:, None]).any(dim=-1).double().mean(dim=-1)
    pair = best[:, :2] if count > 1 else best.expand(-1, 2)
    distance = [x.gather(1, pair).diff(dim=1)[:, 0] for x in (p, q)]
    gap = (p.gather(1, best[:, :1]) - p.gather(1, other[:, :1]))[:, 0]
    columns = (
        kl,
        best[:, 0] == other[:, 0],
        overlap,
        gap,
        (distance[1] - distance[0]).abs(),
        (reference == tested).all(dim=-1),
    )
    return [
        RowDifference(position, *values)
        for position, *values in zip(positions, *(c.tolist() for c in columns), strict=True)
    ]


def _finite(logits: Float[Tensor, "rows vocab"]) -> Bool[Tensor, " rows"]:
    return logits.isfinite().all(dim=-1)


def _kl(p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    log_p, log_q = p.log_softmax(dim=-1), q.log_softmax(dim=-1)
    # sum p (e^d - 1 - d) with d = log q - log p is the same, since sum p (e^d - 1) = 1 - 1. But no
    # term is negative, so nothing cancels: the plain sum has terms of 1e-6 for a result of 1e-12.
    difference = log_q - log_p
    return (log_p.exp() * (difference.expm1() - difference)).sum(dim=-1)


@dataclass(frozen=True)
class Summary:
    """Numbers in five numbers, over those that are finite.

    Attributes:
        count: How many.
        mean: Their mean; NaN without any, as the others.
        median: Half of them are below.
        stdev: Sample deviation, with count - 1 in the denominator; NaN for fewer than two.
        min: The least.
        max: The largest.
    """

    count: int
    mean: float
    median: float
    stdev: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Sum up; NaN is left out, so it must be counted and said elsewhere."""
        found = [value for value in values if not math.isnan(value)]
        if not found:
            return cls(0, *[math.nan] * 5)
        return cls(
            count=len(found),
            mean=math.fsum(found) / len(found),
            median=statistics.median(found),
            stdev=statistics.stdev(found) if len(found) > 1 else math.nan,
            min=min(found),
            max=max(found),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain numbers; None for NaN."""
        return {name: rounded(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class PairStatistics:
    """All rows of one pair.

    Attributes:
        reference: Who gives p.
        tested: Who gives q.
        rows: Every row, in the order of the replay.
    """

    reference: str
    tested: str
    rows: tuple[RowDifference, ...]

    @property
    def name(self) -> str:
        """Such as "extend || decode"."""
        return f"{self.reference} || {self.tested}"

    @property
    def kl(self) -> Summary:
        """Of all rows that are finite."""
        return Summary.of(row.kl for row in self.rows)

    @property
    def kl_by_position(self) -> tuple[Summary, ...]:
        """The same by position in the verifier batch, from 0."""
        last = max((row.position for row in self.rows), default=-1)
        return tuple(
            Summary.of(row.kl for row in self.rows if row.position == position)
            for position in range(last + 1)
        )

    @property
    def not_finite(self) -> tuple[int, ...]:
        """Numbers of the rows in which a logit is NaN or infinite."""
        return tuple(i for i, row in enumerate(self.rows) if not row.finite)

    @property
    def top1_changes(self) -> tuple[int, ...]:
        """Numbers of the finite rows whose best token is another one."""
        return tuple(i for i, row in enumerate(self.rows) if row.finite and not row.same_top1)

    @property
    def overlap(self) -> Summary:
        """Of the 10 best tokens, as a share."""
        return Summary.of(row.overlap for row in self.rows if row.finite)

    @property
    def identical(self) -> bool:
        """Whether all logits of all rows are equal bit for bit."""
        return all(row.identical for row in self.rows)

    @property
    def gap_noise(self) -> float:
        """The most that a distance between the two best tokens of a row was moved."""
        return max((row.gap_shift for row in self.rows if row.finite), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The statistics, and each row's KL."""
        return {
            "reference": self.reference,
            "tested": self.tested,
            "rows": len(self.rows),
            "not_finite": list(self.not_finite),
            "identical": self.identical,
            "kl": self.kl.to_json(),
            "kl_by_position": [summary.to_json() for summary in self.kl_by_position],
            "top1_changes": list(self.top1_changes),
            "top10_overlap": self.overlap.to_json(),
            "gap_noise": rounded(self.gap_noise),
            "kl_of_rows": [rounded(row.kl, ROW_DIGITS) for row in self.rows],
        }


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """A float with so many digits, None if it is NaN or infinite; anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None

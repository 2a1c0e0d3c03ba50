"""The tolerances that the libraries' own tests hold their kernels to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ref.numerics import AttentionResult, compare


@dataclass(frozen=True)
class PeerTolerance:
    """How a library judges its kernel against its reference.

    Attributes:
        source: Which test.
        out_abs: Absolute error of an output.
        out_rel: Relative error of an output.
        either: True: a number passes within out_abs or within out_rel of it. False: the two add up,
            as in `torch.allclose`.
        similarity: Least 2<a, b> / (|a|^2 + |b|^2) over the whole output, or None. It is at most
            the cosine, and unlike it sees a wrong factor.
        lse_abs: Absolute error of the natural LSE; None where the test does not look at it.
        lse_rel: Relative error of it.
    """

    source: str
    out_abs: float
    out_rel: float
    either: bool = False
    similarity: float | None = None
    lse_abs: float | None = None
    lse_rel: float = 0.0

    def violations(self, actual: AttentionResult, expected: AttentionResult) -> tuple[str, ...]:
        """What is not within the tolerance, in words; empty if all is.

        Positions of NaN and of each infinity must be equal.
        """
        found = []
        parts = {"out": (actual.out, expected.out, self.out_abs, self.out_rel)}
        if self.lse_abs is not None:
            parts["lse"] = (actual.lse, expected.lse, self.lse_abs, self.lse_rel)
        for name, (got, wanted, absolute, relative) in parts.items():
            comparison = compare(got, wanted)
            if comparison.nan_mismatches or comparison.inf_mismatches:
                found.append(f"{name}: {comparison}")
            elif outside := self._outside(got, wanted, absolute, relative):
                found.append(f"{name}: {outside} of {got.numel()} numbers outside, {comparison}")
        similarity = _similarity(actual.out, expected.out)
        if self.similarity is not None and similarity < self.similarity:
            found.append(f"out: similarity {similarity:.7f}, at least {self.similarity} wanted")
        return tuple(found)

    def _outside(self, got: Tensor, wanted: Tensor, absolute: float, relative: float) -> int:
        """How many numbers are too far off; both hold the same infinities."""
        got, wanted = got.double(), wanted.double()
        error = torch.where(wanted.isfinite(), got - wanted, 0.0).abs()
        share = torch.where(wanted.isfinite(), relative * wanted.abs(), 0.0)
        limit = share.clamp(min=absolute) if self.either else share + absolute
        return int((error > limit).sum())


def _similarity(a: Tensor, b: Tensor) -> float:
    """2<a, b> / (|a|^2 + |b|^2), 1 for two zeros."""
    a, b = a.double().flatten(), b.double().flatten()
    size = float(a @ a + b @ b)
    return 2 * float(a @ b) / size if size else 1.0

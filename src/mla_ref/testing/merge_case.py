"""Cases of the part "merge": partial results over disjoint keys become one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.numerics import AttentionResult, to_natural_lse
from mla_ref.numerics.precision import ulp
from mla_ref.platform import synchronize
from mla_ref.testing.adapter import Adapter
from mla_ref.testing.case import Case
from mla_ref.testing.verdict import Finding, judge, same_bits

FOREIGN = {"2": 1 / math.log(2.0), "e": 1.0}


@dataclass(frozen=True, kw_only=True)
class MergeCase(Case):
    """One call of merge: outs [parts, rows, heads, 512] and lses [parts, rows, heads].

    Attributes:
        parts: Partial results.
        rows: Query rows.
        heads: Heads.
        empty: "none"; "some" (-inf in the LSE and NaN in the output of a few parts), "all but one"
            (the other part must come back bit for bit) or "all".
        lse_size: Standard deviation of the LSEs.
        lse_offset: Added to all of them.
    """

    kind: str = "merge"
    parts: int = 4
    rows: int = 3
    heads: int = 8
    empty: str = "none"
    lse_size: float = 2.0
    lse_offset: float = 0.0

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Outputs and natural LSEs of the parts."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.parts, self.rows, self.heads)
        outs = torch.randn(*shape, 512, generator=generator)
        lses = torch.randn(shape, generator=generator) * self.lse_size + self.lse_offset
        gone = torch.zeros(shape, dtype=torch.bool)
        if self.empty == "some":
            gone = torch.rand(shape, generator=generator) < 0.4
            gone[:, 0] = True
        elif self.empty == "all but one":
            gone[:] = True
            gone[self.parts // 2] = False
        elif self.empty == "all":
            gone[:] = True
        outs[gone], lses[gone] = math.nan, -math.inf
        return {"outs": outs.to(device), "lses": lses.to(device)}

    def expect(self) -> AttentionResult:
        """The mean of the outputs with weights exp(lse), and the log of the sum of those."""
        outs, lses = self.build().values()
        lse = torch.logsumexp(lses.double(), dim=0)
        present = lses > -math.inf
        share = torch.where(present, torch.exp(lses.double() - lse), 0.0)[..., None]
        return AttentionResult(
            (torch.where(present[..., None], outs.double(), 0.0) * share).sum(dim=0), lse
        )

    def tolerance(self, maths: str = "float32") -> AttentionResult:
        """What float32 loses: in each LSE one ulp, and so in each weight; a sum over the parts.

        An LSE of 1e4 has an ulp of 1e-3, and a weight exp(lse - max) that is exact nevertheless:
        the difference of two float32 numbers of like size is.
        """
        outs, expected = self.build()["outs"], self.expect()
        finite = torch.where(expected.lse.isfinite(), expected.lse, 0.0)
        # A base-2 library rounds the LSE once more on its way in and out.
        near = ulp(finite, torch.float32)
        largest = torch.where(outs.isfinite(), outs, 0.0).abs().amax(dim=(0, -1)).double()
        return AttentionResult((2**-20 + 2 * near) * largest, 4 * near + 1e-6)

    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        arguments = self.build(device)
        lses = arguments["lses"] * FOREIGN[adapter.lse_base]
        if adapter.empty_lse == "+inf":
            lses = torch.where(lses == -math.inf, math.inf, lses)
        returned = function(arguments["outs"], lses)
        synchronize(device)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            return (Finding("result", "merge must return the pair (out, lse)"),), ()
        out, lse = returned
        lse = to_natural_lse(lse, base=adapter.lse_base, empty=adapter.empty_lse)
        expected, limits = self.expect(), self.tolerance()
        found = [
            judge("out", out, expected.out, limits.out),
            judge("lse", lse, expected.lse, limits.lse),
        ]
        if self.empty == "all but one" and not any(found):
            words = "merging with nothing has changed the bits"
            found.append(same_bits("out", words, self.build()["outs"][self.parts // 2], out))
        findings = tuple(f for f in found if f)
        return findings, tuple(_guesses(self, out, limits)) if findings else ()


def _guesses(case: MergeCase, out: Tensor, limits: AttentionResult) -> list[str]:
    """Known faults that would give this output."""
    outs, lses = (x.double() for x in case.build().values())
    clean = torch.where((lses > -math.inf)[..., None], outs, 0.0)

    def mean(weights: Tensor) -> Tensor:
        return (clean * weights[..., None]).sum(dim=0)

    guesses = {
        "the weights of the parts are swapped": mean(torch.softmax(lses, 0).flip(0)),
        "natural LSEs are read as base 2": mean(torch.softmax(lses * math.log(2.0), 0)),
        "base-2 LSEs are read as natural": mean(torch.softmax(lses / math.log(2.0), 0)),
        "the parts are averaged without weights": clean.mean(dim=0),
        "the parts are added without weights": clean.sum(dim=0),
    }
    if case.empty == "all":
        guesses = {}
    right = case.expect().out
    found = [
        words
        for words, guess in guesses.items()
        if judge("out", out, guess, 4 * limits.out) is None
        and judge("out", guess, right, 4 * limits.out) is not None
    ]
    if bool(out.isnan().any()) and case.empty == "none":
        found.append("exp of the LSEs overflows, or all of them give 0: take the maximum off first")
    elif bool(out.isnan().any()):
        found.append("0 * NaN of a part that is empty, or -inf minus -inf where all are")
    return found

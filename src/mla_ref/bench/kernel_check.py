"""The check of a timed kernel: float64 on a sample of its rows, at the very shape that is timed.

All rows of a large call in float64 would take longer than the measurement: 256 rows of 128 heads
are 146 GFLOP. A sample is judged, the first and the last row among them, and every report says how
many rows that were. Positions of NaN and inf come first, then each number by the precision rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mla_ref.backends.served import PeerTolerance
from mla_ref.bench.gate import Verdict
from mla_ref.bench.kernel_workload import SOFTMAX_SCALE, KernelWorkload
from mla_ref.checks import require_count
from mla_ref.numerics import AttentionResult, Comparison, compare
from mla_ref.testing.definition import attend, gather
from mla_ref.testing.tolerance import attention_limits
from mla_ref.testing.verdict import judge

SAMPLE = 4
Read = Callable[[Any], tuple[Tensor, Tensor | None]]
"""Takes (out, natural LSE) from what a kernel returned; None where it returns no LSE."""


def as_it_is(result: Any) -> tuple[Tensor, Tensor | None]:
    """A result that is the pair already."""
    out, lse = result
    return out, lse


@dataclass(frozen=True)
class SampleVerdict:
    """What was found in one part of a sample of rows.

    Attributes:
        what: "out" or "lse".
        rows: Rows that were compared.
        of: Rows of the call.
        comparison: Against float64.
        rule: What the part was held to.
        fault: What is wrong; empty if it passed.
    """

    what: str
    rows: int
    of: int
    comparison: Comparison
    rule: str
    fault: str

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.fault

    def __str__(self) -> str:
        """One line for a terminal or an error message."""
        return self.fault or (
            f"{self.what} of {self.rows} of {self.of} rows keeps {self.rule} ({self.comparison})"
        )


class KernelCheck:
    """The oracle's answer for a sample of a workload's rows, computed once.

    Args:
        workload: The call.
        sample: Rows that are judged at most, spread evenly from the first to the last.
    """

    def __init__(self, workload: KernelWorkload, sample: int = SAMPLE) -> None:
        rows = workload.shape.rows
        count = min(require_count("sample", sample, at_least=1), rows)
        self._of = rows
        self.rows = torch.linspace(0, rows - 1, count).round().long().unique()
        self._arguments = _sampled(workload, self.rows)

    @cached_property
    def _numbers(self) -> list[Tensor]:
        return gather(self._arguments)

    @cached_property
    def expected(self) -> AttentionResult:
        """The sample's result in float64."""
        return attend(self._arguments, self._numbers)

    def by_precision_rule(
        self, maths: str = "float32", read: Read = as_it_is
    ) -> Callable[[Any], Sequence[Verdict]]:
        """Twice the error of the same maths in torch plus one ulp, for each row and head.

        Args:
            maths: As in `mla_ref.testing.Adapter`.
            read: Takes the parts from a result.
        """
        expected = self.expected
        limits = attention_limits(
            self._arguments,
            self._numbers,
            expected,
            expected,
            maths=maths,
            out_dtype=self._arguments["q"].dtype,
        )
        rule = f"the precision rule in {maths}"

        def check(result: Any) -> Sequence[Verdict]:
            found = self._taken(read(result))
            verdicts = []
            for part in ("out", "lse"):
                if part in found:
                    fault = judge(part, found[part], getattr(expected, part), getattr(limits, part))
                    verdicts.append(self._verdict(part, found[part], rule, str(fault or "")))
            return verdicts

        return check

    def by_tolerance(
        self, tolerance: PeerTolerance, read: Read = as_it_is
    ) -> Callable[[Any], Sequence[Verdict]]:
        """The tolerance of a library's own tests.

        Args:
            tolerance: Which.
            read: Takes the parts from a result.
        """
        rule = f"the tolerance of {tolerance.source}"

        def check(result: Any) -> Sequence[Verdict]:
            found = self._taken(read(result))
            lse = found.get("lse", self.expected.lse)  # what is not returned is not judged
            faults = tolerance.violations(AttentionResult(found["out"], lse), self.expected)
            return [
                self._verdict(
                    part, found[part], rule, "; ".join(f for f in faults if f.startswith(part))
                )
                for part in found
            ]

        return check

    def _taken(self, parts: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
        """The sample's rows of (out, lse) on the CPU; an LSE of None is left out."""
        out, lse = parts
        found = {"out": out[self.rows.to(out.device)].cpu()}
        if lse is not None:
            found["lse"] = lse[self.rows.to(lse.device)].cpu()
        return found

    def _verdict(self, part: str, actual: Tensor, rule: str, fault: str) -> SampleVerdict:
        comparison = compare(actual, getattr(self.expected, part))
        return SampleVerdict(part, len(self.rows), self._of, comparison, rule, fault)


def _sampled(workload: KernelWorkload, rows: Tensor) -> dict[str, Any]:
    """The sample as a call of its own, over a cache of the rows that it names, on the CPU."""
    there = rows.to(workload.indices.device)
    indices = workload.indices[there]
    slots, places = indices.unique(return_inverse=True)
    # -1 stays: it names none of the rows.
    places = torch.where(indices < 0, -1, places)
    return {
        "q": workload.q[there].cpu(),
        "kv_cache": workload.kv_cache.flatten(0, 1)[slots.clamp(min=0).long()].cpu()[:, None],
        "indices": places.to(torch.int32).cpu(),
        "counts": None,
        "softmax_scale": SOFTMAX_SCALE,
    }

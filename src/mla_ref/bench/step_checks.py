"""Checks of the parts of a step: lists exactly, scores and merges against float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_ref.bench.gate import Agreement, Verdict
from mla_ref.indexer import index_scores
from mla_ref.numerics import AttentionResult, compare, merge_many

if TYPE_CHECKING:
    from mla_ref.bench.kernel_step import StepBatch

# float32 sums of 128 products and 64 heads, in any order.
SCORES_REL_L2 = 1e-5
# float32, with a GPU's quick exponentials.
MERGE_REL_L2, MERGE_MAX_ABS = 1e-5, 1e-4


@dataclass(frozen=True)
class ExactVerdict:
    """Whether integers are all equal.

    Attributes:
        what: The part.
        numbers: How many there are.
        different: How many differ.
    """

    what: str
    numbers: int
    different: int

    @property
    def passed(self) -> bool:
        """Whether none differs."""
        return self.different == 0

    def __str__(self) -> str:
        """One line for a terminal or an error message."""
        return f"{self.what}: {self.different} of {self.numbers} numbers differ from the twin's"


def exactly(what: str, expected: Tensor) -> Callable[[Any], Sequence[Verdict]]:
    """A check for a part whose result is defined number by number."""

    def check(result: Any) -> Sequence[Verdict]:
        if result.shape != expected.shape:
            raise ValueError(f"shape {list(result.shape)}, expected {list(expected.shape)}")
        return [ExactVerdict(what, expected.numel(), int((result != expected).sum()))]

    return check


def scores_like(batch: "StepBatch") -> Callable[[Any], Sequence[Verdict]]:
    """The first and the last row's scores, against float64, as far as the row may see."""
    rows = torch.tensor([0, batch.shape.rows - 1]).unique()
    requests = rows // batch.shape.rows_per_request
    expected = torch.cat(
        [
            index_scores(
                batch.index_q[row][None].cpu().double(),
                batch.index_k[request].cpu().double(),
                batch.weights[row][None].cpu().double(),
            )
            for row, request in zip(rows, requests, strict=True)
        ]
    )
    visible = torch.arange(batch.shape.context) < batch.visible_lens.cpu()[rows][:, None]

    def check(result: Any) -> Sequence[Verdict]:
        actual = result[rows.to(result.device)].cpu()
        comparison = compare(actual[visible], expected[visible])
        return [Agreement("scores", comparison, SCORES_REL_L2, float(expected.abs().max()))]

    return check


def merged_like(partials: AttentionResult) -> Callable[[Any], Sequence[Verdict]]:
    """All of a merge, against float64."""
    expected = merge_many(partials.out.double(), partials.lse.double())

    def check(result: Any) -> Sequence[Verdict]:
        out, lse = result
        return [
            Agreement("out", compare(out, expected.out), MERGE_REL_L2, MERGE_MAX_ABS),
            Agreement("lse", compare(lse, expected.lse), MERGE_REL_L2, MERGE_MAX_ABS),
        ]

    return check

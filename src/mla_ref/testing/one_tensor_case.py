"""What cases of the indexer's parts share: positional arguments in, one tensor out."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.platform import synchronize
from mla_ref.testing.adapter import Adapter
from mla_ref.testing.case import Case
from mla_ref.testing.verdict import Finding, judge

# What a part's result is called in a report.
NAMES = {"convert": "slots", "index_scores": "scores", "topk": "positions"}


@dataclass(frozen=True, kw_only=True)
class OneTensorCase(Case):
    """A function of positional arguments that returns one tensor."""

    def tolerance(self, maths: str = "float32") -> Tensor | None:
        """None: integers are exact."""
        return None

    def guesses(self) -> dict[str, Tensor]:
        """What known faults would give."""
        return {}

    @abstractmethod
    def expect(self) -> Tensor:
        """The right result."""

    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        actual = function(*self.build(device).values())
        synchronize(device)
        expected, limit = self.expect(), self.tolerance(adapter.maths)
        part = NAMES[self.kind]
        if not isinstance(actual, Tensor) or actual.is_floating_point() != (limit is not None):
            kind = "floating-point" if limit is not None else "integer"
            words = f"the function must return a tensor of {kind} numbers, got {describe(actual)}"
            return (Finding(part, words),), ()
        guesses = self.guesses()
        if self.kind == "topk" and adapter.topk_order == "any":
            actual, expected = (x.sort(dim=1).values for x in (actual.cpu(), expected))
            guesses = {words: g.sort(dim=1).values for words, g in guesses.items()}
        limit = torch.zeros(expected.shape) if limit is None else limit
        finding = judge(part, actual, expected, limit)
        if finding is None:
            return (), ()
        same = [w for w, g in guesses.items() if judge(part, actual, g, limit) is None]
        return (finding,), tuple(same)

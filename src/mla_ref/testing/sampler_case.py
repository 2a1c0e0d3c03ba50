"""Cases of the part "sampler": drafts are judged, and a token more is drawn for each request."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mla_ref.platform import synchronize
from mla_ref.speculative import Verified
from mla_ref.testing.adapter import Adapter
from mla_ref.testing.case import Case
from mla_ref.testing.verdict import Finding, judge

# What a row draws from, by what was wrong with its draft: given p, q and the draft's place.
Weights = Callable[[list[float], list[float], int], list[float]]


@dataclass(frozen=True, kw_only=True)
class SamplerCase(Case):
    """One step of the rejection rule on a batch of requests; exact integers.

    Attributes:
        lens: Rows of each request: its drafts and one more; 0 for padding.
        padding: Rows behind the last request.
        vocab: Tokens.
        sampled: Whether drafts were sampled from a law q, or chosen.
        uniform: None: random; else the number that every draft is judged by. 1e-300 keeps all that
            q can have drawn, 1.0 those alone of which p has as much as q.
        wrong: "none"; "p" (NaN, inf and negative numbers in p), "q" (a row of q that is no law),
            "equal" (q is p but for rounding, so a
            rejected draft leaves nothing), "ties" (all laws are flat and all
            draws equal) or "ids" (drafts outside the vocabulary).
    """

    kind: str = "sampler"
    lens: tuple[int, ...] = (1, 4, 0, 3)
    padding: int = 1
    vocab: int = 11
    sampled: bool = False
    uniform: float | None = None
    wrong: str = "none"

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of `mla_ref.speculative.rejection_sample`."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = sum(self.lens) + self.padding
        shape = (rows, self.vocab)

        def law() -> Tensor:
            flat = self.wrong == "ties"
            scores = torch.zeros(shape) if flat else torch.randn(shape, generator=generator) * 3
            return scores.softmax(dim=1)

        p, q = law(), law()
        exponential = torch.empty(shape).exponential_(generator=generator)
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator).clamp(min=1e-9)
        drafts = torch.randint(self.vocab, (rows,), generator=generator)
        if self.uniform is not None:
            uniform.fill_(self.uniform)
        if self.wrong == "p":
            p[:, 0], p[:, -1], p[1::2, 1] = math.nan, math.inf, -1.0
        elif self.wrong == "q":
            q[1::2, -1], q[::2, 0] = math.nan, -0.5
        elif self.wrong == "equal":
            q = p * (1 + 2**-20)
        elif self.wrong == "ties":
            exponential.fill_(1.0)
        elif self.wrong == "ids":
            drafts[::2], drafts[1::2] = self.vocab, -(2**40)
        return {
            "target_probs": p.to(device),
            "query_start_loc": torch.tensor([0, *accumulate(self.lens)]).to(device),
            "draft_ids": drafts.to(device),
            "draft_probs": q.to(device) if self.sampled else None,
            "uniform": uniform.to(device),
            "exponential": exponential.to(device),
            "max_drafts": max(self.lens, default=1) - 1,
        }

    def expect(self) -> Verified:
        """Token by token."""
        return self._walk(_residual)

    def tolerance(self, maths: str = "float32") -> Verified:
        """Integers are exact."""
        return Verified(*(torch.zeros(x.shape) for x in self.expect()))

    def _walk(self, rest: Weights) -> Verified:
        made = self.build()
        p, e = made["target_probs"].tolist(), made["exponential"].tolist()
        q = made["draft_probs"].tolist() if self.sampled else None
        drafts, uniform = made["draft_ids"].tolist(), made["uniform"].tolist()
        tokens = torch.full((len(self.lens), made["max_drafts"] + 1), -1)
        kept = torch.zeros(len(self.lens), dtype=torch.int64)
        for r, (start, end) in enumerate(pairwise(made["query_start_loc"].tolist())):
            for row in range(start, end):
                law = [x if 0 < x < math.inf else 0.0 for x in p[row]]
                x = drafts[row] if row < end - 1 and 0 <= drafts[row] < self.vocab else None
                if x is None:
                    tokens[r, row - start] = _first(law, e[row])
                    break
                hot = [float(v == x) for v in range(self.vocab)]
                drawn_from = hot if q is None else q[row]
                lawful = all(0 <= y < math.inf for y in drawn_from)
                if lawful and drawn_from[x] > 0 and law[x] / drawn_from[x] >= uniform[row]:
                    tokens[r, row - start] = x
                    kept[r] += 1
                    continue
                left = rest(law, drawn_from, x) if lawful else law
                tokens[r, row - start] = _first(left if any(left) else law, e[row])
                break
        return Verified(tokens, kept)

    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        returned = function(*self.build(device).values())
        synchronize(device)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            words = "sampler must return the pair (token_ids, num_accepted)"
            return (Finding("result", words),), ()
        found = _findings(returned, self.expect())
        if not found:
            return (), ()
        guesses = {
            "a rejected draft's token is drawn from p, not from what q covers too little": _plain,
            "the residual is taken at the draft alone, not over the vocabulary": _at_the_draft,
        }
        same = [w for w, rest in guesses.items() if not _findings(returned, self._walk(rest))]
        return found, tuple(same)


def _first(weights: list[float], exponential: list[float]) -> int:
    """Who wins the race: the highest weight / E, the lower token of equal ones."""
    times = [w / e if w > 0 else -1.0 for w, e in zip(weights, exponential, strict=True)]
    return times.index(max(times))


def _residual(p: list[float], q: list[float], draft: int) -> list[float]:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def _plain(p: list[float], q: list[float], draft: int) -> list[float]:
    return p


def _at_the_draft(p: list[float], q: list[float], draft: int) -> list[float]:
    return [max(a - b, 0.0) if v == draft else a for v, (a, b) in enumerate(zip(p, q, strict=True))]


def _findings(returned: Any, expected: Verified) -> tuple[Finding, ...]:
    pairs = zip(Verified._fields, returned, expected, strict=True)
    found = [judge(name, made, right, torch.zeros(right.shape)) for name, made, right in pairs]
    return tuple(f for f in found if f)

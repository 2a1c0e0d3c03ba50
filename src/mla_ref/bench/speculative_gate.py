"""The gate of speculative decoding: the same tokens as plain decoding, or a tie.

A step of four rows and a step of one add the same numbers in another order, so their logits differ
in the last digits of float32. Where plain decoding's two best tokens lie closer together than that,
either may come out on top, and the texts go apart for good without anybody being wrong. Every
other difference is an error of whoever accepted a draft.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.batching import ServingLimits, Step
from mla_ref.bench.speculative_run import PAGE_SIZE
from mla_ref.cache import pages_needed
from mla_ref.engine import first_difference
from mla_ref.models.language_model import LanguageModel

# Largest distance of two logits that counts as a tie.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """Where a text first departs from that of plain decoding. As a `Verdict` it passes as a tie.

    Attributes:
        place: How many tokens are the same.
        plain_id: Token of plain decoding there; None if it had ended.
        other_id: Token of the other; None if it had ended.
        top2_gap: Distance of the two highest logits of plain decoding there.
        gap: How far the lower of the two tokens lies below the highest logit: the top-2 gap where
            the two are the best two, and more where one of them is not.
    """

    place: int
    plain_id: int | None
    other_id: int | None
    top2_gap: float
    gap: float

    @property
    def passed(self) -> bool:
        """Whether rounding alone can have made the difference."""
        return self.gap < NEAR_TIE

    def __str__(self) -> str:
        """One line."""
        ids = ["the end" if i is None else str(i) for i in (self.plain_id, self.other_id)]
        return (
            f"token {self.place} is {ids[1]} and not {ids[0]}, whose logits in plain decoding are "
            f"{self.gap:.1e} apart (top-2 gap {self.top2_gap:.1e}; a tie is less than "
            f"{NEAR_TIE:.0e})"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data; None for a gap that there is not."""
        fields = asdict(self) | {"passed": self.passed}
        return {k: None if v == torch.inf else v for k, v in fields.items()}


@dataclass(frozen=True)
class SameTokens:
    """The verdict where there is no difference.

    Attributes:
        count: Tokens that were compared.
    """

    count: int

    @property
    def passed(self) -> bool:
        """True: a difference is a `Difference`."""
        return True

    def __str__(self) -> str:
        """One line."""
        return f"all {self.count} tokens are the same"


@torch.inference_mode()
def compare_tokens(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
) -> SameTokens | Difference:
    """Look for the first difference and weigh it by the plain logits there.

    Args:
        model: The model.
        prompt_ids: What both continue.
        plain: Tokens of plain decoding.
        other: Tokens of whom is judged.
    """
    place = first_difference(plain, other)
    if place is None:
        return SameTokens(len(plain))
    logits = logits_after(model, [*prompt_ids, *plain[:place]])
    best = logits.topk(2).values.tolist()
    if place == min(len(plain), len(other)):
        # One has stopped and the other has not, after the same tokens: no rounding does that.
        ids = [tokens[place] if place < len(tokens) else None for tokens in (plain, other)]
        return Difference(place, ids[0], ids[1], best[0] - best[1], torch.inf)
    lower = min(float(logits[plain[place]]), float(logits[other[place]]))
    return Difference(place, plain[place], other[place], best[0] - best[1], best[0] - lower)


@torch.inference_mode()
def logits_after(
    model: LanguageModel, token_ids: Sequence[int], *, chunk: int | None = None
) -> Float[Tensor, " vocab"]:
    """Logits of what follows a text, with a cache of its own.

    Args:
        model: The model.
        token_ids: The text, one token at least.
        chunk: Tokens that run in one step; None: all of them.
    """
    chunk = len(token_ids) if chunk is None else chunk
    pages = pages_needed(len(token_ids), PAGE_SIZE)
    cache = model.new_cache(pages, PAGE_SIZE, limits=ServingLimits(1, chunk, 0))
    for first in range(0, len(token_ids), chunk):
        new = torch.tensor(token_ids[first : first + chunk], device=model.device)
        step = Step.one_request(first, len(new), PAGE_SIZE).to(model.device)
        hidden = model.forward(new, step, cache)
    return model.logits(hidden[-1:])[0]

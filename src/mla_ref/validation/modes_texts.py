"""Greedy texts, written by the engine, and what it took; and where two ways of writing go apart."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_ref.bench.speculative_gate import (
    NEAR_TIE,
    Difference,
    compare_tokens,
    logits_after,
)
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.engine import Engine, Request
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import AcceptanceStats, Drafter
from mla_ref.validation.measure import rounded

PAGE_SIZE = 64
# New tokens of a step at most: a longer prompt runs in chunks.
MAX_TOKENS = 256
# Tokens a step of the second opinion on a text: another sum order in every matrix product.
NOISE_CHUNK = 16
# Standard deviations of rounding within which the distance of two logits counts as none.
NOISE_FACTOR = 3.0


@dataclass(frozen=True)
class Texts:
    """What one way of running the model has written.

    Attributes:
        name: Of the way.
        token_ids: By prompt.
        acceptance: Drafts that were accepted.
        routes: How many steps with drafts each kernel took, "decode", "extend" or "mixed".
        steps: Steps of the model.
    """

    name: str
    token_ids: Mapping[str, tuple[int, ...]]
    acceptance: AcceptanceStats
    routes: Mapping[str, int]
    steps: int

    def to_json(self) -> dict[str, Any]:
        """As plain data, from which `from_json` makes it again."""
        counts = sorted(self.acceptance.counts.items())
        return {
            "name": self.name,
            "token_ids": {name: list(ids) for name, ids in self.token_ids.items()},
            "drafts": [[drafted, accepted, times] for (drafted, accepted), times in counts],
            "routes": dict(sorted(self.routes.items())),
            "steps": self.steps,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Texts":
        """What `to_json` gave, after a way through a file."""
        return cls(
            name=data["name"],
            token_ids={name: tuple(ids) for name, ids in data["token_ids"].items()},
            acceptance=AcceptanceStats(
                Counter({(drafted, accepted): n for drafted, accepted, n in data["drafts"]})
            ),
            routes=data["routes"],
            steps=data["steps"],
        )


def write_texts(
    name: str,
    model: LanguageModel,
    prompts: Mapping[str, Sequence[int]],
    *,
    tokens: int,
    drafter: Drafter | None = None,
    num_drafts: int = 0,
    mode: str = "auto",
    cache_dtype: torch.dtype | None = None,
    page_size: int = PAGE_SIZE,
) -> Texts:
    """Continue every prompt greedily, one after the other, so that no step mixes two of them.

    A verifier beside a chunk of a prompt would go to extend in every mode (vllm#273 of
    local-inference-lab), and the modes would not differ.

    Args:
        name: Of this way.
        model: The model.
        prompts: Tokens by name.
        tokens: Tokens to write for each; an end token does not end it.
        drafter: Who proposes; None: plain decoding.
        num_drafts: Drafts a step; 0 without a drafter.
        mode: Where verifier batches go.
        cache_dtype: What the cache stores; None: the model's choice.
        page_size: Tokens a page of the scheduler.

    Raises:
        ValueError: There is no prompt, a number is out of range, or a prompt is too long.
    """
    if not prompts:
        raise ValueError("prompts must hold a prompt at least, got none")
    require_count("tokens", tokens, at_least=1)
    longest = max(map(len, prompts.values()))
    engine = Engine(
        model,
        drafter=drafter,
        num_drafts=num_drafts,
        mode=mode,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_TOKENS,
        num_pages=pages_needed(longest + tokens, page_size),
        page_size=page_size,
        cache_dtype=cache_dtype,
    )
    states = engine.run(Request(key, tuple(ids), tokens) for key, ids in prompts.items())
    drafted = [record for record in engine.timeline if record.num_drafts]
    return Texts(
        name=name,
        token_ids={state.request.request_id: tuple(state.output_ids) for state in states},
        acceptance=engine.acceptance,
        routes=Counter(record.route or "one kernel" for record in drafted),
        steps=len(engine.timeline),
    )


@dataclass(frozen=True)
class Departure:
    """Where one way's text leaves that of another, and whether rounding explains it.

    Only the first difference of a text is weighed: behind it the two continue different texts.

    Attributes:
        way: Whose text.
        prompt: Of which prompt.
        difference: The place and the two tokens, with the gap of their logits.
        noise: Standard deviation, over the vocabulary, of how far the distance of two logits moves
            when the same text is run in other chunks, by one kernel and without drafts. With an FP8
            cache it is large: where a last digit decides how a number is rounded to 8 bits, each
            layer passes a whole step on.
    """

    way: str
    prompt: str
    difference: Difference
    noise: float

    @property
    def limit(self) -> float:
        """The gap below which two logits count as tied here."""
        return max(NEAR_TIE, NOISE_FACTOR * self.noise)

    @property
    def tie(self) -> bool:
        """Whether rounding alone can have made the difference."""
        return self.difference.gap < self.limit

    def __str__(self) -> str:
        """One line."""
        found = self.difference
        ids = ["the end" if i is None else str(i) for i in (found.other_id, found.plain_id)]
        return (
            f"{self.way}, {self.prompt!r}, token {found.place}: {ids[0]} and not {ids[1]}; top-2 "
            f"gap {found.top2_gap:.1e}, logits of the two {found.gap:.1e} below the best at most, "
            f"noise {self.noise:.1e}: {'a near tie' if self.tie else 'NO TIE'}"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found = self.difference
        return {
            "way": self.way,
            "prompt": self.prompt,
            "place": found.place,
            "plain_id": found.plain_id,
            "other_id": found.other_id,
            "top2_gap": rounded(found.top2_gap),
            "gap": rounded(found.gap),
            "noise": rounded(self.noise),
            "limit": rounded(self.limit),
            "tie": self.tie,
        }


def departures(
    model: LanguageModel, prompts: Mapping[str, Sequence[int]], plain_texts: Texts, other: Texts
) -> list[Departure]:
    """Every prompt whose text differs, each weighed by the model's own logits there.

    Args:
        model: Who is asked for the logits, on one rank.
        prompts: What both continue.
        plain_texts: Written first, without what is judged.
        other: Who is judged.
    """
    found = []
    for name, ids in prompts.items():
        ours = plain_texts.token_ids[name]
        verdict = compare_tokens(model, ids, ours, other.token_ids[name])
        if isinstance(verdict, Difference):
            text = [*ids, *ours[: verdict.place]]
            found.append(Departure(other.name, name, verdict, rounding_noise(model, text)))
    return found


def rounding_noise(model: LanguageModel, text: Sequence[int]) -> float:
    """How far rounding alone moves the distance of two logits of what follows a text.

    The text runs once in one step and once in many. A shift that all logits have in common moves no
    distance; two independent ones move theirs by the square root of 2.
    """
    moved = logits_after(model, text, chunk=NOISE_CHUNK).double() - logits_after(model, text)
    return math.sqrt(2) * float(moved.std())

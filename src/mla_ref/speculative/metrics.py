"""How well drafts are accepted, in the numbers that vLLM reports.

A draft is one proposal of one request in one step, of one token or several. A step in which a
request had no draft says nothing about the drafter and is not counted.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from mla_ref.checks import require_count


@dataclass
class AcceptanceStats:
    """Counts over many drafts; `add` one at a time, `+` joins two.

    Attributes:
        counts: How many drafts had (tokens drafted, tokens accepted).
    """

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one request's step; accepted is without the bonus or recovered token.

        Raises:
            ValueError: More were accepted than drafted, or a number is negative.
        """
        require_count("drafted", drafted)
        if require_count("accepted", accepted) > drafted:
            raise ValueError(f"accepted must be at most drafted, {drafted}, got {accepted}")
        if drafted:
            self.counts[drafted, accepted] += 1

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        return AcceptanceStats(self.counts + other.counts)

    @property
    def num_drafts(self) -> int:
        """Drafts, whatever their length."""
        return self.counts.total()

    @property
    def num_drafted(self) -> int:
        """Tokens drafted."""
        return sum(drafted * n for (drafted, _), n in self.counts.items())

    @property
    def num_accepted(self) -> int:
        """Tokens accepted."""
        return sum(accepted * n for (_, accepted), n in self.counts.items())

    @property
    def acceptance_rate(self) -> float:
        """Tokens accepted over tokens drafted; NaN before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with a draft puts out: 1 + accepted / drafts; NaN before the first.

        Exactly 1.0 over a long run is a smell: the drafter is never right, or is not asked
        (TensorRT-LLM#18662).
        """
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else math.nan

    @property
    def histogram(self) -> tuple[int, ...]:
        """Drafts with 0, 1, 2, ... accepted tokens, up to the longest draft."""
        longest = max((drafted for drafted, _ in self.counts), default=-1)
        result = [0] * (longest + 1)
        for (_, accepted), n in self.counts.items():
            result[accepted] += n
        return tuple(result)

    @property
    def per_position_rates(self) -> tuple[float, ...]:
        """Of all drafts, the share whose token 0, 1, 2, ... was accepted; it never rises.

        A draft too short to have the token counts as one that was not accepted, as in vLLM.
        """
        histogram = self.histogram
        return tuple(
            sum(histogram[place + 1 :]) / self.num_drafts for place in range(len(histogram) - 1)
        )

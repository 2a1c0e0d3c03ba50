"""Acceptance beside that of the original, with an interval; and what such a sample can say.

The pull request that made decode the default (local-inference-lab/vllm#164) gave acceptance of
three runs under context parallelism: 66 of 93 drafts, 66 of 93 and 67 of 90, at MTP3. It claimed
nothing from them, and rightly: the interval of each holds the others.
"""

import math
from dataclasses import dataclass
from typing import Any

from mla_ref.checks import require_count
from mla_ref.speculative import AcceptanceStats
from mla_ref.validation.measure import rounded

# Of the standard normal law: 95% lie within.
Z_95 = 1.959963984540054


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share (J. Am. Stat. Assoc. 22 (1927), 209-212).

    The shares p from which the share that was seen is no more than z standard errors of p away. It
    stays within 0 and 1 and has a width at 0 and at all, where the simpler formula has none.

    Args:
        successes: How many.
        trials: Of how many, 1 at least.
        z: Standard errors; the default is for 95%.

    Raises:
        ValueError: There is no trial, or more successes than trials.
    """
    require_count("trials", trials, at_least=1)
    if require_count("successes", successes) > trials:
        raise ValueError(f"successes must be at most trials, {trials}, got {successes}")
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    # At both ends the exact limit is 0 or 1, and rounding would miss it by a digit.
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


@dataclass(frozen=True)
class Acceptance:
    """How many drafts of a run were accepted.

    Attributes:
        name: Of the run.
        accepted: Tokens accepted.
        drafted: Tokens drafted.
        drafts: Drafts, each of one request in one step.
    """

    name: str
    accepted: int
    drafted: int
    drafts: int

    @classmethod
    def of(cls, name: str, stats: AcceptanceStats) -> "Acceptance":
        """From an engine's counts."""
        return cls(name, stats.num_accepted, stats.num_drafted, stats.num_drafts)

    @property
    def rate(self) -> float:
        """Accepted over drafted; NaN where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, at 95%; all of 0 to 1 where nothing was drafted."""
        return wilson_interval(self.accepted, self.drafted) if self.drafted else (0.0, 1.0)

    @property
    def mean_length(self) -> float:
        """Tokens that a step with a draft gives: 1 + accepted / drafts; NaN without one."""
        return 1 + self.accepted / self.drafts if self.drafts else math.nan

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "accepted": self.accepted,
            "drafted": self.drafted,
            "drafts": self.drafts,
            "rate": rounded(self.rate),
            "wilson_95": [rounded(end) for end in self.interval],
            "mean_acceptance_length": rounded(self.mean_length),
        }


# At MTP3 a draft is three tokens. The counts are the original's, the rest follows from them.
ORIGINAL = tuple(
    Acceptance(f"vllm#164, run {number}", accepted, drafted, drafted // 3)
    for number, (accepted, drafted) in enumerate(((66, 93), (66, 93), (67, 90)), 1)
)


def what_it_says(found: Acceptance) -> str:
    """What a sample of this size can show, and what not."""
    if not found.drafted:
        return "Nothing was drafted, so acceptance says nothing."
    low, high = found.interval
    return (
        f"{found.drafted} drafted tokens leave {low:.0%} to {high:.0%} at 95%: enough to see a "
        "fault that rejects most drafts, too few to tell apart two ways that differ by less than "
        f"about {100 * (high - low) / 2:.0f} points. The tokens of one draft stand or fall "
        "together, so the true interval is wider still."
    )

"""What the runs of all prompts say together: one `Gain` a drafter, and a sentence."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

from mla_ref.bench.gate import non_finite_as_text
from mla_ref.bench.speculative import SpeculativeRow
from mla_ref.bench.speculative_run import PLAIN
from mla_ref.checks import require_choice
from mla_ref.engine import PARTS
from mla_ref.speculative import AcceptanceStats

# The interval: 95% of so many resamples of the prompts, drawn from this seed.
RESAMPLES, SEED = 2000, 0
# With fewer prompts the ends of the interval are little more than the slowest and fastest one.
PROMPTS_FOR_INTERVAL = 5


@dataclass(frozen=True)
class WayTotal:
    """All prompts together, decoded in one way.

    Attributes:
        tokens: New tokens.
        seconds: End to end; the sum over the prompts of their medians.
        decode_tokens: Tokens after the first of each prompt.
        decode_seconds: Without the steps of the prompts.
        decode_steps: Steps without those of the prompts.
        parts: Seconds of the decode steps by part.
    """

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    decode_steps: int
    parts: dict[str, float]

    @classmethod
    def of(cls, rows: Sequence[SpeculativeRow], way: str) -> "WayTotal":
        """Add up the prompts."""
        parts = [row.parts(way) for row in rows]
        return cls(
            tokens=sum(row.tokens(way) for row in rows),
            seconds=sum(row.seconds(way) for row in rows),
            decode_tokens=sum(row.tokens(way, decode=True) for row in rows),
            decode_seconds=sum(row.seconds(way, decode=True) for row in rows),
            decode_steps=sum(len(row.first(way).decode_steps) for row in rows),
            parts={part: sum(one[part] for one in parts) for part in PARTS},
        )

    @property
    def rate(self) -> float:
        """Tokens a second, end to end."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second without the prompts; None if every text was one token."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None

    def per_step(self, part: str) -> float:
        """Seconds that a decode step spends in a part."""
        return self.parts[part] / max(self.decode_steps, 1)

    def per_token(self, part: str) -> float:
        """Seconds that a decoded token costs in a part."""
        return self.parts[part] / max(self.decode_tokens, 1)

    def to_json(self) -> dict[str, Any]:
        """With the rates."""
        return asdict(self) | {
            "tokens_per_second": self.rate,
            "decode_tokens_per_second": self.decode_rate,
            "ms_per_decode_step": {part: 1e3 * self.per_step(part) for part in PARTS},
            "ms_per_decode_token": {part: 1e3 * self.per_token(part) for part in PARTS},
        }


@dataclass(frozen=True)
class Gain:
    """One drafter against plain decoding, over all prompts.

    Attributes:
        drafter: Its name.
        num_prompts: Prompts.
        plain: Plain decoding.
        speculative: With drafts.
        speed_up: Tokens a second over those of plain decoding, end to end, of all prompts together:
            long texts weigh more.
        decode_speed_up: The same without the prompts; None if every text was one token.
        median_speed_up: Median over the prompts of their own speed-ups, end to end.
        interval: Where 95% of the speed-ups lie if the prompts are drawn anew, with replacement, a
            prompt's plain and speculative times together (paired bootstrap). It says what other
            prompts like these might give; None with fewer than 5.
        acceptance: Drafts accepted.
    """

    drafter: str
    num_prompts: int
    plain: WayTotal
    speculative: WayTotal
    speed_up: float
    decode_speed_up: float | None
    median_speed_up: float
    interval: tuple[float, float] | None
    acceptance: AcceptanceStats

    @classmethod
    def of(cls, rows: Sequence[SpeculativeRow], drafter: str) -> "Gain":
        """Sum up.

        Raises:
            ValueError: There is no row, or the drafter took no part.
        """
        if not rows:
            raise ValueError("rows must hold a prompt at least, got none")
        require_choice("drafter", drafter, rows[0].drafters)
        plain, speculative = WayTotal.of(rows, PLAIN), WayTotal.of(rows, drafter)
        own = [ratio for row in rows if (ratio := row.speed_up(drafter)) is not None]
        decode = None
        if plain.decode_rate and speculative.decode_rate:
            decode = speculative.decode_rate / plain.decode_rate
        return cls(
            drafter=drafter,
            num_prompts=len(rows),
            plain=plain,
            speculative=speculative,
            speed_up=speculative.rate / plain.rate,
            decode_speed_up=decode,
            median_speed_up=statistics.median(own),
            interval=_interval(rows, drafter),
            acceptance=reduce(add, (row.first(drafter).acceptance for row in rows)),
        )

    @property
    def steps_saved(self) -> int:
        """Decode steps of plain decoding that were not needed."""
        return self.plain.decode_steps - self.speculative.decode_steps

    @property
    def finding(self) -> str:
        """One of "faster" and "slower"; "none" where the interval holds 1, or there is none."""
        if self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return "none"
        return "faster" if self.interval[0] > 1 else "slower"

    def to_json(self) -> dict[str, Any]:
        """As plain data; a mean of no draft is null."""
        length = self.acceptance.mean_acceptance_length
        return non_finite_as_text(
            {
                "drafter": self.drafter,
                "num_prompts": self.num_prompts,
                "finding": self.finding,
                "speed_up": self.speed_up,
                "decode_speed_up": self.decode_speed_up,
                "median_speed_up": self.median_speed_up,
                "interval": self.interval,
                "interval_method": f"paired bootstrap over prompts, 95%, {RESAMPLES} resamples, "
                f"seed {SEED}",
                "mean_acceptance_length": length if self.acceptance.num_drafts else None,
                "acceptance_by_position": list(self.acceptance.per_position_rates),
                "steps_saved": self.steps_saved,
                "plain": self.plain.to_json(),
                "speculative": self.speculative.to_json(),
            }
        )


def in_a_sentence(gain: Gain) -> str:
    """What the times show, and no more than that."""
    name, steps = gain.drafter, gain.plain.decode_steps
    end = f"{gain.speed_up:.2f} times the tokens a second of plain decoding end to end"
    if gain.decode_speed_up is not None:
        end += f", {gain.decode_speed_up:.2f} times without the prompt"
    saved = f"It saved {gain.steps_saved:,} of {steps:,} steps"
    if gain.interval is None:
        few = "One prompt is" if gain.num_prompts == 1 else f"{gain.num_prompts} prompts are"
        return f"{name}: {end}. {saved}. {few} too few to say how sure that is."
    low, high = gain.interval
    spread = f"{low:.2f} to {high:.2f} over prompts drawn anew"
    opening = {
        "faster": f"{name} is faster here: {end} ({spread}).",
        "slower": f"{name} is slower here: {end} ({spread}).",
        "none": f"{name}: no gain or loss that these prompts could show, {end} ({spread}).",
    }[gain.finding]
    return f"{opening} {saved}."


def _interval(rows: Sequence[SpeculativeRow], drafter: str) -> tuple[float, float] | None:
    """2.5% and 97.5% of the speed-ups of resampled prompts."""
    if len(rows) < PROMPTS_FOR_INTERVAL:
        return None
    measured = [
        (row.tokens(drafter), row.seconds(drafter), row.tokens(PLAIN), row.seconds(PLAIN))
        for row in rows
    ]
    rng = random.Random(SEED)
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(measured, k=len(measured))
        tokens, seconds, plain_tokens, plain_seconds = map(sum, zip(*drawn, strict=True))
        found.append(tokens / seconds / (plain_tokens / plain_seconds))
    found.sort()
    return found[round(0.025 * (RESAMPLES - 1))], found[round(0.975 * (RESAMPLES - 1))]

"""What drafts gain for one request: plain against speculative decoding, by the same engine.

Every prompt is decoded greedily, alone, plainly and with each drafter in turn, and the order turns
from prompt to prompt and from repeat to repeat: on a busy machine whoever always comes second
would pay for it. A time is reported only where the tokens are those of plain decoding.

Two times of each run. *End to end* is what a user waits for, prompt included: there a drafter with
a cache pays for its share of the prompt. *Decode* is without the steps that ran the prompt.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_ref.bench.gate import GateError, Verdict, require_right
from mla_ref.bench.speculative_gate import Difference, compare_tokens
from mla_ref.bench.speculative_run import PLAIN, Decoder, Run
from mla_ref.bench.timer import HOST_CLOCK, Clock
from mla_ref.checks import describe, require_count
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import Drafter

# Tokens of the run of each that is not counted.
WARMUP_TOKENS = 3


@dataclass(frozen=True)
class SpeculativeRow:
    """One prompt, decoded in every way.

    Attributes:
        name: Of the prompt.
        prompt_tokens: Its length.
        runs: Of each way, by its name, `PLAIN` first; as many of each.
        differences: Where the text of a way departs from plain decoding: a tie, or the gate would
            have raised. Ways with the same tokens are not in it.
    """

    name: str
    prompt_tokens: int
    runs: Mapping[str, tuple[Run, ...]]
    differences: Mapping[str, Difference]

    @property
    def drafters(self) -> tuple[str, ...]:
        """The ways but plain decoding."""
        return tuple(name for name in self.runs if name != PLAIN)

    def first(self, way: str) -> Run:
        """The first run: its tokens, steps and drafts are those of every run."""
        return self.runs[way][0]

    def seconds(self, way: str, *, decode: bool = False) -> float:
        """Median over the runs, end to end or without the prompt."""
        return statistics.median(
            run.decode_seconds if decode else run.seconds for run in self.runs[way]
        )

    def tokens(self, way: str, *, decode: bool = False) -> int:
        """Tokens that this time gave; a prompt's last step gives the first."""
        return len(self.first(way).token_ids) - decode

    def rate(self, way: str, *, decode: bool = False) -> float:
        """Tokens a second; 0 where decode had none to give."""
        tokens = self.tokens(way, decode=decode)
        return tokens / self.seconds(way, decode=decode) if tokens else 0.0

    def speed_up(self, drafter: str, *, decode: bool = False) -> float | None:
        """Tokens a second with drafts over those without; None if plain decode gave none.

        As many tokens in both, so it is the ratio of the times, but where a tie parted the texts.
        """
        plain = self.rate(PLAIN, decode=decode)
        return self.rate(drafter, decode=decode) / plain if plain else None

    def parts(self, way: str) -> dict[str, float]:
        """Seconds of the decode steps by part, each the median over the runs."""
        runs = [run.parts for run in self.runs[way]]
        return {part: statistics.median(run[part] for run in runs) for part in runs[0]}

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, with every run."""
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "token_ids": list(self.first(PLAIN).token_ids),
            "differences": {way: found.to_json() for way, found in self.differences.items()},
            "ways": {
                way: {
                    "new_tokens": self.tokens(way),
                    "tokens_per_second": self.rate(way),
                    "decode_tokens_per_second": self.rate(way, decode=True),
                    "speed_up": None if way == PLAIN else self.speed_up(way),
                    "decode_speed_up": None if way == PLAIN else self.speed_up(way, decode=True),
                    "accepted_histogram": list(self.first(way).acceptance.histogram),
                    "runs": [run.to_json() for run in runs],
                }
                for way, runs in self.runs.items()
            },
        }


def measure_speculative(
    model: LanguageModel,
    prompts: Mapping[str, Sequence[int]],
    drafters: Sequence[Drafter],
    *,
    num_drafts: int = 3,
    tokens: int = 64,
    eos_id: int | None = None,
    repeats: int = 3,
    clock: Clock = HOST_CLOCK,
    on_run: Callable[[str, str], None] | None = None,
) -> Iterator[SpeculativeRow]:
    """Decode each prompt plainly and with each drafter, `repeats` times in turn.

    Args:
        model: The model.
        prompts: Token ids by name.
        drafters: Who proposes, each under its own name.
        num_drafts: Drafts a step, 1 or more.
        tokens: Tokens to write at most, 1 or more.
        eos_id: Token that ends a text.
        repeats: Timed runs of each, 1 or more.
        clock: Times one run.
        on_run: Called before each timed run with the names of prompt and way.

    Returns:
        An iterator over rows, in the order of the prompts. A row is measured when it is asked for.

    Raises:
        GateError: Some tokens differ, and not for a tie; or a way does not repeat itself.
        ValueError: A number is too small, there is no prompt or drafter, a prompt is empty or too
            long for the model, or two drafters have one name.
    """
    for name, value in {"num_drafts": num_drafts, "tokens": tokens, "repeats": repeats}.items():
        require_count(name, value, at_least=1)
    if not prompts:
        raise ValueError(f"prompts must hold a prompt at least, got {describe(prompts)}")
    context = model.config.context_length
    for name, ids in prompts.items():
        if not 0 < len(ids) <= context - tokens:
            raise ValueError(
                f"prompt {name!r} must have 1 to {context - tokens} tokens, so that with {tokens} "
                f"new ones it fits into the model's context of {context}, got {len(ids)}"
            )
    names = [PLAIN, *(drafter.name for drafter in drafters)]
    if len(names) == 1 or len(set(names)) < len(names):
        raise ValueError(f"drafters must have a name each, and not {PLAIN!r}, got {names[1:]}")
    ways = [Decoder(PLAIN, model)]
    ways += [Decoder(drafter.name, model, drafter, num_drafts) for drafter in drafters]

    def rows() -> Iterator[SpeculativeRow]:
        first = next(iter(prompts.values()))
        for way in ways:
            way.run(first, min(WARMUP_TOKENS, tokens), clock, eos_id)
        for number, (name, ids) in enumerate(prompts.items()):
            runs: dict[str, list[Run]] = {way.name: [] for way in ways}
            for repeat in range(repeats):
                turn = (number + repeat) % len(ways)
                for way in (*ways[turn:], *ways[:turn]):
                    if on_run:
                        on_run(name, way.name)
                    runs[way.name].append(way.run(ids, tokens, clock, eos_id))
            yield _row(model, name, ids, {way: tuple(found) for way, found in runs.items()})

    return rows()


def _row(
    model: LanguageModel, name: str, ids: Sequence[int], runs: Mapping[str, tuple[Run, ...]]
) -> SpeculativeRow:
    """The row, if every way gave the tokens of plain decoding, each time again."""

    def check(run: Run) -> list[Verdict]:
        return [compare_tokens(model, ids, runs[PLAIN][0].token_ids, run.token_ids)]

    differences = {}
    for way, found in runs.items():
        case = f"{way}, prompt {name!r}"
        if any(run.token_ids != found[0].token_ids for run in found):
            raise GateError(case, "of a repeat", "its tokens are not those of the first run")
        (verdict,) = require_right(case, "held against plain decoding,", found[0], check)
        if isinstance(verdict, Difference):
            differences[way] = verdict
    return SpeculativeRow(name, len(ids), runs, differences)

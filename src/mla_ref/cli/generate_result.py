"""What a run of `mla-ref generate` has written, and what can be read off its steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_ref.engine import PARTS, Output, Prompt, Request, StepRecord, Transcript
from mla_ref.speculative import AcceptanceStats


@dataclass
class Writing:
    """One prompt and what becomes of it.

    Attributes:
        prompt: As the user gave it.
        request: As the engine has it.
        transcript: What it writes.
        outputs: What each step gave it.
        shown: The same as `transcript.text`, with the drafts marked if they are.
    """

    prompt: Prompt
    request: Request
    transcript: Transcript
    outputs: list[Output] = field(default_factory=list)
    shown: str = ""


@dataclass(frozen=True)
class Run:
    """All prompts, run to the end.

    Attributes:
        writings: In the order in which they were given.
        timeline: The engine's steps.
        acceptance: The engine's, of all requests.
    """

    writings: list[Writing]
    timeline: list[StepRecord]
    acceptance: AcceptanceStats

    @property
    def num_steps(self) -> int:
        """Steps of the model, those that read prompts included."""
        return len(self.timeline)

    @property
    def seconds(self) -> float:
        """All steps together; neither loading nor printing."""
        return sum(step.total_seconds for step in self.timeline)

    @property
    def new_tokens(self) -> int:
        """Tokens in all texts."""
        return sum(len(writing.transcript.token_ids) for writing in self.writings)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, of the steps that run any."""
        steps = [step for step in self.timeline if step.num_prefill_tokens]
        return _rate(sum(step.num_prefill_tokens for step in steps), steps)

    @property
    def num_replayed(self) -> int:
        """Steps that were replayed from a graph."""
        return sum(step.graph is not None for step in self.timeline)

    @property
    def num_graphs(self) -> int:
        """Graphs that were recorded for them."""
        return sum(step.graph == "recorded" for step in self.timeline)

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second, of the steps that run no prompt and record no graph."""
        steps = self._decode_steps()
        return _rate(sum(step.num_new_tokens for step in steps), steps)

    @property
    def step_parts(self) -> dict[str, float] | None:
        """Seconds of one step that runs no prompt and records no graph, on average, by part."""
        steps = self._decode_steps()
        if not steps:
            return None
        return {part: sum(step.seconds[part] for step in steps) / len(steps) for part in PARTS}

    @property
    def routes(self) -> dict[str, dict[str, int]]:
        """How many steps went where, and why; empty where the model has one kernel."""
        counts = Counter((step.route, step.reason) for step in self.timeline if step.route)
        result: dict[str, dict[str, int]] = {}
        for (route, reason), count in counts.most_common():
            result.setdefault(str(route), {})[str(reason)] = count
        return result

    def _decode_steps(self) -> list[StepRecord]:
        steps = [step for step in self.timeline if not step.num_prefill_tokens]
        return [step for step in steps if step.graph != "recorded"]


def _rate(count: int, steps: Sequence[StepRecord]) -> float | None:
    seconds = sum(step.total_seconds for step in steps)
    return count / seconds if count and seconds > 0 else None

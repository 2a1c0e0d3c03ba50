"""What a step leaves behind: what each request got, and where the time went."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

PARTS = ("schedule", "forward", "logits", "sampling", "drafting")


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine, in numbers.

    Attributes:
        num_reqs: Requests that ran.
        num_tokens: Rows that they brought.
        num_tokens_padded: Rows that the model ran.
        num_prefill_tokens: Those of them that belonged to prompts, or to what a preempted request
            runs again.
        num_drafts: Drafts that were judged.
        num_accepted: Those that were accepted.
        num_new_tokens: Tokens that the requests got.
        route: The kernel, "decode", "extend" or "mixed"; None where the model has only one.
        reason: Why, a code of `REASONS`; None likewise.
        preempted: Requests that lost their pages before the step.
        seconds: By the names of `PARTS`, of the host's clock.
        graph: "replayed" from a graph, "recorded" to one and then replayed, or None: just run.
    """

    num_reqs: int
    num_tokens: int
    num_tokens_padded: int
    num_prefill_tokens: int
    num_drafts: int
    num_accepted: int
    num_new_tokens: int
    route: str | None
    reason: str | None
    preempted: tuple[str, ...]
    seconds: Mapping[str, float]
    graph: str | None = None

    @property
    def total_seconds(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Output:
    """What one request got from one step.

    Attributes:
        request_id: Whose.
        token_ids: Its new tokens; none after a chunk in the middle of a prompt.
        drafts: What was proposed for this step and judged.
        num_accepted: How many of the drafts, from the first on, were accepted. Fewer of them stand
            in `token_ids` where one of them ended the request.
        num_prefilled: Rows of the prompt, or of what is run again, that this step computed.
        finish_reason: "eos", "stop" or "length" with the last tokens, else None.
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafts: tuple[int, ...]
    num_accepted: int
    num_prefilled: int
    finish_reason: str | None


class StopWatch:
    """Seconds by part. On a GPU a part would only show what its launches took."""

    def __init__(self) -> None:
        """Start."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap for this part."""
        now = perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

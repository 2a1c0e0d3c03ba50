"""A request: what the user asks for, and how far the engine has come with it.

    token_ids    p0 p1 p2 p3 p4 │ o0 o1 o2         drafts   d0 d1
                 └── prompt ──┘   └ output ┘
    num_computed ────────────────────►│  rows in the cache: all but the newest token's

One rule drives everything: a request runs the tokens that it has and the cache has not. That is the
rest of a prompt, then one token a step, with drafts behind it if there are any, and after a
preemption everything again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mla_ref.checks import describe, require_count
from mla_ref.speculative.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        request_id: A name that no other live request has.
        prompt_ids: Tokens of the prompt.
        max_new_tokens: Tokens to write at most.
        sampling: How each token is chosen; by default greedily. The seed is the request's own, see
            `request_seed`: two of one seed draw alike.
        eos_id: Token that ends the text; None: there is none.
        stop_ids: More tokens that end it. The one that does is the last of the output.

    Raises:
        ValueError: The prompt is empty, a token is negative, or max_new_tokens less than 1.
        TypeError: A token is not an int, or the id not a string.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_id: int | None = None
    stop_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a string, got {describe(self.request_id)}")
        if not isinstance(self.sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {describe(self.sampling)}")
        for name in ("prompt_ids", "stop_ids"):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
                raise TypeError(f"{name} must be a sequence of ints, got {describe(value)}")
            for token_id in value:
                require_count(name, token_id)
            # What the caller does with a list afterwards is no business of a running request.
            object.__setattr__(self, name, tuple(value))
        if not self.prompt_ids:
            raise ValueError("prompt_ids must hold a token at least, got an empty prompt")
        require_count("max_new_tokens", self.max_new_tokens, at_least=1)
        if self.eos_id is not None:
            require_count("eos_id", self.eos_id)

    @property
    def max_rows(self) -> int:
        """Rows that its cache ever holds: the last token is chosen and never run."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    def require_fits(self, vocab_size: int, context_length: int) -> None:
        """Raise a ValueError if a model of these dimensions cannot serve it.

        An end token that the model cannot say is refused too: the request would never end by it.
        """
        ends = () if self.eos_id is None else (self.eos_id,)
        for name, ids in (
            ("prompt_ids", self.prompt_ids),
            ("eos_id", ends),
            ("stop_ids", self.stop_ids),
        ):
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"request {self.request_id!r}: {name} must lie below the vocabulary of "
                    f"{vocab_size}, got {max(ids)}"
                )
        total, new = len(self.prompt_ids), self.max_new_tokens
        if total + new > context_length:
            raise ValueError(
                f"request {self.request_id!r}: prompt and new tokens must fit into the model's "
                f"context of {context_length}, got {total} + {new}"
            )


class Status(StrEnum):
    """Where a request is. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestState:
    """How far the engine has come with a request. Scheduler and engine write here, nobody else.

    Attributes:
        request: What is asked for.
        output_ids: Tokens written so far.
        num_computed: Tokens whose rows in the cache are valid. Rows of rejected drafts lie behind
            them; nobody erases them, nobody reads them, and the next step writes over them.
        num_prefill: Tokens that it had when it was admitted. Until they are computed it is
            prefilling: for a new request its prompt, for a resumed one its output too, which is
            run again. With the prompt's length in its place, the last chunk of a resumed request
            would pass for a verifier's rows (vllm-ascend#11334, nano-vllm#144).
        drafts: Tokens proposed for the next step.
        pages: Its pages in the order of its tokens.
        status: Where it is.
        finish_reason: "eos", "stop", "length" or "abort" once it is finished, else None.
        num_preemptions: Times that its pages were taken away.
    """

    request: Request
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_prefill: int = 0
    drafts: tuple[int, ...] = field(default=(), init=False)
    pages: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output, a copy, linear in their number as each step's attention is too."""
        return (*self.request.prompt_ids, *self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether it still runs tokens that it had when it was admitted."""
        return self.num_computed < self.num_prefill

    @property
    def max_drafts(self) -> int:
        """Drafts that can still be of use: one token of a step is never a draft.

        Since prompt and new tokens fit into the context, so do these.
        """
        return max(self.request.max_new_tokens - len(self.output_ids) - 1, 0)

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Take new tokens until one of them ends the request; return those that were taken.

        An end token among accepted drafts cuts off what stands behind it, which plain decoding
        would never have written.
        """
        request, taken = self.request, []
        for token_id in token_ids:
            self.output_ids.append(token_id)
            taken.append(token_id)
            if token_id == request.eos_id:
                self.finish_reason = "eos"
            elif token_id in request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.output_ids) == request.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return taken

"""Which requests run in a step, with how many tokens, and who gives way when pages run out.

    waiting ──admit──> running ──> finished        first come, first served; a step has a budget
       ▲                  │                        of tokens, and a prompt longer than the rest
       └────preempt───────┘                        of it runs in chunks

Running requests stand in order of arrival, and all of them came before all that wait. So whoever
has to give way is the last of the running, and goes to the front of the queue. The oldest request
always runs, which is why the engine always gets on.
"""

from collections import deque
from dataclasses import dataclass

from mla_ref.batching import ServingLimits
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.engine.blocks import BlockManager
from mla_ref.engine.request import RequestState, Status


@dataclass(frozen=True)
class Scheduled:
    """What one request runs in a step.

    Attributes:
        state: The request.
        num_tokens: New tokens, drafts included.
        drafts: Those at their end that are drafts.
        samples: Whether a token is chosen behind them; not so in the middle of a prompt.
    """

    state: RequestState
    num_tokens: int
    drafts: tuple[int, ...]
    samples: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The new tokens."""
        first = self.state.num_computed
        return (*self.state.token_ids, *self.drafts)[first : first + self.num_tokens]

    def valid_rows(self, num_accepted: int) -> int:
        """Rows that stay valid: all but those of rejected drafts."""
        return self.num_tokens - (len(self.drafts) - num_accepted)


@dataclass(frozen=True)
class Schedule:
    """A step's plan.

    Attributes:
        items: What runs.
        preempted: Who has lost its pages.
    """

    items: list[Scheduled]
    preempted: list[RequestState]


class Scheduler:
    """The queues and the pages.

    Attributes:
        limits: Requests and tokens of a step at most; num_speculative_tokens is how far a drafter
            writes beyond the tokens of a step.
        blocks: The pages.
        max_chunk: Tokens of one prompt in a step at most, so that a long one leaves some of the
            budget to others; None: as many as the budget has.
        waiting: Not admitted yet, or preempted.
        running: Hold pages.
    """

    def __init__(
        self, limits: ServingLimits, blocks: BlockManager, max_chunk: int | None = None
    ) -> None:
        """Empty queues."""
        self.limits, self.blocks = limits, blocks
        self.max_chunk = limits.max_num_batched_tokens
        if max_chunk is not None:
            self.max_chunk = require_count("max_chunk", max_chunk, at_least=1)
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []

    def add(self, state: RequestState) -> None:
        """Queue a request.

        Raises:
            ValueError: All pages together are too few for it: it would wait for ever.
        """
        request, blocks = state.request, self.blocks
        needed = pages_needed(request.max_rows, blocks.page_size)
        if needed > blocks.num_pages:
            raise ValueError(
                f"request {request.request_id!r} may need {needed} pages of {blocks.page_size} "
                f"tokens ({len(request.prompt_ids)} + {request.max_new_tokens} - 1 tokens), but "
                f"num_pages is {blocks.num_pages}"
            )
        self.waiting.append(state)

    def finish(self, state: RequestState, reason: str) -> None:
        """Take a request out, wherever it is, and its pages back."""
        (self.running if state.status == Status.RUNNING else self.waiting).remove(state)
        self._release(state)
        state.status, state.finish_reason = Status.FINISHED, reason

    def schedule(self) -> Schedule:
        """Plan the next step: the running requests first, then those that wait, in their order."""
        budget = self.limits.max_num_batched_tokens
        items: list[Scheduled] = []
        preempted: list[RequestState] = []
        for state in list(self.running):
            if budget == 0 or state.status != Status.RUNNING:
                break  # behind a preempted request all are preempted
            item = self._cut(state, budget)
            while not self._has_pages(item):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is state:
                    break
            else:
                items.append(item)
                budget -= item.num_tokens
        # Whoever comes in now would take the pages that somebody has just given up.
        while self.waiting and budget and not preempted:
            if len(self.running) == self.limits.max_num_seqs or not self._admit(self.waiting[0]):
                break
            item = self._cut(self.running[-1], budget)
            items.append(item)
            budget -= item.num_tokens
        return Schedule(items, preempted)

    def _cut(self, state: RequestState, budget: int) -> Scheduled:
        """All that the request has and the cache has not, as far as the budget goes."""
        most = min(budget, self.max_chunk) if state.is_prefilling else budget
        missing = state.num_tokens - state.num_computed
        num_tokens = min(missing + len(state.drafts), most)
        drafts = state.drafts[: max(num_tokens - missing, 0)]
        return Scheduled(state, num_tokens, drafts, samples=num_tokens >= missing)

    def _has_pages(self, item: Scheduled) -> bool:
        """Give a request pages for its step and for the rows that its drafter writes after it."""
        state = item.state
        rows = state.num_computed + item.num_tokens
        if item.samples:
            rows += self.limits.num_speculative_tokens
        return self.blocks.allocate(state.pages, min(rows, state.request.max_rows))

    def _admit(self, state: RequestState) -> bool:
        """Start or resume a request, if there are pages for all the tokens that it has.

        With pages for its first chunk alone it would come in and be preempted again in the next
        step (vllm#25538).
        """
        rows = state.num_tokens + self.limits.num_speculative_tokens
        if not self.blocks.allocate(state.pages, min(rows, state.request.max_rows)):
            return False
        self.running.append(self.waiting.popleft())
        state.status, state.num_prefill = Status.RUNNING, state.num_tokens
        return True

    def _preempt(self, state: RequestState) -> None:
        """Back to the front of the queue. It keeps its output and has to run all of it again."""
        self.running.remove(state)
        self.waiting.appendleft(state)
        self._release(state)
        state.status = Status.WAITING
        state.num_preemptions += 1

    def _release(self, state: RequestState) -> None:
        self.blocks.free(state.pages)
        state.pages, state.num_computed, state.num_prefill = [], 0, 0
        state.drafts = ()

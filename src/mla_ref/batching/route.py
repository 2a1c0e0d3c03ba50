"""Which rows of a step go to which kernel, and why: the answer that a log line needs.

Two routers. `route` decides once for the whole batch, as the served code does; one prefill chunk
then sends every verifier row to extend (local-inference-lab/vllm#273). `route_per_request` asks
the same rule of each request alone. The results are the same to rounding: both kernels compute the
same, and a row never looks at the other rows of its batch.

Only facts of the host are read, so a step waits for no device and can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mla_ref.batching.decide import Decision, decide
from mla_ref.batching.facts import BatchFacts, facts_of
from mla_ref.batching.modes import SpecMode, parse_mode
from mla_ref.batching.reasons import REASONS
from mla_ref.batching.remedy import Remedy, find_remedy
from mla_ref.batching.scratch import ScratchRows
from mla_ref.batching.step import Step
from mla_ref.checks import describe


class Segment(NamedTuple):
    """Consecutive rows that go to one kernel.

    Attributes:
        row_start: First row.
        row_end: Behind the last row.
        req_start: First request.
        req_end: Behind the last request.
        kind: "decode" or "extend".
    """

    row_start: int
    row_end: int
    req_start: int
    req_end: int
    kind: str


@dataclass(frozen=True)
class Route:
    """Where the rows of a step go.

    Attributes:
        segments: In the order of the rows, covering all of them, padding included.
        reason: A code of `REASONS`.
        text: The reason in a sentence, with the numbers of this batch.
        blame: The first request that keeps rows from decode, if a single one does.
        remedy: The one change after which all would be decode; None if it is or no one change does.
        reasons: The code of each request where each was asked by itself, else empty.
        num_reqs_padded: Requests of the graph.
        num_tokens_padded: Rows of the graph.
    """

    segments: tuple[Segment, ...]
    reason: str
    text: str
    blame: int | None
    remedy: Remedy | None
    reasons: tuple[str, ...]
    num_reqs_padded: int
    num_tokens_padded: int

    @property
    def kind(self) -> str:
        """The kernel if all rows go to one, else "mixed"."""
        kinds = {segment.kind for segment in self.segments} or {"decode"}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def graph_key(self) -> tuple[int, int, tuple[tuple[int, int, str], ...]]:
        """What a captured graph may be replayed for: its padded sizes and its kernels.

        A replay runs no Python, so it repeats the branch that was taken when it was captured. Two
        batches of one shape and different routes must have two graphs.
        """
        parts = tuple((s.row_start, s.row_end, s.kind) for s in self.segments)
        return (self.num_reqs_padded, self.num_tokens_padded, parts)


def route(step: Step | BatchFacts, plan: ScratchRows, mode: str | SpecMode | None = None) -> Route:
    """One kernel for the whole batch.

    Args:
        step: The batch, or only its facts.
        plan: What the kernels' buffers hold; a `ScratchPlan`, or rows alone.
        mode: The mode; None: the plan's.

    Raises:
        TypeError: A fact lies on a device.
        ValueError: More requests than max_num_seqs, or more rows than max_num_batched_tokens; the
            message names both numbers. A batch over the decode plan alone goes to extend.
    """
    facts, mode = _checked(step, plan, mode)
    decision = decide(facts, plan, mode)
    return _route(facts, plan, mode, [decision.kind] * facts.num_reqs, decision, ())


def route_per_request(
    step: Step | BatchFacts, plan: ScratchRows, mode: str | SpecMode | None = None
) -> Route:
    """Each request to the kernel that the rule gives it alone; neighbours share a segment.

    Padded rows go with the last request. A decode segment of more rows than are planned goes to
    extend. Fewest segments: order the batch by `reorder_batch` first.

    Args:
        step: As in `route`.
        plan: As in `route`.
        mode: As in `route`.

    Raises:
        TypeError: As in `route`.
        ValueError: As in `route`.
    """
    facts, mode = _checked(step, plan, mode)
    decisions = [decide(facts.request(r), plan, mode) for r in range(facts.num_reqs)]
    kinds = _joined([d.kind if q else "" for d, q in zip(decisions, facts.query_lens, strict=True)])
    reasons = [d.reason for d in decisions]
    for segment in _segments(facts, kinds, "extend"):
        if segment.kind == "decode" and segment.row_end - segment.row_start > plan.decode_rows:
            for request in range(segment.req_start, min(segment.req_end, facts.num_reqs)):
                kinds[request], reasons[request] = "extend", "over-planned-rows"
    if "extend" in kinds:
        # A request without a token has only borrowed its kernel, so it is not to blame.
        asked = zip(kinds, facts.query_lens, strict=True)
        first = next((r for r, (kind, q) in enumerate(asked) if kind == "extend" and q), 0)
        blamed = None if reasons[first] == "over-planned-rows" else first
        decision = Decision("extend", reasons[first], blamed)
    elif named := [code for code in ("forced", "verifier", "single-token") if code in reasons]:
        decision = Decision("decode", named[0])
    else:
        decision = decide(facts, plan, mode)  # nobody has a token
    return _route(facts, plan, mode, kinds, decision, reasons)


def _checked(
    step: Step | BatchFacts, plan: ScratchRows, mode: str | SpecMode | None
) -> tuple[BatchFacts, SpecMode]:
    """Facts and mode, if the step is one that the server is configured for."""
    facts = facts_of(step)
    if not isinstance(plan, ScratchRows):
        raise TypeError(f"plan must be a ScratchPlan or ScratchRows, got {describe(plan)}")
    for what, found, name in (
        ("requests", facts.num_reqs, "max_num_seqs"),
        ("rows", facts.num_tokens_padded, "max_num_batched_tokens"),
    ):
        if found > (most := getattr(plan.limits, name)):
            raise ValueError(f"step has {found} {what}, but {name} is {most}")
    return facts, plan.mode if mode is None else parse_mode("mode", mode)


def _joined(kinds: list[str]) -> list[str]:
    """Requests without a token take the kernel of the one before them, or of the first behind."""
    last = next((kind for kind in kinds if kind), "decode")
    for request, kind in enumerate(kinds):
        last = kinds[request] = kind or last
    return kinds


def _segments(facts: BatchFacts, kinds: Sequence[str], of_padding: str) -> tuple[Segment, ...]:
    """Neighbours of one kind together; the last segment takes the padding.

    Where nobody but padding is there, it goes to the kernel `of_padding`.
    """
    segments, row, request = [], 0, 0
    for kind, group in groupby(kinds):
        requests = len(list(group))
        rows = sum(facts.query_lens[request : request + requests])
        segments.append(Segment(row, row + rows, request, request + requests, kind))
        row, request = row + rows, request + requests
    last = segments.pop() if segments else Segment(0, 0, 0, 0, of_padding)
    end = last._replace(row_end=facts.num_tokens_padded, req_end=facts.num_reqs_padded)
    return (*segments, end)


def _route(
    facts: BatchFacts,
    plan: ScratchRows,
    mode: SpecMode,
    kinds: Sequence[str],
    decision: Decision,
    reasons: Sequence[str],
) -> Route:
    """The route of these kinds, in words and with its remedy."""
    # Where each request was asked by itself, the remedy is for the one to blame.
    alone = reasons and decision.request is not None
    ill = facts.request(decision.request or 0) if alone else facts
    return Route(
        segments=_segments(facts, kinds, decision.kind),
        reason=decision.reason,
        text=_text(facts, plan, decision),
        blame=decision.request,
        remedy=find_remedy(ill, plan, mode) if decision.kind == "extend" else None,
        reasons=tuple(reasons),
        num_reqs_padded=facts.num_reqs_padded,
        num_tokens_padded=facts.num_tokens_padded,
    )


def _text(facts: BatchFacts, plan: ScratchRows, decision: Decision) -> str:
    limits, request = plan.limits, decision.request
    n = limits.num_speculative_tokens
    tokens = 0 if request is None else facts.query_lens[request]
    numbers = {
        "no-spec-config": f"request {request} has {tokens} tokens",
        "prefill-in-batch": f"request {request}, with {tokens} tokens",
        "query-over-n+1": f"request {request} has {tokens}, 1 + n is {1 + n}",
        "over-max-q": f"request {request} has {tokens}, max_q is {limits.max_q}",
        "over-planned-rows": f"{facts.num_tokens_padded} rows, planned are {plan.decode_rows}",
        "verifier": f"n is {n}, the longest request has {facts.max_query_len}",
        "forced": f"the longest has {facts.max_query_len}, max_q is {limits.max_q}",
    }.get(decision.reason)
    meaning = REASONS[decision.reason]
    return meaning if numbers is None else f"{meaning} ({numbers})"

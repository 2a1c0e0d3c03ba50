"""The one change that would send a batch to decode, found by trying: no text promises in vain."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mla_ref.batching.decide import decide
from mla_ref.batching.facts import BatchFacts
from mla_ref.batching.modes import SpecMode
from mla_ref.batching.scratch import ScratchRows


@dataclass(frozen=True)
class Remedy:
    """One change.

    Attributes:
        change: What changes: a field of `ServingLimits`, "mode", "planned_mode", "is_prefilling" or
            "without_requests".
        value: Its new value; the requests to leave out for "without_requests".
        text: The same as an advice.
    """

    change: str
    value: str | int | bool | tuple[int, ...]
    text: str


Trial = tuple[Remedy, BatchFacts, ScratchRows, SpecMode]


def find_remedy(facts: BatchFacts, planned: ScratchRows, mode: SpecMode) -> Remedy | None:
    """The first of the changes, in the order of what they cost, after which it is decode.

    None if no single change does it, or if it is decode already.
    """
    if decide(facts, planned, mode).kind == "decode":
        return None
    for remedy, changed_facts, changed_plan, changed_mode in _trials(facts, planned, mode):
        if decide(changed_facts, changed_plan, changed_mode).kind == "decode":
            return remedy
    return None


def _trials(facts: BatchFacts, planned: ScratchRows, mode: SpecMode) -> Iterator[Trial]:
    limits, longest, n = planned.limits, facts.max_query_len, planned.limits.num_speculative_tokens
    if facts.is_prefilling is None:
        said = replace(facts, is_prefilling=(False,) * facts.num_reqs)
        text = "Pass is_prefilling: if nobody is prefilling, this is a verifier batch."
        yield Remedy("is_prefilling", False, text), said, planned, mode
    if mode == SpecMode.OFF:
        auto = ScratchRows(limits, SpecMode.AUTO)
        yield Remedy("mode", "auto", "Set the mode to auto."), facts, auto, SpecMode.AUTO
    if planned.mode != mode:
        own = ScratchRows(limits, mode)
        text = (
            f"Plan the scratch for mode {mode}: {own.decode_rows} decode rows in place of "
            f"{planned.decode_rows}."
        )
        yield Remedy("planned_mode", str(mode), text), facts, own, mode
    # A long chunk of a prompt is what extend is made for: no larger limit is advised for it.
    chunk = any(q == longest for r, q in enumerate(facts.query_lens) if r in _prefilling(facts))
    if longest > 1 + n and not chunk:
        more = ScratchRows(replace(limits, num_speculative_tokens=longest - 1), planned.mode)
        text = f"Set num_speculative_tokens to {longest - 1}, if the drafter proposes as many."
        yield Remedy("num_speculative_tokens", longest - 1, text), facts, more, mode
    if longest > limits.max_q and not chunk:
        wider = ScratchRows(replace(limits, max_q=longest), planned.mode)
        yield Remedy("max_q", longest, f"Set max_q to {longest}."), facts, wider, mode
    needed = -(-facts.num_tokens_padded // planned.rows_per_request)
    if needed > limits.max_num_seqs:
        larger = ScratchRows(replace(limits, max_num_seqs=needed), planned.mode)
        text = f"Plan for {needed} requests: the graph has {facts.num_tokens_padded} rows."
        yield Remedy("max_num_seqs", needed, text), facts, larger, mode
    out = _in_the_way(facts, n)
    if 0 < len(out) < facts.num_reqs:
        text = f"Run {_named(out)} in another step, or route each request by itself."
        yield Remedy("without_requests", out, text), facts.without(out), planned, mode
    if mode != SpecMode.FORCED:
        forced = ScratchRows(limits, SpecMode.FORCED)
        text = f"Set the mode to 1: decode then takes any request of up to {limits.max_q} tokens."
        yield Remedy("mode", "1", text), facts, forced, SpecMode.FORCED


def _prefilling(facts: BatchFacts) -> set[int]:
    return {r for r, flag in enumerate(facts.is_prefilling or ()) if flag}


def _in_the_way(facts: BatchFacts, n: int) -> tuple[int, ...]:
    """Requests that are no verifier's: prefilling, or too long for one."""
    too_long = {r for r, q in enumerate(facts.query_lens) if q > 1 and q > 1 + n}
    return tuple(sorted(too_long | _prefilling(facts)))


def _named(requests: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, requests[:8])) + (", ..." if len(requests) > 8 else "")
    return f"request{'s' if len(requests) > 1 else ''} {listed}"

"""The rule that chooses a kernel for a batch: ints in, a code out.

Both kernels compute the same. Decode cuts each row's list into splits and so keeps a GPU busy with
few rows; extend takes a row in one pass. The old belief that decode would hide the earlier drafts
of a step from the later ones was wrong: all rows are written before attention, and each row has
its own causal length (local-inference-lab/vllm#164).
"""

from typing import NamedTuple

from mla_ref.batching.classify import classify
from mla_ref.batching.facts import BatchFacts
from mla_ref.batching.modes import SpecMode
from mla_ref.batching.scratch import ScratchRows
from mla_ref.checks import describe


class Decision(NamedTuple):
    """Which kernel, and why.

    Attributes:
        kind: "decode" or "extend".
        reason: A code of `REASONS`.
        request: The first request that keeps the batch from decode, if a single one does.
    """

    kind: str
    reason: str
    request: int | None = None


def decide(facts: BatchFacts, planned: ScratchRows, mode: SpecMode) -> Decision:
    """Decode or extend for the whole batch.

    Beside the original's conditions there is none that counts tokens against requests * max_q:
    with real counts it follows from the longest query. Padding enters in one place only, as rows
    that the kernel gets: a graph of 112 rows does not fit a plan for 100 (xllm#1939).

    Args:
        facts: The batch.
        planned: What the decode plan holds.
        mode: The mode that is asked for; it may differ from the one that was planned for.
    """
    if not isinstance(planned, ScratchRows):
        raise TypeError(f"planned must be ScratchRows or a ScratchPlan, got {describe(planned)}")
    if not isinstance(mode, SpecMode):
        raise TypeError(f"mode must be a SpecMode, got {describe(mode)}")
    limits = planned.limits
    verdict = classify(facts, limits.num_speculative_tokens)
    longest = facts.max_query_len
    if longest > 1:
        if mode == SpecMode.OFF:
            return Decision("extend", "mode-off")
        if mode == SpecMode.AUTO and not verdict.is_verifier:
            return Decision("extend", verdict.reason, verdict.request)
        if longest > limits.max_q:
            return Decision("extend", "over-max-q", _first_longer(facts, limits.max_q))
    if facts.num_tokens_padded > planned.decode_rows:
        return Decision("extend", "over-planned-rows")
    # What is decode in auto keeps its reason in mode 1; the rest is there because it was forced.
    named = longest <= 1 or verdict.is_verifier
    return Decision("decode", verdict.reason if named else "forced")


def _first_longer(facts: BatchFacts, length: int) -> int:
    return next(r for r, q in enumerate(facts.query_lens) if q > length)

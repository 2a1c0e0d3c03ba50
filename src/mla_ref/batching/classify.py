"""Is this a verifier batch? Asked of the scheduler's facts, never guessed from lengths.

MTP verification runs 1 + n rows a request: the last accepted token and n drafts. A short chunk of
a prompt has the same shape, so the shape is not enough (vllm-ascend#5583).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mla_ref.batching.facts import BatchFacts, batch_facts
from mla_ref.checks import describe, require_count


class Verdict(NamedTuple):
    """What a batch is, and why.

    Attributes:
        is_verifier: Whether it is a verifier batch.
        reason: A code of `REASONS`.
        request: The first request that makes it none; None if it is one or no single one does.
    """

    is_verifier: bool
    reason: str
    request: int | None = None


def classify(facts: BatchFacts, num_speculative_tokens: int) -> Verdict:
    """Whether every request with several tokens verifies drafts, and if not, which one does not.

    The four conditions: n > 0; the longest query has 2 to 1 + n tokens; somebody has said who is
    prefilling; nobody is. A ragged batch qualifies, since a request may have fewer drafts. Where
    two conditions fail, a known prefill is named before a length: no larger n would help it.
    """
    if not isinstance(facts, BatchFacts):
        raise TypeError(f"facts must be BatchFacts, got {describe(facts)}")
    n = require_count("num_speculative_tokens", num_speculative_tokens)
    lens, flags = facts.query_lens, facts.is_prefilling
    if facts.num_tokens == 0:
        return Verdict(False, "empty")
    if facts.max_query_len == 1:
        return Verdict(False, "single-token")
    if n == 0:
        return Verdict(False, "no-spec-config", next(r for r, q in enumerate(lens) if q > 1))
    if flags is not None and True in flags:
        return Verdict(False, "prefill-in-batch", flags.index(True))
    if facts.max_query_len > 1 + n:
        return Verdict(False, "query-over-n+1", next(r for r, q in enumerate(lens) if q > 1 + n))
    if flags is None:
        return Verdict(False, "prefilling-unknown")
    return Verdict(True, "verifier")


def is_verifier_batch(
    query_lens: Sequence[int] | np.ndarray | Tensor,
    is_prefilling: Sequence[bool] | np.ndarray | Tensor | None,
    num_speculative_tokens: int,
    *,
    num_reqs: int | None = None,
) -> bool:
    """`classify` for plain arguments; the arguments of `batch_facts`.

    Raises:
        TypeError: A fact lies on a device.
        ValueError: The counts do not fit each other.
    """
    facts = batch_facts(query_lens, is_prefilling, num_reqs=num_reqs)
    return classify(facts, num_speculative_tokens).is_verifier

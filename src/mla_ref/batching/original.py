"""What the pull request's code answers: local-inference-lab/vllm#164, transcribed.

It differs from `decide` in what padding can do: it counts padded requests and rows, and the flag of
a vacated row. Kept to compare with, for a server whose answer one wants to explain.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mla_ref.batching.modes import SpecMode
from mla_ref.batching.scratch import ScratchRows


class OriginalAnswer(NamedTuple):
    """The original's route, with the two facts that it rests on.

    Attributes:
        kind: "decode" or "extend".
        is_spec_decode: Its test for a verifier batch.
        use_spec: Whether several tokens a request may go to decode at all.
    """

    kind: str
    is_spec_decode: bool
    use_spec: bool


def original_route(
    query_lens: Sequence[int],
    is_prefilling: Sequence[bool] | None,
    num_tokens_padded: int,
    planned: ScratchRows,
    mode: SpecMode,
) -> OriginalAnswer:
    """The original's answer for a batch as its server has it.

    Args:
        query_lens: New tokens of each request, padding included.
        is_prefilling: The flags as they are, stale ones included; None: not given.
        num_tokens_padded: Rows with padding; the original's num_actual_tokens.
        planned: Rows of the decode plan, and the limits.
        mode: The mode.
    """
    n, max_q = planned.limits.num_speculative_tokens, planned.limits.max_q
    longest, reqs, tokens = max(query_lens, default=0), len(query_lens), num_tokens_padded
    is_spec_decode = (
        n > 0 and 1 < longest <= n + 1 and is_prefilling is not None and not any(is_prefilling)
    )
    use_spec = mode != SpecMode.OFF and (mode == SpecMode.FORCED or is_spec_decode)
    decode = longest <= 1 or (
        use_spec and longest <= max_q and tokens <= reqs * max_q and tokens <= planned.decode_rows
    )
    return OriginalAnswer("decode" if decode else "extend", is_spec_decode, use_spec)

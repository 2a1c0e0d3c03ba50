"""Cut an ordered batch into its decodes and the rest: how many requests and tokens stand in front.

The rules are vLLM's, and so are their edges. The batch must be in the order of `reorder_batch`:
whatever stands behind the first prefill counts as a prefill.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mla_ref.batching.facts import batch_facts, host_counts
from mla_ref.checks import require_count


class Split(NamedTuple):
    """Decodes in front, prefills behind; all four counts whatever the batch (vllm#48722)."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class SixWaySplit(NamedTuple):
    """Decodes, then extends (several tokens behind a context), then prefills (no context)."""

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_lens: Sequence[int],
    is_prefilling: Sequence[bool] | np.ndarray | Tensor | None = None,
    num_tokens_padded: int | None = None,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> Split:
    """How many requests from the front are decodes, by query length.

    Padded requests and tokens are counted, since a full graph needs its own sizes: padded tokens
    fall on the prefill side if there is one.

    Args:
        query_lens: New tokens of each request; 0 for padding.
        is_prefilling: Read only with `treat_short_extends_as_decodes=False`.
        num_tokens_padded: Tokens with padding; None: the sum of the lengths.
        decode_threshold: The longest query that may be a decode.
        require_uniform: All decodes must have the length of the first one. A shorter request ends
            them, and everything behind it is a prefill.
        treat_short_extends_as_decodes: A short last chunk of a prompt counts as a decode. Without
            it, a request that is prefilling is a prefill whatever its length; but a batch that is
            uniform (with `require_uniform`) is decodes all the same, as in the original.

    Raises:
        ValueError: `is_prefilling` is needed and None.
    """
    facts = batch_facts(query_lens, is_prefilling, num_tokens_padded=num_tokens_padded)
    require_count("decode_threshold", decode_threshold, at_least=1)
    lens, tokens = facts.query_lens, facts.num_tokens_padded
    everything_decodes = Split(len(lens), 0, tokens, 0)
    if not treat_short_extends_as_decodes and facts.is_prefilling is None:
        raise ValueError(
            "is_prefilling must be given where short extends are no decodes, got None: lengths "
            "cannot tell them apart"
        )
    one_length = not require_uniform or decode_threshold == 1
    if not lens or (
        facts.max_query_len <= decode_threshold and one_length and treat_short_extends_as_decodes
    ):
        return everything_decodes
    if lens[0] > decode_threshold:
        return Split(0, len(lens), 0, tokens)
    if require_uniform:
        if all(q in (lens[0], 0) for q in lens):
            return everything_decodes
        prefills = [q != lens[0] for q in lens]
    else:
        prefills = [q > decode_threshold for q in lens]
    if not treat_short_extends_as_decodes and facts.is_prefilling is not None:
        prefills = [p or f for p, f in zip(prefills, facts.is_prefilling, strict=True)]
    if True not in prefills:
        return everything_decodes
    first = prefills.index(True)
    decode_tokens = sum(lens[:first])
    return Split(first, len(lens) - first, decode_tokens, tokens - decode_tokens)


def split_decodes_prefills_and_extends(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_tokens_padded: int | None = None,
    *,
    decode_threshold: int = 1,
) -> SixWaySplit:
    """The same with prefills that have a context apart from those that have none.

    Args:
        query_lens: New tokens of each request; 0 for padding.
        seq_lens: Length of each request with its new tokens, on the host. An upper bound will do,
            as long as it exceeds the query length of every request that has a context.
        num_tokens_padded: Tokens with padding; None: the sum of the lengths.
        decode_threshold: The longest query that may be a decode.

    Raises:
        ValueError: The lists differ in length, or a request is shorter than its new tokens.
    """
    facts = batch_facts(query_lens, None, num_tokens_padded=num_tokens_padded)
    lens, seqs = facts.query_lens, host_counts("seq_lens", seq_lens)
    require_count("decode_threshold", decode_threshold, at_least=1)
    if len(seqs) != len(lens):
        raise ValueError(f"query_lens has {len(lens)} requests but seq_lens {len(seqs)}")
    for request, (q, s) in enumerate(zip(lens, seqs, strict=True)):
        if s < q:
            raise ValueError(f"seq_lens[{request}] is {s}, fewer than its {q} new tokens")
    long = [q > decode_threshold for q in lens]
    without_context = [a and q == s for a, q, s in zip(long, lens, seqs, strict=True)]
    extend = long.index(True) if True in long else len(lens)
    prefill = without_context.index(True) if True in without_context else len(lens)
    starts = [0, *accumulate(lens)]
    # The last class that is there takes the padding.
    starts[-1] = facts.num_tokens_padded
    return SixWaySplit(
        extend,
        prefill - extend,
        len(lens) - prefill,
        starts[extend],
        starts[prefill] - starts[extend],
        starts[-1] - starts[prefill],
    )

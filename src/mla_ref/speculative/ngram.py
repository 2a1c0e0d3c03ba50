"""Prompt look-up: the last words stood here before, so what followed them may follow again.

Free of any model, and good where text repeats: code, quotations, a chat about a document.
"""

from collections.abc import Sequence

import numpy as np

from mla_ref.checks import describe, require_count


def propose_ngram(
    token_ids: Sequence[int], *, num_drafts: int, max_ngram: int = 3, min_ngram: int = 1
) -> list[int]:
    """The tokens that followed the longest earlier occurrence of the text's end.

    The end is its last n tokens, n as long as found, at most max_ngram, at least min_ngram. Among
    several occurrences of that length the earliest counts, as in vLLM's `ngram_proposer.py` and in
    transformers' prompt look-up: it has the most tokens behind it. It may overlap the end itself:
    after 7 7 7 the proposal is 7.

    Takes time proportional to len(token_ids) * max_ngram.

    Args:
        token_ids: Prompt and output.
        num_drafts: Most tokens proposed; fewer where the text ends before.
        max_ngram: Longest end looked for.
        min_ngram: Shortest end trusted.

    Returns:
        0 to num_drafts tokens; none if the end is new.
    """
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise TypeError(f"token_ids must be a sequence of ints, got {describe(token_ids)}")
    require_count("num_drafts", num_drafts)
    require_ngram_sizes(max_ngram, min_ngram)
    if num_drafts == 0 or not token_ids:
        return []
    tokens = np.asarray(token_ids)
    if tokens.dtype.kind != "i" or tokens.ndim != 1:
        raise TypeError(f"token_ids must be a sequence of ints, got {describe(token_ids)}")
    # Places i such that the n tokens before token i equal the end, for n = 1, 2, ...: each n keeps
    # some of the places of the one before. Token i itself is there, so i goes to the last token.
    following = np.arange(1, len(tokens))
    found = following[:0]
    for n in range(1, min(max_ngram, len(tokens) - 1) + 1):
        following = following[following >= n]
        following = following[tokens[following - n] == tokens[-n]]
        if not following.size:
            break
        if n >= min_ngram:
            found = following
    if not found.size:
        return []
    first = int(found[0])
    return tokens[first : first + num_drafts].tolist()


def require_ngram_sizes(max_ngram: int, min_ngram: int) -> None:
    """Raise unless 1 <= min_ngram <= max_ngram."""
    require_count("min_ngram", min_ngram, at_least=1)
    if require_count("max_ngram", max_ngram) < min_ngram:
        raise ValueError(f"max_ngram must be at least min_ngram, {min_ngram}, got {max_ngram}")

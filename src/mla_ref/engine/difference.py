"""Where two texts go apart."""

from collections.abc import Sequence


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """How many tokens two texts have in common from the start on; None if they are the same.

    A text that goes on where the other has ended differs at the other's length.
    """
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))

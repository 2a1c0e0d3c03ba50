"""Index lists that kernels have stumbled over, and counts beside them; each pattern has a name.

A list takes different slots from 1 to capacity - 2. Slots 0 and capacity - 1 stay free, unless the
pattern is about them: that is where a -1 that was not masked would read.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.checks import require_choice

INT32_MAX = 2**31 - 1
Pattern = Callable[[Tensor, int, torch.Generator], Tensor]


def _keep(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    return lists


def _lead(n: int) -> Pattern:
    def pattern(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
        lists[:, :n] = -1
        return lists

    return pattern


def _alternating(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    lists[:, ::2] = -1
    return lists


def _only_last(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    lists[:, :-1] = -1
    return lists


def _strewn(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    lists[torch.rand(lists.shape, generator=generator) < 0.3] = -1
    return lists


def _short(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    """Each list ends early, as where a request has fewer keys than topk."""
    for row in range(lists.shape[0]):
        lists[row, max(1, lists.shape[1] * (row + 1) // (lists.shape[0] + 2)) :] = -1
    return lists


def _one_empty(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    lists[lists.shape[0] // 2] = -1
    return lists


def _all_empty(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    return torch.full_like(lists, -1)


def _outside(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    wrong = torch.tensor([capacity, capacity + 1, INT32_MAX, -2, -(2**31)])
    chosen = torch.rand(lists.shape, generator=generator) < 0.3
    drawn = torch.randint(len(wrong), lists.shape, generator=generator)
    return torch.where(chosen, wrong[drawn], lists)


def _too_large(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    lists[:, 1::3] = capacity
    lists[:, 2::6] = INT32_MAX
    return lists


def _repeated(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    half = lists.shape[1] // 2
    lists[:, half : 2 * half] = lists[:, :1]
    return lists


def _ends(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    """The first and the last slot of the cache are data like any other."""
    lists[:, 0], lists[:, -1] = 0, capacity - 1
    return lists


def _far(lists: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    """Near the end of the cache, where an offset in bytes no longer fits 31 bits."""
    return capacity - 2 - lists % min(capacity - 2, 4096)


PATTERNS: MappingProxyType[str, Pattern] = MappingProxyType(
    {
        "random": _keep,
        "first 16 none": _lead(16),
        "first 32 none": _lead(32),
        "alternating": _alternating,
        "only last": _only_last,
        "strewn": _strewn,
        "short": _short,
        "one row empty": _one_empty,
        "all rows empty": _all_empty,
        "outside": _outside,
        "too large": _too_large,
        "repeated": _repeated,
        "first and last slot": _ends,
        "far": _far,
    }
)
COUNTS = ("none", "full", "ragged", "behind: free slot", "behind: outside")


def make_lists(
    pattern: str, rows: int, topk: int, capacity: int, generator: torch.Generator
) -> Int[Tensor, "rows topk"]:
    """int32 lists of a pattern."""
    require_choice("pattern", pattern, tuple(PATTERNS))
    if capacity < topk + 2:
        raise ValueError(f"capacity must be at least topk + 2 = {topk + 2}, got {capacity}")
    lists = torch.empty(rows, topk, dtype=torch.int64)
    for row in range(rows):
        # Sampled, since a permutation of four million slots is slow; a set, since no slot repeats.
        found: dict[int, None] = {}
        while len(found) < topk:
            drawn = torch.randint(1, capacity - 1, (2 * topk,), generator=generator)
            found.update(dict.fromkeys(drawn.tolist()))
        lists[row] = torch.tensor(list(found)[:topk])
    return PATTERNS[pattern](lists, capacity, generator).to(torch.int32)


def make_counts(
    counts: str, lists: Int[Tensor, "rows topk"], capacity: int, generator: torch.Generator
) -> Int[Tensor, " rows"] | None:
    """int32 counts; "behind" also writes what must not be read into `lists`, in place."""
    require_choice("counts", counts, COUNTS)
    rows, topk = lists.shape
    if counts == "none":
        return None
    if counts == "full":
        return torch.full((rows,), topk, dtype=torch.int32)
    drawn = torch.randint(1, topk, (rows,), generator=generator) if topk > 1 else torch.ones(rows)
    for row, value in enumerate((topk - 1, 0, 1, topk)):
        if row < rows:
            drawn[row] = value
    behind = torch.arange(topk) >= drawn[:, None]
    if counts == "behind: free slot":
        lists[behind] = 0
    elif counts == "behind: outside":
        lists[behind] = INT32_MAX
    return drawn.to(torch.int32)

"""One layer on one rung: the result, what it must equal, and the pages that rungs 4 and up need."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import pages_needed, write_rows
from mla_ref.numerics import AttentionResult, Comparison, compare

PAGE_SIZE = 64


@dataclass(frozen=True)
class Run:
    """One layer on one rung.

    Attributes:
        result: What the rung computed.
        expected: What the rung below computed.
        seconds: Time of the attention alone.
        extra: Further comparisons that must agree, such as a ragged batch.
    """

    result: AttentionResult
    expected: AttentionResult
    seconds: float
    extra: tuple[Comparison, ...] = ()


def timed(attention: Callable[[], AttentionResult]) -> tuple[AttentionResult, float]:
    """The result of an attention and the seconds it took."""
    start = time.perf_counter()
    result = attention()
    return result, time.perf_counter() - start


def on_pages(
    run: Callable[..., AttentionResult],
    queries: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    below: AttentionResult,
) -> Run:
    """Run a whole text on pages, timed, and then a ragged batch of its beginnings.

    Pages lie in shuffled order and every slot that is not written holds NaN: if a tail or a foreign
    page leaked into a result, it would show. The ragged batch is a third of the text of which only
    the last 4 tokens are new, an empty request, and the first token alone.
    """
    n = queries[0].shape[0]
    whole, caches = filled_pages((0,), (n,), rows)
    result, seconds = timed(lambda: run(*queries, whole, *caches))

    third = max(n // 3, 1)
    new = min(4, third)
    picked = torch.tensor([*range(third - new, third), 0])
    ragged, caches = filled_pages((third - new, 0, 0), (new, 0, 1), rows)
    part = run(*(q[picked] for q in queries), ragged, *caches)
    extra = (compare(part.out, below.out[picked]), compare(part.lse, below.lse[picked]))
    return Run(result, below, seconds, extra)


def filled_pages(
    computed_lens: Sequence[int], query_lens: Sequence[int], rows: tuple[Tensor, ...]
) -> tuple[Step, list[Tensor]]:
    """A step, and caches that hold the first rows of the text for each of its requests."""
    lens = [c + q for c, q in zip(computed_lens, query_lens, strict=True)]
    pages = [pages_needed(n, PAGE_SIZE) for n in lens]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0))
    table = torch.full((len(lens), max(pages)), -1)
    for request, count in enumerate(pages):
        first = sum(pages[:request])
        table[request, :count] = order[first : first + count]
    everything = Step.build([0] * len(lens), lens, table, PAGE_SIZE)
    caches = []
    for row in rows:
        cache = row.new_full((len(order), PAGE_SIZE, *row.shape[1:]), torch.nan)
        write_rows(cache, row[everything.positions], everything.slot_mapping)
        caches.append(cache)
    return Step.build(computed_lens, query_lens, table, PAGE_SIZE), caches

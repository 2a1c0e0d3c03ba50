"""One layer on one rung: the result, what it must equal, and the pages that rungs 4 and up need."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
        result: What the rung hands on to the next: an attention result, or more.
        checks: By name, all comparisons that must agree. "out" is the one that a table shows, "lse"
            stands beside it where there is one; others are of ragged batches and the like.
        seconds: Time of the attention alone.
        note: What agreement shows, where only the run knows.
    """

    result: Any
    checks: dict[str, Comparison]
    seconds: float
    note: str = ""


def against(actual: AttentionResult, expected: AttentionResult) -> dict[str, Comparison]:
    """The comparisons of an attention result."""
    return {"out": compare(actual.out, expected.out), "lse": compare(actual.lse, expected.lse)}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and the seconds it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def on_pages(
    run: Callable[..., AttentionResult],
    queries: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    expected: AttentionResult,
    note: str = "",
) -> Run:
    """Run a whole text on pages, timed, and then a ragged batch of its beginnings.

    Pages lie in shuffled order and every slot that is not written holds NaN (in bytes, 0xFF): if a
    tail or a foreign page leaked into a result, it would show. The ragged batch is a third of the
    text of which only the last 4 tokens are new, an empty request, and the first token alone.
    """
    n = queries[0].shape[0]
    whole, caches = filled_pages((0,), (n,), rows)
    result, seconds = timed(lambda: run(*queries, whole, *caches))

    third = max(n // 3, 1)
    new = min(4, third)
    picked = torch.tensor([*range(third - new, third), 0])
    ragged, caches = filled_pages((third - new, 0, 0), (new, 0, 1), rows)
    part = run(*(q[picked] for q in queries), ragged, *caches)
    wanted = AttentionResult(expected.out[picked], expected.lse[picked])
    checks = {f"ragged batch, {name}": c for name, c in against(part, wanted).items()}
    return Run(result, against(result, expected) | checks, seconds, note)


def filled_pages(
    computed_lens: Sequence[int],
    query_lens: Sequence[int],
    rows: tuple[Tensor, ...],
    prompt_lens: Sequence[int] | None = None,
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
        # 0xFF is NaN as an E4M3 number, and four and two of them as a float32 and a bfloat16.
        nothing = 0xFF if row.dtype == torch.uint8 else torch.nan
        cache = row.new_full((len(order), PAGE_SIZE, *row.shape[1:]), nothing)
        write_rows(cache, row[everything.positions], everything.slot_mapping)
        caches.append(cache)
    step = Step.build(computed_lens, query_lens, table, PAGE_SIZE, prompt_lens=prompt_lens)
    return step, caches

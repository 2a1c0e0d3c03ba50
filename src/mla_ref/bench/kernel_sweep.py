"""Whole attention steps over contexts, concurrency and drafts: what each part takes, and its share.

The shares say where work on a kernel pays. On an H200 it is the top-k at 1k tokens and the index
scores at 128k, the two parts that grow with the context (`kernels/receipts/nvidia-h200/sweep`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_ref.bench.kernel_step import (
    CONVERT,
    MERGE,
    SCORES,
    TOPK,
    StepBatch,
    StepShape,
    step_contenders,
)
from mla_ref.bench.kernel_timer import KernelTimer
from mla_ref.bench.kernel_workload import random_cache
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.testing import Adapter

CONTEXTS = (1024, 16_384, 65_536, 131_072)
CONCURRENCY = (1, 4, 16, 64)
DRAFTS = (0, 1, 2, 3)
PREFILL_ROWS = 256


@dataclass(frozen=True)
class SweepPoint:
    """One step.

    Attributes:
        what: "verifier" or "prefill".
        shape: Its sizes.
        outcomes: By part: its time, or why there is none.
        torch_parts: Parts that the backend has not, timed as torch computes them.
    """

    what: str
    shape: StepShape
    outcomes: dict[str, Timing | NoTime]
    torch_parts: tuple[str, ...]

    def seconds(self, part: str) -> float | None:
        """The median of a part; None without a time."""
        found = self.outcomes.get(part)
        return found.median_s if isinstance(found, Timing) else None

    def total_s(self, kind: str) -> float | None:
        """A whole step by "decode" or "extend"; None if a part has no time.

        A decode's merge is inside it: `merge` stands apart and is not added.
        """
        parts = [self.seconds(part) for part in (SCORES, TOPK, CONVERT, kind)]
        return None if None in parts else sum(p for p in parts if p is not None)

    def share(self, part: str, kind: str) -> float | None:
        """A part's share of the whole step."""
        total, seconds = self.total_s(kind), self.seconds(part)
        return seconds / total if total and seconds else None

    def to_json(self) -> dict[str, Any]:
        """The point as a JSON object."""
        kinds = [kind for kind in ("decode", "extend") if kind in self.outcomes]
        return {
            "what": self.what,
            **asdict(self.shape),
            "torch_parts": list(self.torch_parts),
            "total_s": {kind: self.total_s(kind) for kind in kinds},
            "shares": {
                kind: {
                    part: self.share(part, kind)
                    for part in (SCORES, TOPK, CONVERT, kind, MERGE)
                    if part in self.outcomes
                }
                for kind in kinds
            },
            "parts": {part: _times(outcome) for part, outcome in self.outcomes.items()},
        }


def sweep_shapes(
    contexts: Sequence[int] = CONTEXTS,
    concurrency: Sequence[int] = CONCURRENCY,
    drafts: Sequence[int] = DRAFTS,
    *,
    heads: int = 8,
    topk: int = 2048,
    prefill_rows: int = PREFILL_ROWS,
) -> list[tuple[str, StepShape]]:
    """Every verifier batch, and at each context one prefill chunk of one request."""
    shapes = [
        ("verifier", StepShape(context, requests, 1 + n, heads, topk))
        for context in contexts
        for requests in concurrency
        for n in drafts
    ]
    chunks = [
        ("prefill", StepShape(context, 1, min(prefill_rows, context), heads, topk))
        for context in contexts
    ]
    return shapes + chunks


def measure_sweep(
    adapter: Adapter,
    shapes: Sequence[tuple[str, StepShape]],
    timer: KernelTimer,
    device: torch.device,
    *,
    memory_limit: int,
) -> Iterator[SweepPoint]:
    """Measure each step as it comes.

    Args:
        adapter: With a backend.
        shapes: From `sweep_shapes`.
        timer: See `kernel_timer`.
        device: Where.
        memory_limit: Bytes of cache and index keys at most; a larger step is a line without times.
    """
    fitting = [shape for _, shape in shapes if _bytes(shape) <= memory_limit]
    pages = max((shape.pages for shape in fitting), default=1)
    cache = random_cache(pages * 64, "fp8", device)
    for what, shape in shapes:
        if shape not in fitting:
            reason = f"its cache and index keys take {_bytes(shape) / 1e9:.1f} GB"
            yield SweepPoint(what, shape, {SCORES: NoTime(SCORES, reason)}, ())
            continue
        kinds = ("extend",) if what == "prefill" else ("decode", "extend")
        try:
            contenders, by_torch = step_contenders(adapter, StepBatch.random(shape, cache), kinds)
        except RuntimeError as error:  # out of memory: the twin holds every head's score
            reason = NoTime.failure(SCORES, error).why  # none of the backend's
            yield SweepPoint(what, shape, {SCORES: NoTime(SCORES, reason)}, ())
            continue
        outcomes = timer.race(contenders)
        named = {c.name: outcome for c, outcome in zip(contenders, outcomes, strict=True)}
        yield SweepPoint(what, shape, named, by_torch)


def _bytes(shape: StepShape) -> int:
    return shape.pages * 64 * 656 + shape.index_key_bytes


def _times(outcome: Timing | NoTime) -> dict[str, Any]:
    """A time without the comparisons that let it be one: 68 steps of five parts are many."""
    if isinstance(outcome, NoTime):
        return outcome.to_json()
    names = ("clock", "warmup", "median_s", "min_s", "max_s")
    return {name: getattr(outcome, name) for name in names}

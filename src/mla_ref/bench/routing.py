"""What the batch-wide rule loses: one prefill chunk sends every verifier row to extend.

The served router decides once for the whole batch (local-inference-lab/vllm#273). Here a batch of
verifier requests and one chunk runs under that rule, and again with each request routed by itself:

    batch-wide   extend: the verifier rows and the chunk, one pass a row
    by itself    decode: the verifier rows, in splits that are merged;  extend: the chunk

Both are timed on this machine, and their blocks are counted for a GPU. The two say different
things. torch on a CPU works off row after row, splits or not, so there is nothing to gain from
more blocks, and the merge is extra work. On a GPU blocks run at once, and what counts is how many
there are and how many keys each of them has to walk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_ref.batching.cost import SM120_MULTIPROCESSORS
from mla_ref.bench.gate import close_to, require_right
from mla_ref.bench.routing_step import VERIFIER_ROWS, MixedBatch, RoutedStep
from mla_ref.bench.timer import HOST_CLOCK, Clock, Contender, compare_times
from mla_ref.bench.timing import TimeComparison
from mla_ref.checks import describe, require_count
from mla_ref.numerics import AttentionResult

BATCH_WIDE, BY_ITSELF = "batch-wide", "by itself"
# Five pairs of runs in which the same one is faster come by chance one time in sixteen.
PAIRS_TO_TELL = 5
# float32 against rung 9 in float64. References were seen to err by 1e-6.
REL_L2, MAX_ABS = 2e-5, 1e-4


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, counted.

    Attributes:
        kind: "decode" or "extend".
        rows: Query rows.
        blocks: Thread blocks.
        num_splits: Pieces of each row's list.
        keys_per_block: Keys that a block walks one after the other, at most.
        waves: Rounds that the blocks take if each multiprocessor runs one at a time.
    """

    kind: str
    rows: int
    blocks: int
    num_splits: int
    keys_per_block: int
    waves: int


@dataclass(frozen=True)
class RoutingRow:
    """One batch, run and counted both ways.

    Attributes:
        num_verifiers: Requests of 4 rows.
        chunk: Rows of the prefill chunk.
        reason: Why the batch-wide rule went where it went.
        times: Batch-wide (a) and each request by itself (b), in turn.
        batch_wide: Launches of the batch-wide route.
        alone: Launches with each request by itself.
    """

    num_verifiers: int
    chunk: int
    reason: str
    times: TimeComparison
    batch_wide: tuple[Launch, ...]
    alone: tuple[Launch, ...]

    @property
    def lost_s(self) -> float:
        """Seconds that the batch-wide rule took more; below 0 if it was faster."""
        return self.times.a.median_s - self.times.b.median_s

    @property
    def finding(self) -> str:
        """What the times show: "lost", "reversed", "none" or "too few".

        Too few: fewer than five pairs of runs. None: not all of them agree on who was faster.
        """
        low, high = self.spread
        if len(self.times.pair_ratios) < PAIRS_TO_TELL:
            return "too few"
        if low <= 1 <= high:
            return "none"
        return "lost" if low > 1 else "reversed"

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a pair of runs, batch-wide over by itself."""
        return min(self.times.pair_ratios), max(self.times.pair_ratios)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return {
            "num_verifiers": self.num_verifiers,
            "chunk": self.chunk,
            "reason": self.reason,
            "finding": self.finding,
            "lost_s": self.lost_s,
            "times": self.times.to_json(),
            "batch_wide": [asdict(launch) for launch in self.batch_wide],
            "by_itself": [asdict(launch) for launch in self.alone],
        }


def measure_routing(
    chunks: Sequence[int],
    *,
    num_verifiers: int = 8,
    heads: int = 8,
    topk: int = 2048,
    context: int = 4096,
    multiprocessors: int = SM120_MULTIPROCESSORS,
    warmup: int = 1,
    repeats: int = PAIRS_TO_TELL,
    clock: Clock = HOST_CLOCK,
) -> Iterator[RoutingRow]:
    """Time the attention of one layer both ways, in float32 on the CPU, for each chunk.

    A time is taken only where the rows of both ways agree with each other and with float64.

    Args:
        chunks: Rows of the prefill chunk.
        num_verifiers: Requests that verify 3 drafts each.
        heads: Query heads.
        topk: Keys that a row attends to.
        context: Tokens that the cache holds of each request.
        multiprocessors: Of the GPU for which blocks are counted and decode is split.
        warmup: Runs that are not counted, 0 or more.
        repeats: Timed runs of each, 1 or more.
        clock: Times one call.

    Returns:
        An iterator over rows, in the order of `chunks`. A row is measured when it is asked for.

    Raises:
        GateError: A result is wrong.
        TypeError: A number is not an int.
        ValueError: A number is too small, or there is no chunk.
    """
    if not chunks:
        raise ValueError(f"chunks must hold a number of rows at least, got {describe(chunks)}")
    for chunk in chunks:
        require_count("chunks", chunk, at_least=1)
    counts = {"num_verifiers": num_verifiers, "heads": heads, "topk": topk}
    counts |= {"context": context, "multiprocessors": multiprocessors, "repeats": repeats}
    for name, value in counts.items():
        require_count(name, value, at_least=1)
    require_count("warmup", warmup)

    def rows() -> Iterator[RoutingRow]:
        for chunk in chunks:
            with torch.inference_mode():
                batch = MixedBatch.random(
                    num_verifiers,
                    chunk,
                    heads=heads,
                    topk=topk,
                    context=context,
                    multiprocessors=multiprocessors,
                )
                times = _times(batch, warmup, repeats, clock)
            yield RoutingRow(
                num_verifiers,
                chunk,
                batch.batch_wide.way.reason,
                times,
                _launches(batch.batch_wide, multiprocessors),
                _launches(batch.alone, multiprocessors),
            )

    return rows()


def _times(batch: MixedBatch, warmup: int, repeats: int, clock: Clock) -> TimeComparison:
    """Both ways in turn, after they were held against each other."""
    limits = {"rel_l2": REL_L2, "max_abs": MAX_ABS}
    together = batch.batch_wide()
    same_rows = AttentionResult(together.out[batch.rows], together.lse[batch.rows])
    check = close_to(same_rows._asdict(), **limits)
    require_right(BY_ITSELF, "held against the batch-wide route,", batch.alone(), check)
    expected = batch.batch_wide.expected()
    of_alone = AttentionResult(expected.out[batch.rows], expected.lse[batch.rows])
    return compare_times(
        Contender(BATCH_WIDE, batch.batch_wide, close_to(expected._asdict(), **limits)),
        Contender(BY_ITSELF, batch.alone, close_to(of_alone._asdict(), **limits)),
        warmup=warmup,
        repeats=repeats,
        clock=clock,
    )


def _launches(routed: RoutedStep, multiprocessors: int) -> tuple[Launch, ...]:
    segments, topk = routed.way.segments, routed.plan.spec.topk
    return tuple(
        Launch(
            kind=cost.kind,
            rows=segment.row_end - segment.row_start,
            blocks=cost.blocks,
            num_splits=cost.num_splits,
            keys_per_block=-(-topk // cost.num_splits),
            waves=-(-cost.blocks // multiprocessors),
        )
        for segment, cost in zip(segments, routed.costs(multiprocessors), strict=True)
    )


def what_was_lost(row: RoutingRow) -> str:
    """One sentence: what the batch-wide rule lost here, or nothing, or that runs are too few."""
    a, b = row.times.a.median_s, row.times.b.median_s
    low, high = row.spread
    pairs = len(row.times.pair_ratios)
    runs = f"{pairs} pair{'s' * (pairs != 1)} of runs"
    spread = f"it took {low:.2f} to {high:.2f} times as long in {runs}"
    chunk = f"Chunk of {row.chunk:,}: the batch-wide rule"
    if row.finding == "too few":
        too_few = f"too few to tell what it lost ({PAIRS_TO_TELL} are needed)"
        return f"{chunk} ran in {runs}, {too_few}; it took {low:.2f} to {high:.2f} times as long."
    if row.finding == "none":
        return f"{chunk} lost nothing that shows here; {spread}."
    if row.finding == "reversed":
        return f"{chunk} lost nothing here, it was {100 * (1 - a / b):.0f}% faster; {spread}."
    return f"{chunk} lost {100 * (1 - b / a):.0f}% of the step here; {spread}."


def what_is_counted(row: RoutingRow, multiprocessors: int = SM120_MULTIPROCESSORS) -> str:
    """One sentence: what the verifier rows are to a GPU under each rule."""
    rows = row.num_verifiers * VERIFIER_ROWS
    together, alone = row.batch_wide[0], row.alone[0]
    extend_blocks = together.blocks * rows // together.rows
    return (
        f"Counted for {multiprocessors} SMs: the {rows:,} verifier rows are {extend_blocks:,} "
        f"blocks of {together.keys_per_block:,} keys in {together.kind}, and {alone.blocks:,} of "
        f"{alone.keys_per_block:,} in {alone.kind}, which is a launch of its own and a merge."
    )

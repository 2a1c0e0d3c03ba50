"""What sparse attention saves: one decode step of one layer against the length of the cache.

Three ways to run the same step of 4 new tokens, on the same weights:

    peer     transformers' layer: K and V of all heads are expanded anew, the choice is a mask
    dense    rung 6: absorbed, every head reads every cached row
    sparse   rungs 8 and 10: the indexer chooses at most top-k rows, and only they are read

The peer and dense grow with the length. In a sparse step only the index scores do: for each key
2 * 64 * 128 operations a row and one key of 128 numbers, against 2 * 128 * 1,088 operations and a
row of 576 numbers. The linear maps around the attention are the same in all and do not grow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_ref.bench.gate import close_to, require_right
from mla_ref.bench.sparse_peer import PeerStep
from mla_ref.bench.sparse_step import REL_L2, ROWS, DecodeStep, Layer
from mla_ref.bench.timer import HOST_CLOCK, Clock, Contender, measure
from mla_ref.bench.timing import Timing
from mla_ref.checks import describe, require_count
from mla_ref.layers import MLAConfig

PEER, DENSE, SPARSE, SPARSE_FP8 = "peer", "dense", "sparse float32", "sparse FP8"
NAMES = (PEER, DENSE, SPARSE, SPARSE_FP8)
# Tokens at which all are held against each other before anything is timed.
GATE_LENGTH = 128
# The peer turns by float32 angles: 2e-5 off at 4,096 tokens, and more the longer the context.
PEER_REL_L2 = 1e-3


@dataclass(frozen=True)
class SparseRow:
    """One contender at one length.

    Attributes:
        name: One of `NAMES`.
        length: Tokens in the cache, the step's own included.
        timing: Times of the step, behind the gate.
    """

    name: str
    length: int
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return {"name": self.name, "length": self.length, "timing": self.timing.to_json()}


@dataclass(frozen=True)
class Ratio:
    """The median time of one row over that of another.

    Attributes:
        what: Which, in words.
        value: The ratio.
    """

    what: str
    value: float

    def to_json(self) -> dict[str, Any]:
        """The ratio as a JSON object."""
        return {"what": self.what, "value": self.value}


@torch.inference_mode()
def hold_against_each_other(layer: Layer, *, peer: bool) -> None:
    """Run all at a short length where top-k covers every key, and compare the outputs.

    The peer with dense, sparse with dense, and sparse over FP8 rows with rung 7, which is dense
    over such rows.

    Args:
        layer: The weights.
        peer: Whether the peer takes part.

    Raises:
        GateError: Two results differ.
    """
    length = min(GATE_LENGTH, layer.indexer_config.topk)
    problem = DecodeStep.random(layer, length)
    dense, dense_fp8 = problem.dense()(), problem.dense_fp8()
    others = [
        (SPARSE, "dense", problem.sparse("bf16"), dense),
        (SPARSE_FP8, "rung 7", problem.sparse("fp8"), dense_fp8),
    ]
    if peer:
        run = PeerStep(problem)
        run.fill()
        others.insert(0, (PEER, "dense", run, dense))
    for name, against, step, expected in others:
        largest = float(expected.out.abs().max())
        check = close_to({"out": expected.out}, rel_l2=REL_L2, max_abs=REL_L2 * largest)
        require_right(name, f"at {length} tokens, held against {against},", step(), check)


def measure_sparse(
    config: MLAConfig,
    lengths: Sequence[int],
    *,
    peer_length: int = 4096,
    warmup: int = 1,
    repeats: int = 3,
    clock: Clock = HOST_CLOCK,
) -> Iterator[SparseRow]:
    """Time one decode step of one layer at each length, in float32 on the CPU.

    First all contenders are held against each other where top-k covers all keys. Then a time is
    taken only where the output agrees with float64 attention over the keys that were chosen, and
    the chosen keys have the best index scores in float64.

    Args:
        config: Dimensions of the layer, with an indexer.
        lengths: Tokens in the cache, this step's 4 included.
        peer_length: The longest cache at which the peer runs; 0 for never. Its K and V take 0.9 GB
            for each 4,096 tokens of DeepSeek-V3.2.
        warmup: Runs that are not counted, 0 or more.
        repeats: Timed runs of each, 1 or more.
        clock: Times one call.

    Returns:
        An iterator over rows, by length and then in the order of `NAMES`. A row is measured when
        it is asked for.

    Raises:
        GateError: A result is wrong.
        ImportError: The peer is wanted and transformers is missing.
        TypeError: A number is not an int.
        ValueError: A number is too small, there is no length, or the layer has no indexer.
    """
    if not lengths:
        raise ValueError(f"lengths must hold a length at least, got {describe(lengths)}")
    for length in lengths:
        require_count("lengths", length, at_least=ROWS)
    require_count("peer_length", peer_length)
    require_count("warmup", warmup)
    require_count("repeats", repeats, at_least=1)
    if config.indexer is None:
        raise ValueError(f"config must have an indexer, {config.name} has none")
    require_count("config.indexer.topk", config.indexer.topk, at_least=ROWS)

    def rows() -> Iterator[SparseRow]:
        layer = Layer.random(config)
        hold_against_each_other(layer, peer=peer_length >= min(lengths))
        for length in lengths:
            for contender in _contenders(layer, length, peer=length <= peer_length):
                with torch.inference_mode():
                    timing = measure(
                        f"{contender.name}, {length} tokens",
                        contender.run,
                        contender.check,
                        warmup=warmup,
                        repeats=repeats,
                        clock=clock,
                        before_each=contender.before_each,
                    )
                yield SparseRow(contender.name, length, timing)

    return rows()


def _contenders(layer: Layer, length: int, *, peer: bool) -> Iterator[Contender[Any]]:
    """One after the other, so that only one cache is held at a time."""
    with torch.inference_mode():
        problem = DecodeStep.random(layer, length)
    if peer:
        limits = {"rel_l2": PEER_REL_L2, "scores_rel_l2": PEER_REL_L2}
        with torch.inference_mode():
            run = PeerStep(problem)
        yield Contender(PEER, run, problem.check("bf16", **limits), run.fill)
    yield Contender(DENSE, problem.dense(), problem.check("bf16"))
    yield Contender(SPARSE, problem.sparse("bf16"), problem.check("bf16"))
    yield Contender(SPARSE_FP8, problem.sparse("fp8"), problem.check("fp8"))


def ratios(rows: Sequence[SparseRow]) -> list[Ratio]:
    """How many times as long the others take, and how a sparse step grows.

    Args:
        rows: What `measure_sparse` gave.

    Returns:
        For each length and each kind of cache the peer and dense over sparse, then sparse at the
        greatest length over sparse at the smallest.
    """
    medians = {(row.name, row.length): row.timing.median_s for row in rows}
    lengths = sorted({row.length for row in rows})
    found = [
        Ratio(f"{slow} / {fast} at {n:,}", medians[slow, n] / medians[fast, n])
        for n in lengths
        for slow in (PEER, DENSE)
        for fast in (SPARSE, SPARSE_FP8)
        if (slow, n) in medians and (fast, n) in medians
    ]
    if len(lengths) > 1:
        short, long = lengths[0], lengths[-1]
        found += [
            Ratio(f"{name} {long:,} / {short:,}", medians[name, long] / medians[name, short])
            for name in (DENSE, SPARSE, SPARSE_FP8)
        ]
    return found

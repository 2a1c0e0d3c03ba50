"""The climb: activations go up rung by rung, and each result is held against the rung below."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_ref.ladder.activations import LayerActivations
from mla_ref.ladder.facts import kv_bytes, shown
from mla_ref.ladder.run import Run
from mla_ref.ladder.rung_runs import RUNNERS, gaps
from mla_ref.ladder.rungs import RUNGS, Rung
from mla_ref.numerics import Comparison

# Relative L2 allowed between neighbours. float32 sums of 500 terms in another order differ by a few
# 1e-7; in bfloat16 rung 5 starts from rounded latents, an error of 2^-9 in each number.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class RungReport:
    """What one rung did.

    Attributes:
        rung: The row of the table.
        out: Comparison of the outputs in the layer where they differ most.
        lse: Comparison of the log-sum-exps in the layer where they differ most; None where the rung
            has none.
        layer: The layer of `out`.
        wrong: Each check that does not agree: its layer, its name and the comparison.
        limit: Relative L2 that was allowed.
        seconds: Time of the attention itself over all layers, checks not counted.
        kv_bytes: Bytes cached for one token in one layer.
        shown: One line in plain words.
    """

    rung: Rung
    out: Comparison
    lse: Comparison | None
    layer: int
    wrong: tuple[tuple[int, str, Comparison], ...]
    limit: float
    seconds: float
    kv_bytes: int
    shown: str

    @property
    def ok(self) -> bool:
        """Whether every check of every layer agreed."""
        return not self.wrong


def climb(layers: Sequence[LayerActivations]) -> Iterator[RungReport]:
    """Take every layer up as far as all can climb; yields a report after each rung.

    Args:
        layers: From `smollm2_activations` or `random_activations`; at least one.
    """
    if not layers:
        raise ValueError("layers must hold at least one layer's activations, got none")
    limit = LIMITS[layers[0].q.dtype]
    below: list[Any] = []
    missing = set().union(*map(gaps, layers))
    for number, run in RUNNERS.items():
        if number in missing:
            continue
        rung = RUNGS[number - 1]
        runs = [run(layer, *below[index : index + 1]) for index, layer in enumerate(layers)]
        yield _report(rung, layers, runs, limit)
        below = [r.result for r in runs]


def _report(
    rung: Rung, layers: Sequence[LayerActivations], runs: list[Run], limit: float
) -> RungReport:

    def badness(check: Comparison) -> tuple[int, float]:
        return check.nan_mismatches + check.inf_mismatches, check.rel_l2

    outs = [r.checks["out"] for r in runs]
    lses = [r.checks["lse"] for r in runs if "lse" in r.checks]
    worst = max(range(len(runs)), key=lambda i: badness(outs[i]))
    return RungReport(
        rung=rung,
        out=outs[worst],
        lse=max(lses, key=badness, default=None),
        layer=layers[worst].layer,
        wrong=tuple(
            (layer.layer, name, check)
            for layer, run in zip(layers, runs, strict=True)
            for name, check in run.checks.items()
            if not check.agrees(rel_l2=limit)
        ),
        limit=limit,
        seconds=sum(r.seconds for r in runs),
        kv_bytes=kv_bytes(rung, layers[0]),
        shown=runs[worst].note or shown(rung, layers[0]),
    )

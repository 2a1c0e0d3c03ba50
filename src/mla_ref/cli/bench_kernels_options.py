"""The options of `mla-ref bench kernels`, and what follows from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

    from mla_ref.bench.kernel_parts import PartLine
    from mla_ref.bench.kernel_timer import KernelTimer
    from mla_ref.bench.kernel_workload import KernelWorkload
    from mla_ref.bench.peers import Peer
    from mla_ref.bench.timing import NoTime, Timing
    from mla_ref.testing import Adapter

# A GPU's cache outgrows its L2; without one there is no L2 to outgrow, only memory to save.
CPU_SLOTS = 16_384
# Of one request, for the index scores.
GPU_KEYS, CPU_KEYS = 65_536, 1024


@dataclass(frozen=True)
class KernelOptions:
    """What all runs of the verb share.

    Attributes:
        backend: A name or module:object.
        device: Where.
        heads: Query heads.
        rows: Query rows.
        topk: Entries of a list.
        workload: "disjoint", "verifier" or "both".
        overlap: A number from 0 to 1, or "indexer".
        cache_format: "fp8" or "bf16".
        slots: Of the cache; None for the default.
        sample: Rows of each result that are checked.
        repeats: Rounds.
        launches: Plain launches in place of graphs.
        peers: Whether to compare with other libraries.
        flashmla: A shared library with FlashMLA's operators.
    """

    backend: str
    device: "torch.device"
    heads: Sequence[int]
    rows: Sequence[int]
    topk: int
    workload: str
    overlap: str
    cache_format: str
    slots: int | None
    sample: int
    repeats: int
    launches: bool
    peers: bool
    flashmla: Path | None

    @property
    def names(self) -> tuple[str, ...]:
        """The workloads."""
        from mla_ref.bench.kernel_workload import WORKLOADS
        from mla_ref.checks import require_choice

        require_choice("--workload", self.workload, ("both", *WORKLOADS))
        return WORKLOADS if self.workload == "both" else (self.workload,)

    def number_of_points(self) -> int:
        """Workloads times heads times rows."""
        return len(self.names) * len(self.heads) * len(self.rows)

    def workloads(self) -> "tuple[Iterator[KernelWorkload], str]":
        """The workloads over one cache, each made when it is asked for; and the overlap in words.

        Raises:
            ValueError: An option does not fit.
        """
        from mla_ref.bench.kernel_workload import (
            KernelShape,
            make_workload,
            random_cache,
            slots_beyond_l2,
        )
        from mla_ref.platform import gpu_of

        overlap, words = self._overlap() if "verifier" in self.names else (0.0, "")
        slots = self.slots
        if slots is None and self.device.type == "cuda":
            slots = slots_beyond_l2(gpu_of(self.device).l2_bytes)
        shapes = [
            (name, KernelShape(rows, heads, self.topk, self.cache_format))
            for name in self.names
            for heads in self.heads
            for rows in self.rows
        ]
        cache = random_cache(CPU_SLOTS if slots is None else slots, self.cache_format, self.device)
        made = (make_workload(name, shape, cache, overlap=overlap) for name, shape in shapes)
        return made, words

    def _overlap(self) -> tuple[float, str]:
        if self.overlap == "indexer":
            from mla_ref.bench.verifier_overlap import measure_overlap

            found = measure_overlap()
            return found.of_workload, str(found)
        try:
            return float(self.overlap), f"the rows of a request have {self.overlap} in common"
        except ValueError:
            raise ValueError(
                f"--overlap must be a number from 0 to 1, or indexer, got {self.overlap!r}"
            ) from None

    def timer(self) -> "KernelTimer":
        """Of the device."""
        from mla_ref.bench.kernel_timer import kernel_timer

        return kernel_timer(
            self.device, repeats=self.repeats, mode="launches" if self.launches else "graph"
        )

    def chosen_peers(self) -> "Sequence[Peer]":
        """All that this project knows, or none."""
        from mla_ref.bench.peers import B12x, FlashInferSM120, FlashMLA, TorchSDPA

        if not self.peers:
            return ()
        return FlashMLA(self.flashmla), B12x(), FlashInferSM120(), TorchSDPA()

    def parts(self, adapter: "Adapter") -> "Iterator[PartLine]":
        """A merge and index scores beside those of other libraries."""
        from mla_ref.bench.kernel_parts import measure_parts

        if self.peers:
            yield from measure_parts(
                adapter,
                self.timer(),
                self.device,
                rows=max(self.rows),
                heads=max(self.heads),
                keys=GPU_KEYS if self.device.type == "cuda" else CPU_KEYS,
            )


def judge(backend: str, outcomes: "Sequence[Timing | NoTime]") -> None:
    """End with exit code 1 if the backend failed, or if nothing of it was timed."""
    from mla_ref.bench.timing import Timing

    failures = [x for x in outcomes if not isinstance(x, Timing) and x.failed]
    if failures:
        words = f"{backend} has a wrong result or fails: {failures[0].name}: {failures[0].why}"
    elif not any(isinstance(x, Timing) for x in outcomes):
        words = f"nothing of {backend} was timed"
    else:
        return
    typer.echo(f"mla-ref: error: {words}", err=True)
    raise typer.Exit(1)

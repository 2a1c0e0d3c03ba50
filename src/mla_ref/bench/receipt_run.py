"""Make a receipt: the conformance cases first, then the table, in minutes and within 8 GB."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from mla_ref.bench.ceilings import Ceilings
from mla_ref.bench.kernel_machine import KernelMachine
from mla_ref.bench.kernels import KernelPoint
from mla_ref.bench.receipt import FORMAT, Receipt, receipt_lines
from mla_ref.bench.timing import Timing
from mla_ref.platform import peak_device_memory, reset_peak_device_memory
from mla_ref.testing.cases import cases
from mla_ref.testing.conformance import Worker
from mla_ref.testing.outcome import STATUSES

CASE_SECONDS = 60.0


@dataclass(frozen=True)
class CheckCounts:
    """What came of the conformance cases.

    Attributes:
        counts: By kind, how many had which outcome.
        bad: Names of the cases that failed, crashed or timed out.
    """

    counts: Mapping[str, Mapping[str, int]]
    bad: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether at least one case ran and none is bad."""
        return not self.bad and any(kind.get("passed") for kind in self.counts.values())


def run_check(
    backend: str, device: torch.device, progress: Callable[[str], None] = lambda kind: None
) -> CheckCounts:
    """Run every conformance case of a backend in a process of its own.

    Args:
        backend: A name or module:object.
        device: Where.
        progress: Is told each kind as it begins.
    """
    counts, bad = {}, []
    with Worker(backend, device=str(device)) as worker:
        for kind in worker.kinds:
            progress(kind)
            results = [worker.run(case, CASE_SECONDS) for case in cases(kind)]
            found = {s: sum(r.status == s for r in results) for s in STATUSES}
            counts[kind] = {status: n for status, n in found.items() if n}
            bad += [r.case for r in results if r.bad]
    return CheckCounts(counts, tuple(bad))


class ReceiptRun:
    """The clock and the memory of a run, from its making to its receipt."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.monotonic()
        if device.type == "cuda":
            reset_peak_device_memory(device)

    def receipt(
        self,
        *,
        backend: str,
        kernel_hash: str | None,
        machine: KernelMachine,
        ceilings: Ceilings,
        check: CheckCounts,
        points: list[KernelPoint],
    ) -> Receipt:
        """What the run gave."""
        clocks = {
            line.outcome.clock
            for point in points
            for line in point.lines
            if line.own and isinstance(line.outcome, Timing)
        }
        return Receipt(
            format=FORMAT,
            day=datetime.now(UTC).date().isoformat(),
            backend=backend,
            kernel_hash=kernel_hash,
            machine=machine,
            ceilings=ceilings,
            clock="; ".join(sorted(clocks)),
            check=check.counts,
            seconds=round(time.monotonic() - self._start, 1),
            peak_bytes=peak_device_memory(self._device) if self._device.type == "cuda" else None,
            lines=receipt_lines(points),
        )

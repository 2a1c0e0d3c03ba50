"""A receipt: what one card gave with one version of the kernels, for anyone to read and compare.

The claim "ran on a GPU" is a receipt in `kernels/receipts/`. It is plain JSON, it names the kernels
by the hash of their source, and it holds no host name, user or path. When a kernel changes, its
receipts are stale until someone runs them again (`is_fresh`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mla_ref.bench.ceilings import Ceilings
from mla_ref.bench.gate import Verdict
from mla_ref.bench.kernel_machine import KernelMachine
from mla_ref.bench.kernels import KernelLine, KernelPoint
from mla_ref.bench.receipt_text import from_json, public_text, require_public
from mla_ref.bench.timing import Timing

FORMAT = 1


@dataclass(frozen=True)
class ReceiptLine:
    """One contender on one workload; a time stands beside the error that it was checked with.

    Attributes:
        workload: "disjoint" or "verifier".
        rows: Query rows.
        heads: Query heads.
        topk: Entries of a list.
        overlap: Of a verifier workload.
        contender: The backend's "decode", "extend", "decode in 1 split", or a peer's name.
        own: Whether it is the backend's.
        how: Which of a peer's ways this is.
        timed: What a peer's time holds and leaves out.
        note: What must be known of a peer's adapter.
        median_us: Median of the rounds; None without a time.
        lowest_us: The fastest round.
        highest_us: The slowest round.
        why: Why there is no time.
        checked_rows: Rows that were judged in float64, before and after timing.
        out_max_abs: Largest error of an output.
        out_rel_l2: Relative error of the outputs.
        lse_max_abs: Largest error of an LSE; None where it is not returned.
        unique_bytes: Cached bytes that are named, each once.
        gathered_bytes: The same, as often as they are named.
        flops: Operations of the two products.
        floor_us: What no kernel can go below here.
    """

    workload: str
    rows: int
    heads: int
    topk: int
    overlap: float
    contender: str
    own: bool
    how: str
    timed: str
    note: str
    median_us: float | None
    lowest_us: float | None
    highest_us: float | None
    why: str | None
    checked_rows: int
    out_max_abs: float | None
    out_rel_l2: float | None
    lse_max_abs: float | None
    unique_bytes: int
    gathered_bytes: int
    flops: int
    floor_us: float


@dataclass(frozen=True)
class Receipt:
    """All of one run.

    Attributes:
        format: Version of this layout.
        day: Of the run, YYYY-MM-DD.
        backend: What was measured.
        kernel_hash: Hash of its source; None where the backend names none.
        machine: Where.
        ceilings: Measured rates.
        clock: How the times were taken.
        check: Conformance cases by kind: how many had which outcome.
        seconds: Of the whole run.
        peak_bytes: Device memory at most; None on a CPU.
        lines: All contenders.
    """

    format: int
    day: str
    backend: str
    kernel_hash: str | None
    machine: KernelMachine
    ceilings: Ceilings
    clock: str
    check: Mapping[str, Mapping[str, int]]
    seconds: float
    peak_bytes: int | None
    lines: tuple[ReceiptLine, ...]

    def __post_init__(self) -> None:
        """Raise a ValueError where the receipt cannot be what it says."""
        if self.format != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {self.format}")
        date.fromisoformat(self.day)
        for line in self.lines:
            if (line.median_us is None) == (line.why is None):
                raise ValueError(
                    f"lines must hold a time or why there is none: {line.contender}, "
                    f"{line.rows} rows, {line.heads} heads"
                )
            if line.median_us is not None and not (line.median_us > 0 and line.checked_rows > 0):
                raise ValueError(
                    f"lines must hold times above 0 of checked rows: {line.contender}, "
                    f"{line.rows} rows, {line.heads} heads"
                )

    def to_text(self) -> str:
        """The file's text.

        Raises:
            ValueError: It would name this machine or its user.
        """
        return require_public(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        ValueError: The file is not one; the message names the field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    found = from_json(Receipt, data, path.name)
    if not isinstance(found, Receipt):
        raise TypeError(f"{path.name} is no receipt")
    return found


def is_fresh(receipt: Receipt, current_hash: str | None) -> bool:
    """Whether a receipt is of the kernels as they are now; without a hash it is not."""
    return receipt.kernel_hash is not None and receipt.kernel_hash == current_hash


def receipt_lines(points: Sequence[KernelPoint]) -> tuple[ReceiptLine, ...]:
    """The lines of a table of points."""
    return tuple(_line(point, line) for point in points for line in point.lines)


def _line(point: KernelPoint, line: KernelLine) -> ReceiptLine:
    timing = line.outcome if isinstance(line.outcome, Timing) else None
    errors = _errors(timing.verdicts) if timing else {}
    return ReceiptLine(
        workload=point.workload,
        rows=point.shape.rows,
        heads=point.shape.heads,
        topk=point.shape.topk,
        overlap=point.overlap,
        contender=line.name,
        own=line.own,
        how=line.how,
        timed=line.timed,
        note=line.note,
        median_us=_us(timing.median_s) if timing else None,
        lowest_us=_us(timing.min_s) if timing else None,
        highest_us=_us(timing.max_s) if timing else None,
        why=None if isinstance(line.outcome, Timing) else public_text(line.outcome.why),
        checked_rows=point.checked_rows if timing else 0,
        out_max_abs=errors.get("out", (None, None))[0],
        out_rel_l2=errors.get("out", (None, None))[1],
        lse_max_abs=errors.get("lse", (None, None))[0],
        unique_bytes=point.unique_bytes,
        gathered_bytes=point.gathered_bytes,
        flops=point.shape.flops,
        floor_us=_us(point.floor_s),
    )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _errors(verdicts: Sequence[Verdict]) -> dict[str, tuple[float, float]]:
    found = {}
    for verdict in verdicts:
        comparison: Any = getattr(verdict, "comparison", None)
        if comparison is not None:
            found[getattr(verdict, "what", "")] = (comparison.max_abs, comparison.rel_l2)
    return found

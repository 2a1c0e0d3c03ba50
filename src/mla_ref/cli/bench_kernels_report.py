"""What `mla-ref bench kernels` prints: the table, its reading aid, and trials of a tuning."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from mla_ref.bench.ceilings import Ceilings
    from mla_ref.bench.kernels import KernelPoint
    from mla_ref.bench.tune import Trial

HEADINGS = ("rows", "heads", "kernel", "us", "MB", "TB/s", "TFLOP/s", "floor", "/decode")
LEFT = ("kernel", "config", "")


def points_table(points: Sequence["KernelPoint"], workload: str) -> Table:
    """All contenders of one workload; one without a time is a line that says so."""
    table = _table(HEADINGS)
    mine = [point for point in points if point.workload == workload]
    for point, following in zip_longest(mine, mine[1:]):
        for number, line in enumerate(point.lines):
            name = f"{line.name}, {line.how}" if line.how and line.seconds else line.name
            ratio = point.ratio(line)
            cells = ["-"] * 6
            if line.seconds:
                cells = [
                    f"{line.seconds * 1e6:,.1f}",
                    f"{point.unique_bytes / 1e6:,.1f}",
                    f"{point.gathered_bytes / line.seconds / 1e12:.2f}",
                    f"{point.shape.flops / line.seconds / 1e12:.3g}",
                    f"{point.floor_s / line.seconds:.0%}",
                    f"{ratio:.2f}" if ratio else "-",
                ]
            table.add_row(
                f"{point.shape.rows:,}" if number == 0 else "",
                f"{point.shape.heads:,}" if number == 0 else "",
                name,
                *cells,
                end_section=following is not None and number == len(point.lines) - 1,
            )
    return table


def reading_aid(points: Sequence["KernelPoint"], ceilings: "Ceilings") -> list[str]:
    """What the columns are, how the results were judged, and why some have no time."""
    checked = sorted({point.checked_rows for point in points})
    lines = [
        "MB: cached bytes that the lists name, each once. TB/s: as often as they are named. floor: "
        f"share of the time that {ceilings.copy_bytes_s / 1e12:.3g} TB/s (a copy: "
        f"{ceilings.copy_what}) or {ceilings.matmul_flops_s / 1e12:.3g} TFLOP/s "
        f"({ceilings.matmul_what}) would need. An empty kernel takes "
        f"{ceilings.empty_s * 1e6:.1f} us here.",
        "/decode: time over that of this backend's decode; above 1, decode is faster.",
        f"Gate: {' to '.join(map(str, checked))} rows of each result were held against float64 at "
        "this very shape, before and after timing: this backend's by the precision rule, a "
        "library's by the tolerance of its own tests.",
    ]
    timed = {line.name: line for p in points for line in p.lines if not line.own and line.seconds}
    lines += [f"{name}: timed is {line.timed}." for name, line in timed.items()]
    reasons: dict[tuple[str, str], int] = {}
    for point in points:
        for line in point.lines:
            if line.seconds is None:
                key = (line.name, getattr(line.outcome, "why", ""))
                reasons[key] = reasons.get(key, 0) + 1
    for (name, why), times in reasons.items():
        where = "" if times == len(points) else f" ({times} of {len(points)} lines)"
        lines.append(f"No time of {name}{where}: {why}")
    notes = {line.name: line.note for p in points for line in p.lines if line.note}
    lines += [f"The adapter of {name} is {note}." for name, note in notes.items()]
    return lines


def trials_table(rounds: Sequence[tuple["Trial", ...]]) -> Table:
    """Every configuration, the fastest of each workload first."""
    table = _table(("workload", "rows", "heads", "config", "us", ""))
    for trials, following in zip_longest(rounds, rounds[1:]):
        for number, trial in enumerate(trials):
            shape = trial.workload.shape
            words = [
                "fastest" if number == 0 and trial.seconds else "",
                "chosen by the backend" if trial.chosen else "",
                "" if trial.seconds else getattr(trial.outcome, "why", ""),
            ]
            table.add_row(
                trial.workload.name if number == 0 else "",
                f"{shape.rows:,}" if number == 0 else "",
                f"{shape.heads:,}" if number == 0 else "",
                trial.config,
                f"{trial.seconds * 1e6:,.1f}" if trial.seconds else "-",
                ", ".join(word for word in words if word),
                end_section=following is not None and number == len(trials) - 1,
            )
    return table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        left = heading in (*LEFT, "workload")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "")
    return table

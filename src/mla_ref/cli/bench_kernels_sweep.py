"""`mla-ref bench kernels --sweep`: whole attention steps, part by part."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mla_ref.cli.bench_kernels_options import KernelOptions, judge
from mla_ref.cli.bench_report import progress

if TYPE_CHECKING:
    from mla_ref.bench.kernel_sweep import SweepPoint

# Of the device's free memory; on a CPU, where the sweep is a trial, 1 GB.
SHARE_OF_MEMORY = 0.5
CPU_MEMORY = 10**9


def run_sweep(
    options: KernelOptions,
    contexts: Sequence[int],
    concurrency: Sequence[int],
    drafts: Sequence[int],
    *,
    as_json: bool,
) -> None:
    """Measure, then print a table of totals and shares."""
    from mla_ref.backends import kernel_hash
    from mla_ref.bench.kernel_machine import read_machine
    from mla_ref.bench.kernel_sweep import measure_sweep, sweep_shapes
    from mla_ref.platform import gpu_of
    from mla_ref.testing import load_target

    if len(options.heads) > 1:
        raise ValueError(f"--sweep takes one number of --heads, got {options.heads}; say 8")
    memory = CPU_MEMORY
    if options.device.type == "cuda":
        memory = int(SHARE_OF_MEMORY * gpu_of(options.device).free_memory)
    shapes = sweep_shapes(contexts, concurrency, drafts, heads=options.heads[0], topk=options.topk)
    adapter = load_target(options.backend)
    points: list[SweepPoint] = []
    with progress() as bar:
        task = bar.add_task("measuring", total=len(shapes))
        for point in measure_sweep(
            adapter,
            shapes,
            options.timer(),
            options.device,
            memory_limit=memory,
        ):
            points.append(point)
            bar.update(task, advance=1)
    machine = read_machine(options.device)
    if as_json:
        report = {
            "backend": options.backend,
            "kernel_hash": kernel_hash(adapter.backend),
            "machine": machine.to_json(),
            "points": [point.to_json() for point in points],
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(options, str(machine), points)
    judge(options.backend, [x for point in points for x in point.outcomes.values()])


def _print(options: KernelOptions, machine: str, points: "list[SweepPoint]") -> None:
    console = Console(highlight=False)
    console.print(f"{options.backend} on {machine}", markup=False)
    console.print(
        f"Attention steps of one layer, heads: {options.heads[0]}, top-k {options.topk:,}; "
        "microseconds of a whole step by decode and by extend, the share of each part, and what "
        "the attention and a merge take by themselves"
    )
    for what, kind in (("verifier", "decode"), ("prefill", "extend")):
        console.print(f"\n{what}: shares of the step by {kind}")
        console.print(_table([point for point in points if point.what == what], kind))
    by_torch = dict.fromkeys(name for point in points for name in point.torch_parts)
    if by_torch:
        console.print(f"As torch computes them, the backend has none: {', '.join(by_torch)}.")
    console.print(
        "A decode's merge is inside it and stands here by itself as well. Scores: one call a "
        "request. Gate: each part was held against its twin or float64, before and after timing."
    )
    reasons = dict.fromkeys(
        f"{point.shape.context:,} tokens, requests: {point.shape.requests}: {name}: {outcome.why}"
        for point in points
        for name, outcome in point.outcomes.items()
        if hasattr(outcome, "why")
    )
    for reason in reasons:
        console.print(f"No time: {reason}", markup=False)


def _table(points: "Sequence[SweepPoint]", kind: str) -> Table:
    from mla_ref.bench.kernel_step import CONVERT, MERGE, SCORES, TOPK

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    headings = ("tokens", "reqs", "rows", "by decode", "by extend", "scores", TOPK, CONVERT, "attn")
    for heading in (*headings, kind, MERGE):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        shares = [point.share(part, kind) for part in (SCORES, TOPK, CONVERT, kind)]
        table.add_row(
            f"{point.shape.context:,}",
            f"{point.shape.requests}",
            f"{point.shape.rows:,}",
            *(_us(point.total_s(k)) for k in ("decode", "extend")),
            *("-" if share is None else f"{share:.0%}" for share in shares),
            *(_us(point.seconds(part)) for part in (kind, MERGE)),
        )
    return table


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.0f}"

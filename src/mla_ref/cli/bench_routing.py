"""`mla-ref bench routing`: what one prefill chunk costs the verifier rows beside it."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mla_ref.cli.bench_report import BenchOptions, machine, machine_in_words, progress

if TYPE_CHECKING:
    from mla_ref.bench import RoutingRow

# Sizes that no option sets; the tests make them small.
TOPK, CONTEXT = 2048, 4096


def bench_routing(options: BenchOptions) -> None:
    """Measure, then print a table, what was lost here, and what is counted."""
    from mla_ref.bench import measure_routing, what_is_counted, what_was_lost

    for name, value in (
        ("--head-dim", options.head_dim),
        ("--peer-length", options.peer_length),
        ("--plot", options.figure),
    ):
        if value is not None:
            raise ValueError(f"{name} is not for routing")
    chunks = [16, 64, 256] if options.lengths is None else options.lengths
    requests = 8 if options.requests is None else options.requests
    heads = 8 if options.heads is None else options.heads
    measured = measure_routing(
        chunks,
        num_verifiers=requests,
        heads=heads,
        topk=TOPK,
        context=CONTEXT,
        repeats=5 if options.repeats is None else options.repeats,
    )
    first_line = (
        f"Attention of one layer for {requests} verifier requests of 4 rows and one prefill chunk: "
        f"{CONTEXT:,} tokens cached each, heads: {heads}, top-k {TOPK:,}, float32. "
        f"{machine_in_words()}"
    )
    console = Console(highlight=False)
    if not options.as_json:
        console.print(first_line)
    rows: list[RoutingRow] = []
    with progress() as bar:
        task = bar.add_task("measuring", total=len(chunks))
        for row in measured:
            rows.append(row)
            bar.update(task, advance=1, description=f"chunk of {row.chunk:,}")
    lost, counted = [what_was_lost(row) for row in rows], what_is_counted(rows[0])
    if options.as_json:
        report = {
            "what": first_line,
            "machine": machine(),
            "rows": [
                {**row.to_json(), "in_words": words} for row, words in zip(rows, lost, strict=True)
            ],
            "counted": counted,
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    console.print(_table(rows))
    for line in (*lost, counted):
        console.print(line)
    console.print(
        "Time: torch works off rows one after the other on a CPU, in splits or not, so these "
        "times cannot show what more blocks give a GPU; the count can, and is no time."
    )
    console.print(
        "Gate: both ways gave the same rows, and agreed with float64 before and after their runs."
    )


def _table(rows: Sequence["RoutingRow"]) -> Table:
    from mla_ref.bench import in_words

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("chunk", "route", "kernel", "rows", "blocks", "waves", "keys each", "median"):
        left = heading in ("route", "kernel")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row, following in zip_longest(rows, rows[1:]):
        ways = ((row.times.a, row.batch_wide), (row.times.b, row.alone))
        lines = [
            (timing if first else None, launch)
            for timing, launches in ways
            for first, launch in zip((True, False, False), launches, strict=False)
        ]
        for number, (timing, launch) in enumerate(lines, 1):
            table.add_row(
                f"{row.chunk:,}" if number == 1 else "",
                timing.name if timing else "",
                launch.kind,
                f"{launch.rows:,}",
                f"{launch.blocks:,}",
                f"{launch.waves:,}",
                f"{launch.keys_per_block:,}",
                in_words(timing.median_s) if timing else "",
                end_section=number == len(lines) and following is not None,
            )
    return table

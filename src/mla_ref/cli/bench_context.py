"""`mla-ref bench context`: memory and time of rungs 2, 3 and 4."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mla_ref.cli.bench_report import (
    BenchOptions,
    check_figure,
    machine,
    machine_in_words,
    progress,
)

if TYPE_CHECKING:
    from mla_ref.bench import ContextRow


def bench_context(options: BenchOptions) -> None:
    """Measure, then print a table and what it shows."""
    from mla_ref.bench import measure_context, plot

    if options.peer_length is not None:
        raise ValueError("--peer-length is for sparse; context has no peer")
    lengths = [256, 512, 1024] if options.lengths is None else options.lengths
    heads = 4 if options.heads is None else options.heads
    head_dim = 64 if options.head_dim is None else options.head_dim
    repeats = 5 if options.repeats is None else options.repeats
    first_line = (
        f"Causal attention over a whole prompt: s_q = s_kv, batch 1, heads: {heads} of "
        f"width {head_dim}, float32. {machine_in_words()}"
    )
    if options.figure is not None:
        check_figure(options.figure, lengths)
    measured = measure_context(lengths, heads=heads, head_dim=head_dim, repeats=repeats)
    console = Console(highlight=False)
    if not options.as_json:
        console.print(first_line)
    rows: list[ContextRow] = []
    with progress() as bar:
        task = bar.add_task("measuring", total=3 * len(lengths))
        for row in measured:
            rows.append(row)
            bar.update(task, advance=1, description=f"{row.length:,} tokens")
    if options.figure is not None:
        plot(rows, options.figure, title=first_line)
    if options.as_json:
        report = {"what": first_line, "machine": machine(), "rows": [r.to_json() for r in rows]}
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    console.print(_table(rows))
    for line in _findings(rows):
        console.print(line)
    if options.figure is not None:
        console.print(f"Figure: {options.figure}", soft_wrap=True)


def _table(rows: Sequence["ContextRow"]) -> Table:
    from mla_ref.bench import in_words

    # Seven columns in 80 characters.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("context", "rung", "peak", "largest tensor", "median", "fastest", "slowest"):
        table.add_column(heading, justify="left" if heading == "rung" else "right", no_wrap=True)
    for row, following in zip_longest(rows, rows[1:]):
        table.add_row(
            f"{row.length:,}",
            f"{row.rung} {row.name}",
            f"{row.peak_bytes / 2**20:,.2f} MiB",
            " x ".join(map(str, row.largest_tensor.shape)),
            *(in_words(t) for t in (row.timing.median_s, row.timing.min_s, row.timing.max_s)),
            end_section=following is not None and following.length != row.length,
        )
    return table


def _findings(rows: Sequence["ContextRow"]) -> list[str]:
    from mla_ref.bench import growth
    from mla_ref.bench.context import REL_L2

    lines = [
        "Peak: the most bytes of tensors held at once, inputs not counted. Scratch inside a torch "
        "operator is not seen.",
        "Gate: each result was compared with the float64 oracle before and after its timed runs "
        f"(relative L2 error at most {REL_L2:.0e}).",
    ]
    lengths = sorted({row.length for row in rows})
    if len(lengths) > 1:
        powers = ", ".join(f"{name} as n^{power:.2f}" for name, power in growth(rows).items())
        lines.insert(0, f"From {lengths[-2]:,} to {lengths[-1]:,} tokens the peak grows: {powers}.")
    return lines

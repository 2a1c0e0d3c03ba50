"""`mla-ref bench sparse`: one decode step of a layer of DeepSeek-V3.2, sparse, dense and peer."""

import json
from collections.abc import Sequence
from dataclasses import replace
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
from mla_ref.platform import require

if TYPE_CHECKING:
    from mla_ref.bench import SparseRow

MODEL = "v3.2"


def bench_sparse(options: BenchOptions) -> None:
    """Measure, then print a table and the ratios."""
    from mla_ref.bench import measure_sparse, plot_sparse, ratios
    from mla_ref.checks import require_count
    from mla_ref.layers import preset

    if options.head_dim is not None:
        raise ValueError("--head-dim is for context; sparse has the widths of DeepSeek-V3.2")
    lengths = [4096, 8192, 16384, 32768] if options.lengths is None else options.lengths
    peer_length = 4096 if options.peer_length is None else options.peer_length
    require_count("--peer-length", peer_length)
    config = preset(MODEL)
    if options.heads is not None:
        config = replace(config, num_heads=options.heads)
    if options.figure is not None:
        check_figure(options.figure, lengths)
    no_peer = _why_no_peer(peer_length, lengths)
    measured = measure_sparse(
        config,
        lengths,
        peer_length=0 if no_peer else peer_length,
        repeats=3 if options.repeats is None else options.repeats,
    )
    topk = config.indexer.topk if config.indexer else 0
    first_line = (
        f"One decode step of one layer of {config.name}: 4 new tokens of one request, "
        f"{config.num_heads} heads, top-k {topk:,}, float32, random weights. {machine_in_words()}"
    )
    console = Console(highlight=False)
    if not options.as_json:
        console.print(first_line)
        if no_peer:
            console.print(no_peer, markup=False)  # [peers] would be taken for markup
    rows: list[SparseRow] = []
    with progress() as bar:
        peers = 0 if no_peer else sum(length <= peer_length for length in lengths)
        task = bar.add_task("making weights", total=3 * len(lengths) + peers)
        for row in measured:
            rows.append(row)
            bar.update(task, advance=1, description=f"{row.length:,} tokens")
    found = ratios(rows)
    if options.figure is not None:
        plot_sparse(rows, options.figure, title=first_line)
    if options.as_json:
        report = {
            "what": first_line,
            "machine": machine(),
            "no_peer": no_peer,
            "rows": [row.to_json() for row in rows],
            "ratios": [ratio.to_json() for ratio in found],
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    console.print(_table(rows))
    for ratio in found:
        console.print(f"{ratio.what}: {ratio.value:.2f}")
    console.print(
        "Gate: all agreed at a short length where top-k covers every key; each timed output was "
        "compared with float64 attention over its own choice, and the choice by its float64 scores."
    )
    if options.figure is not None:
        console.print(f"Figure: {options.figure}", soft_wrap=True)


def _why_no_peer(peer_length: int, lengths: Sequence[int]) -> str | None:
    """Why transformers' layer does not run here, in a line; None if it does."""
    if not lengths or peer_length < min(lengths):
        return f"No peer: every length is above --peer-length {peer_length:,}."
    try:
        require("transformers")
    except ImportError as error:
        return f"No peer: {error}"
    return None


def _table(rows: Sequence["SparseRow"]) -> Table:
    from mla_ref.bench import in_words

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("cached", "attention", "median", "fastest", "slowest"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for row, following in zip_longest(rows, rows[1:]):
        table.add_row(
            f"{row.length:,}",
            row.name,
            *(in_words(t) for t in (row.timing.median_s, row.timing.min_s, row.timing.max_s)),
            end_section=following is not None and following.length != row.length,
        )
    return table

"""`mla-ref bench`: measurements that run here, each behind a check of its result."""

import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mla_ref.cli.example import Example
from mla_ref.platform import require

if TYPE_CHECKING:
    from mla_ref.bench import ContextRow

PANEL = "This machine"
EXAMPLES = (
    Example(
        "bench context --lengths 64,128,256 --heads 1 --repeats 2 --threads 1",
        "What a longer context costs rungs 2, 3 and 4, in a second or two",
    ),
    Example(
        "bench --lengths 64,128 --heads 1 --repeats 1 --threads 1 --json",
        "The same as one JSON object with every sample",
    ),
)


def bench(
    what: Annotated[
        str, typer.Argument(help="What to measure: context.", show_default=True)
    ] = "context",
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas.")
    ] = "256,512,1024",
    heads: Annotated[int, typer.Option(help="Heads of q, k and v.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each rung and length.")] = 5,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: as many as torch takes by itself.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Save a figure here (png, svg or pdf).", dir_okay=False)
    ] = None,
) -> None:
    """Measure memory and time on this machine; no time for a wrong result.

    context: causal attention of rungs 2 (vectorised), 3 (online) and 4
    (paged) over a whole prompt. Memory is counted tensor by tensor and is
    the same on every machine; times are not.

    The exit code is 1 if the result of a rung is wrong.
    """
    from mla_ref.bench import GateError
    from mla_ref.checks import require_choice

    require_choice("WHAT", what, tuple(BENCHES))
    try:
        with _threads(threads):
            BENCHES[what](_parse_lengths(lengths), heads, head_dim, repeats, as_json, plot)
    except GateError as error:
        typer.echo(f"mla-ref: error: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Give torch this many threads for a while. On a busy machine two can be slower than one."""
    import torch

    from mla_ref.checks import require_count

    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(require_count("--threads", wanted, at_least=1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _context(
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    repeats: int,
    as_json: bool,
    figure: Path | None,
) -> None:
    from mla_ref.bench import measure_context, plot

    first_line = (
        f"Causal attention over a whole prompt: s_q = s_kv, batch 1, heads: {heads} of "
        f"width {head_dim}, float32. {_machine_in_words()}"
    )
    if figure is not None:
        _check_figure(figure, lengths)
    measured = measure_context(lengths, heads=heads, head_dim=head_dim, repeats=repeats)
    console = Console(highlight=False)
    if not as_json:
        console.print(first_line)
    rows: list[ContextRow] = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=3 * len(lengths))
        for row in measured:
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.length:,} tokens")
    if figure is not None:
        plot(rows, figure, title=first_line)
    if as_json:
        report = {"what": first_line, "machine": _machine(), "rows": [r.to_json() for r in rows]}
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    console.print(_context_table(rows))
    for line in _context_findings(rows):
        console.print(line)
    if figure is not None:
        console.print(f"Figure: {figure}", soft_wrap=True)


def _context_table(rows: Sequence["ContextRow"]) -> Table:
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


def _context_findings(rows: Sequence["ContextRow"]) -> list[str]:
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


def _check_figure(figure: Path, lengths: Sequence[int]) -> None:
    """Raise now what would otherwise be raised after all has been measured."""
    from mla_ref.checks import require_choice

    require_choice("the ending of --plot", figure.suffix, (".png", ".svg", ".pdf"))
    if len(set(lengths)) < 2:
        raise ValueError(f"--plot needs two lengths at least, got --lengths {lengths[0]}")
    if not figure.parent.is_dir():
        raise FileNotFoundError(f"--plot {figure}: there is no folder {figure.parent}")
    require("matplotlib.figure")


def _parse_lengths(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--lengths must be numbers with commas, such as 256,512; got {text!r}")
    return [int(word) for word in words]


def _machine() -> dict[str, Any]:
    import torch

    return {
        "device": "cpu",
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _machine_in_words() -> str:
    facts = _machine()
    return (
        f"CPU only: {facts['architecture']}, torch {facts['torch']}, threads: {facts['threads']}."
    )


def _progress() -> Progress:
    """A bar on stderr that vanishes when it is done, and is not there in a pipe."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


# What WHAT may be.
BENCHES = {"context": _context}

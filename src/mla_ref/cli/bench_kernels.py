"""`mla-ref bench kernels`: a backend's kernels and their peers, a receipt, a sweep, a tuning."""

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mla_ref.cli.bench_kernels_options import KernelOptions, judge
from mla_ref.cli.bench_report import check_figure, progress
from mla_ref.cli.comma_numbers import comma_numbers
from mla_ref.cli.example import Example

if TYPE_CHECKING:
    from mla_ref.bench.ceilings import Ceilings
    from mla_ref.bench.kernel_machine import KernelMachine
    from mla_ref.bench.kernels import KernelPoint

PANEL = "Check your kernel"
EXAMPLES = (
    Example(
        "bench kernels --device cpu --heads 2 --rows 4 --topk 64 --repeats 1",
        "The table, with small sizes on a CPU: its times say nothing about a GPU",
    ),
    Example(
        "bench kernels --sweep --contexts 64 --concurrency 1 --mtp 3",
        "Whole attention steps, part by part",
    ),
)


# What each run takes no notice of.
OF_SWEEP = ("contexts", "concurrency", "mtp")
UNUSED = {
    "--sweep": (
        "rows", "workload", "overlap", "cache_format", "slots", "sample", "peers", "flashmla",
    ),
    "--tune": ("peers", "flashmla", *OF_SWEEP),
    "the table of kernels": OF_SWEEP,
}  # fmt: skip


def bench_kernels(
    backend: Annotated[
        str, typer.Option(help="A backend's name, or module:object as for check.")
    ] = "torch",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    heads: Annotated[
        str | None,
        typer.Option(help="Query heads. Default: 8,64,128 on a GPU, 8 elsewhere and for --sweep."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Query rows. Default: 4,16,64,256 on a GPU, 4,16 elsewhere."),
    ] = None,
    topk: Annotated[int, typer.Option(help="Keys that a row attends to.")] = 2048,
    workload: Annotated[str, typer.Option(help="disjoint, verifier or both.")] = "both",
    overlap: Annotated[
        str,
        typer.Option(
            help="Share of their lists that the four rows of a verifier request have in common; "
            "indexer: as the real model's indexer makes them, measured first."
        ),
    ] = "0.9",
    cache_format: Annotated[str, typer.Option(help="fp8 or bf16.")] = "fp8",
    slots: Annotated[
        int | None,
        typer.Option(help="Slots of the cache. Default: three times the L2 at least."),
    ] = None,
    sample: Annotated[int, typer.Option(help="Rows of each result that are checked.")] = 4,
    repeats: Annotated[int, typer.Option(help="Rounds of each time.")] = 3,
    launches: Annotated[
        bool, typer.Option("--launches", help="Plain launches in place of CUDA graphs.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Compare with other libraries.")] = True,
    flashmla: Annotated[
        Path | None,
        typer.Option(help="_flashmla_C.abi3.so of a vLLM wheel, if no package has FlashMLA."),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(help="Check, measure, and write all of it here.", dir_okay=False),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time every configuration and name the fastest.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Whole attention steps, part by part.")
    ] = False,
    contexts: Annotated[
        str, typer.Option(help="Cached tokens of a request, for --sweep.")
    ] = "1024,16384,65536,131072",
    concurrency: Annotated[str, typer.Option(help="Requests, for --sweep.")] = "1,4,16,64",
    mtp: Annotated[str, typer.Option(help="Drafts, for --sweep.")] = "0,1,2,3",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Save a figure here (png, svg or pdf).", dir_okay=False)
    ] = None,
) -> None:
    """Time sparse MLA kernels beside their peers; no time for a wrong result.

    Decode and extend of a backend on two workloads: disjoint, random slots
    of a cache several times the L2, and verifier, rows in fours of one
    request. On a GPU: CUDA graphs replayed after the L2 was written over,
    medians of several rounds. Elsewhere the host's clock, to try it out.

    The exit code is 1 if the backend fails, has a wrong result, or nothing
    of it could be timed.
    """
    given = dict(locals())
    from mla_ref.platform import resolve_device

    if sum((sweep, tune, receipt is not None)) > 1:
        raise ValueError("--sweep, --tune and --receipt are three runs: give one of them")
    kind = "--sweep" if sweep else "--tune" if tune else "the table of kernels"
    for name in UNUSED[kind]:
        if given[name] != signature(bench_kernels).parameters[name].default:
            raise ValueError(f"--{name.replace('_', '-')} is not for {kind}")
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    options = KernelOptions(
        backend=backend,
        device=where,
        heads=comma_numbers(
            "--heads", heads or ("8,64,128" if on_gpu and not sweep else "8"), such_as="8,64"
        ),
        rows=comma_numbers("--rows", rows or ("4,16,64,256" if on_gpu else "4,16"), such_as="4,16"),
        topk=topk,
        workload=workload,
        overlap=overlap,
        cache_format=cache_format,
        slots=slots,
        sample=sample,
        repeats=repeats,
        launches=launches,
        peers=peers,
        flashmla=flashmla,
    )
    if plot is not None:
        if sweep or tune:
            raise ValueError("--plot is for the table of kernels")
        if len(options.rows) < 2:
            raise ValueError(f"--plot needs two numbers of --rows at least, got {options.rows[0]}")
        check_figure(plot)
    if sweep:
        from mla_ref.cli.bench_kernels_sweep import run_sweep

        run_sweep(
            options,
            comma_numbers("--contexts", contexts, such_as="1024,16384"),
            comma_numbers("--concurrency", concurrency, such_as="1,4"),
            comma_numbers("--mtp", mtp, such_as="0,3", at_least=0),
            as_json=as_json,
        )
    elif tune:
        _tune(options, as_json)
    else:
        _table(options, receipt, as_json, plot)


def _table(options: KernelOptions, receipt: Path | None, as_json: bool, plot: Path | None) -> None:
    """The table of kernels; behind the conformance cases where a receipt is wanted."""
    from mla_ref.backends import kernel_hash
    from mla_ref.bench.ceilings import measure_ceilings
    from mla_ref.bench.kernel_machine import read_machine
    from mla_ref.bench.kernels import measure_kernels
    from mla_ref.bench.kernels_plot import plot_kernels
    from mla_ref.bench.receipt_run import ReceiptRun, run_check
    from mla_ref.bench.receipt_text import require_public
    from mla_ref.testing import load_target

    adapter = load_target(options.backend)
    run, check = ReceiptRun(options.device), None
    if receipt is not None:
        if not receipt.parent.is_dir():
            raise FileNotFoundError(f"--receipt {receipt}: there is no folder {receipt.parent}")
        if receipt.exists():
            raise ValueError(f"--receipt {receipt}: the file is there; name another or delete it")
        # Before the minutes that it takes, not behind them.
        require_public(f"{options.backend} {json.dumps(read_machine(options.device).to_json())}")
        with progress() as bar:
            task = bar.add_task("checking", total=None)
            check = run_check(
                options.backend,
                options.device,
                lambda kind: bar.update(task, description=f"checking {kind}"),
            )
        if not check.ok:
            bad = ", ".join(check.bad[:4]) or "no case could run"
            typer.echo(f"mla-ref: error: no receipt, {bad} (mla-ref check tells more)", err=True)
            raise typer.Exit(1)
    ceilings = measure_ceilings(options.device)
    machine = read_machine(options.device)
    workloads, overlap = options.workloads()
    measured = measure_kernels(
        adapter, workloads, options.timer(), ceilings, options.chosen_peers(), sample=options.sample
    )
    points = _collected(measured, options.number_of_points())
    parts = list(options.parts(adapter)) if receipt is None else []
    if plot is not None:
        plot_kernels(points, plot, title=f"{options.backend} on {machine}")
    if receipt is not None and check is not None:
        text = run.receipt(
            backend=options.backend,
            kernel_hash=kernel_hash(adapter.backend),
            machine=machine,
            ceilings=ceilings,
            check=check,
            points=points,
        ).to_text()
        # Its text first: whoever sends it shall have seen all that it says, and it is not lost
        # where it cannot be written.
        typer.echo(text, nl=False)
        receipt.write_text(text, encoding="utf-8")
        typer.echo(f"This is all that {receipt} holds.", err=True)
    elif as_json:
        report = {
            "backend": options.backend,
            "kernel_hash": kernel_hash(adapter.backend),
            "machine": machine.to_json(),
            "ceilings": ceilings.to_json(),
            "overlap": overlap,
            "points": [point.to_json() for point in points],
            "parts": [line.to_json() for line in parts],
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(options, machine, ceilings, points, overlap)
        for part in parts:
            typer.echo(str(part))
    if plot is not None and not as_json and receipt is None:
        typer.echo(f"Figure: {plot}")
    judge(options.backend, [x.outcome for point in points for x in point.lines if x.own])


def _print(
    options: KernelOptions,
    machine: "KernelMachine",
    ceilings: "Ceilings",
    points: "list[KernelPoint]",
    overlap: str,
) -> None:
    from mla_ref.bench.timing import Timing
    from mla_ref.cli.bench_kernels_report import points_table, reading_aid

    console = Console(highlight=False)
    console.print(f"{options.backend} on {machine}", markup=False)
    outcomes = [line.outcome for point in points for line in point.lines]
    for clock in dict.fromkeys(o.clock for o in outcomes if isinstance(o, Timing)):
        console.print(f"Times: {clock}.", markup=False)
    for name in dict.fromkeys(point.workload for point in points):
        words = f": {overlap}" if name == "verifier" else ""
        console.print(f"\n{name}{words}, top-k {options.topk:,}, {options.cache_format} rows")
        console.print(points_table(points, name))
    console.print()
    for line in reading_aid(points, ceilings):
        console.print(line, markup=False)


def _tune(options: KernelOptions, as_json: bool) -> None:
    """Every configuration on each workload."""
    from mla_ref.backends import kernel_hash
    from mla_ref.bench.kernel_machine import read_machine
    from mla_ref.bench.tune import tune
    from mla_ref.cli.bench_kernels_report import trials_table
    from mla_ref.testing import load_target

    workloads, _ = options.workloads()
    adapter = load_target(options.backend)
    tried = tune(adapter, workloads, options.timer(), sample=options.sample)
    rounds = _collected(tried, options.number_of_points())
    machine = read_machine(options.device)
    if as_json:
        report = {
            "backend": options.backend,
            "kernel_hash": kernel_hash(adapter.backend),
            "machine": machine.to_json(),
            "trials": [trial.to_json() for trials in rounds for trial in trials],
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        console.print(f"{options.backend} on {machine}", markup=False)
        console.print(trials_table(rounds))
    judge(options.backend, [trial.outcome for trials in rounds for trial in trials])


def _collected(measured: Iterator[Any], total: int) -> list[Any]:
    found = []
    with progress() as bar:
        task = bar.add_task("measuring", total=total)
        for item in measured:
            found.append(item)
            bar.update(task, advance=1)
    return found

"""`mla-ref check`: the conformance cases, on a backend or on your own kernel."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mla_ref.cli.example import Example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_ref.testing.case import Case
    from mla_ref.testing.outcome import Result

PANEL = "Check your kernel"
EXAMPLES = (
    Example("check --backend torch --kind merge", "One part of the torch backend"),
    Example("check --repro decode/sink-fp8", "A short program for one case, to debug with"),
)
# Failures that are shown in full; one fault in a kernel tends to fail many cases.
SHOWN = 8
DAY = 86_400.0


def check(
    backend: Annotated[
        str,
        typer.Option(
            help="A backend's name, or module:object in the current directory: a function "
            "with decode's signature, an Adapter or a backend."
        ),
    ] = "torch",
    kind: Annotated[
        str | None,
        typer.Option(
            help="decode, extend, merge, cache_write, convert, index_scores, topk or sampler. "
            "Default: all that there is; a plain function is a decode."
        ),
    ] = None,
    case: Annotated[
        str, typer.Option(help="Only cases with this in their name, such as decode/none.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds for each case.")] = 60.0,
    repro: Annotated[
        str | None, typer.Option(help="Print a short program that runs this case, and stop.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the cases into this folder as safetensors and JSON, and stop."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the conformance cases on a kernel; each failure says what it looks like.

    The kernel runs in a process of its own, so that a crash costs one case. The exit code is 1 if
    a case fails, crashes or times out, or if no case could run.
    """
    from mla_ref.checks import require_choice
    from mla_ref.platform import resolve_device
    from mla_ref.testing import KINDS, find_case
    from mla_ref.testing.export import script

    if kind is not None:
        require_choice("--kind", kind, KINDS)
    if not 0 < timeout <= DAY:  # inf and 1e10 are more than a lock can wait for
        raise ValueError(
            f"--timeout must be above 0 and at most {DAY:,.0f} seconds, a day; got {timeout:g}"
        )
    if repro is not None and export is not None:
        raise ValueError("--repro and --export are two things: give one of them")
    if as_json and (repro is not None or export is not None):
        raise ValueError("--json is for results; --repro and --export run no case")
    where = resolve_device(device)
    if repro is not None:
        typer.echo(script(find_case(repro), backend, str(where)), nl=False)
        return
    if export is not None:
        _export(_chosen((kind,) if kind else KINDS, case), export)
        return

    _chosen((kind,) if kind else KINDS, case)
    results = _run(backend, kind, case, device, timeout)
    bad = [r for r in results if r.bad]
    ran = [r for r in results if r.status != "skipped"]
    if as_json:
        data = {
            "backend": backend,
            "device": device,
            "ok": bool(ran) and not bad,
            "counts": _counts(results),
            "results": [r.to_json() for r in results],
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        _report(results)
    if not ran:
        typer.echo("No case could run, so nothing has been checked.", err=True)
    if bad or not ran:
        raise typer.Exit(1)


def _chosen(kinds: "Sequence[str]", part: str) -> "list[Case]":
    from mla_ref.testing import cases

    found = [c for k in kinds for c in cases(k) if part in str(c)]
    if not found:
        raise ValueError(f"--case {part!r} is in no case's name of {', '.join(kinds)}")
    return found


def _run(backend: str, kind: str | None, part: str, device: str, timeout: float) -> "list[Result]":
    from mla_ref.testing.conformance import Worker

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not console.is_terminal
    results = []
    with (
        Worker(backend, kind=kind or "decode", device=device) as worker,
        Progress(*columns, console=console, transient=True, disable=hidden) as progress,
    ):
        chosen = _chosen((kind,) if kind else worker.kinds, part)
        for case in progress.track(chosen, description=escape(backend)):
            results.append(worker.run(case, timeout))
    return results


def _counts(results: "Sequence[Result]") -> dict[str, int]:
    from mla_ref.testing.outcome import STATUSES

    return {s: sum(r.status == s for r in results) for s in STATUSES}


def _report(results: "Sequence[Result]") -> None:
    """Failures first, then what was skipped and why, then the counts of each kind."""
    bad = [result for result in results if result.bad]
    for result in bad[:SHOWN]:
        typer.echo(f"{result.status.upper()}: {result.reason}\n")
    if len(bad) > SHOWN:
        names = ", ".join(result.case for result in bad[SHOWN:])
        typer.echo(f"{len(bad) - SHOWN} more fail (--case or --json tells how): {names}\n")
    faults = Counter(fault for r in bad for fault in (r.details or {}).get("looks_like", ()))
    for fault, times in faults.most_common(3 if len(bad) > 1 else 0):
        typer.echo(f"{times} failures look like this: {fault}")
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.status == "skipped":
            reasons.setdefault(result.reason, []).append(result.case)
    for why, skipped in reasons.items():
        shown = ", ".join(skipped[:3]) + (
            f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        )
        typer.echo(f"skipped: {why} ({shown})")
    for kind in dict.fromkeys(r.case.partition("/")[0] for r in results):
        counts = _counts([r for r in results if r.case.startswith(f"{kind}/")])
        words = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        typer.echo(f"{kind:<13} {words}")


def _export(chosen: "Sequence[Case]", folder: Path) -> None:
    from mla_ref.testing.export import export

    written = 0
    for case in chosen:
        if case.nbytes():
            typer.echo(f"left out: {case}, whose cache has {case.nbytes() / 1e9:.1f} GB", err=True)
            continue
        export(case, folder)
        written += 1
    typer.echo(f"{written} cases are in {folder}")

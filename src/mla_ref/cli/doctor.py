"""`mla-ref doctor`: what works on this machine, and the command that mends what does not."""

import dataclasses
import json
import textwrap
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mla_ref.cli.example import Example
from mla_ref.platform import (
    GROUPS,
    Finding,
    Machine,
    base_works,
    find,
    inspect_machine,
    summary,
)

PANEL = "This machine"
EXAMPLES = (
    Example("doctor", "What works here, and what to install for the rest"),
    Example("doctor --json", "The same as one JSON object, for a bug report"),
)

# Columns of the table: the name from 2, yes or no from 26, the value from 31.
_NAME, _ANSWER = 24, 5


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what works here, and the command that mends what does not.

    The exit code is 1 if the base packages, which every verb needs, do not work, else 0.
    """
    machine = inspect_machine()
    findings = find(machine)
    if as_json:
        typer.echo(json.dumps(report(machine, findings), indent=2))
    else:
        show(summary(machine, findings), findings, Console(highlight=False))
    if not base_works(findings):
        raise typer.Exit(1)


def report(machine: Machine, findings: tuple[Finding, ...]) -> dict[str, object]:
    """The findings as plain data; keys are added in later versions, never renamed."""
    gpus = [
        {**dataclasses.asdict(gpu), "sm": gpu.sm, "features": dataclasses.asdict(gpu.features)}
        for gpu in machine.gpus
    ]
    return {
        "summary": summary(machine, findings),
        "base_works": base_works(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "gpus": gpus,
    }


def show(first_line: str, findings: tuple[Finding, ...], console: Console) -> None:
    """Print the table. A command to copy is never broken over two lines."""
    # In a pipe it stays one line, whatever its length.
    console.print(first_line, soft_wrap=not console.is_terminal)
    for group in GROUPS:
        console.print(f"\n[bold]{group}[/bold]")
        for finding in findings:
            if finding.group == group:
                _show_row(finding, console)


def _show_row(finding: Finding, console: Console) -> None:
    answer, style = ("yes", "green") if finding.ok else ("no", "red")
    indent = " " * (2 + _NAME + _ANSWER)
    said = finding.value if finding.ok else finding.reason
    # A path longer than the line is left whole: half a path is of no use.
    lines = textwrap.wrap(
        said, console.width - len(indent), break_long_words=False, break_on_hyphens=False
    )
    row = Text.assemble(f"  {finding.name:<{_NAME}}", (f"{answer:<{_ANSWER}}", style))
    row.append(("\n" + indent).join(lines))
    if finding.mend:
        row.append(f"\n    {finding.mend}", "cyan")
    console.print(row, soft_wrap=True)

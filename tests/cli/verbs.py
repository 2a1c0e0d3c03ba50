"""What the tests of a verb share: a run of it by itself, and its words without line breaks."""

from collections.abc import Callable
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner


def run_verb(verb: Callable[..., Any], *options: str, width: int = 80) -> Result:
    """Run a verb as the only one of a program, on a terminal of so many columns."""
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, options, env={"COLUMNS": str(width)})


def words(text: str) -> str:
    """The text without the line breaks and runs of blanks that a table or a terminal makes."""
    return " ".join(text.split())

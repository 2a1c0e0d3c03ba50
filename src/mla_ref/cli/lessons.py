"""`mla-ref lessons`: which lessons there are, and copies of their notebooks to work in."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from subprocess import list2cmdline
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from mla_ref.cli.example import Example

if TYPE_CHECKING:
    from mla_ref.ladder.lessons import Lesson

PANEL = "Learn"
EXAMPLES = (
    Example("lessons", "All lessons: the question of each, its minutes, its rungs"),
    Example("lessons 02 07", "Two of them, with what each takes for granted"),
    Example("lessons --copy 02 07 --to course", "Their notebooks, to work in"),
)


def lessons(
    numbers: Annotated[
        list[str] | None,
        typer.Argument(help="Lessons by number. Default: all.", show_default=False),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the notebooks.")] = False,
    to: Annotated[Path, typer.Option(help="The folder to copy into.")] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that differ from the lessons.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the lessons, or copy their notebooks to where you want to work.

    A file of yours is not overwritten without --force.
    """
    from mla_ref.ladder.lessons import copy_lessons, find_lessons

    chosen = find_lessons(numbers or ())
    if not copy and (force or to != Path()):
        raise ValueError("--to and --force belong to --copy, which is missing")
    copies = copy_lessons(chosen, to, force=force) if copy else []
    if as_json:
        typer.echo(
            json.dumps({"lessons": _data(chosen), "copies": list(map(str, copies))}, indent=2)
        )
    elif copy:
        for path in copies:
            typer.echo(f"copied {path}")
        typer.echo(f"\nOpen them: jupyter lab {_quoted(to)}")
        typer.echo('What they need: pip install "mla-ref[lessons,model]"; mla-ref doctor tells')
    else:
        _print(chosen, Console(highlight=False), needs=bool(numbers))


def _quoted(path: Path, system: str = sys.platform) -> str:
    """A path as the shell of a system wants it: cmd.exe would pass single quotes on."""
    return list2cmdline([str(path)]) if system == "win32" else shlex.quote(str(path))


def _data(chosen: tuple["Lesson", ...]) -> list[dict[str, object]]:
    return [dataclasses.asdict(lesson) | {"path": str(lesson.path)} for lesson in chosen]


def _print(chosen: tuple["Lesson", ...], console: Console, *, needs: bool) -> None:
    """Each lesson in a few lines; the second number of minutes is for the exercises."""
    for lesson in chosen:
        minutes = f"{lesson.minutes} + {lesson.exercise_minutes} min"
        console.print(Text(f"{lesson.number}  {lesson.title}", "bold"), f"({minutes})")
        lines = [lesson.question, f"Rungs: {lesson.rungs}"]
        if needs:
            lines.append(f"You need: {lesson.needs}")
        for line in lines:
            console.print(Text(f"    {line}"), soft_wrap=not console.is_terminal)
    if not needs:
        total = sum(lesson.minutes for lesson in chosen)
        more = sum(lesson.exercise_minutes for lesson in chosen)
        console.print(
            f"\n{len(chosen)} lessons: {total / 60:.0f} hours to read and run, "
            f"{more / 60:.0f} more for the exercises. Copy some: "
            "mla-ref lessons --copy 02 07 --to DIR",
            soft_wrap=True,
        )

"""The command line app: a table of verbs, and one way to report an error."""

import importlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

import mla_ref
from mla_ref.cli.example import Example

# One line a verb: a module of this folder with a function of the same name, PANEL and EXAMPLES; a
# verb of two words has a module with _ between them.
# A verb's module imports torch and all that is heavy inside its function, so that help is instant.
VERBS = (
    "ladder",
    "lessons",
    "generate",
    "check",
    "validate",
    "plan",
    "bench",
    "bench kernels",
    "doctor",
)

# The panels of the help, by user; a verb's PANEL is one of them.
PANELS = ("Learn", "Check your kernel", "Serve", "This machine")

# What a verb raises for input that it cannot use, beside an OSError that names a file; anything
# else is a bug and shows its traceback.
FILE_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
USER_ERRORS = (ValueError, TypeError, ImportError, *FILE_ERRORS)


class OneLineErrors(TyperGroup):
    """A group of verbs that turns an error about the user's input into one line and exit code 2."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take two words as one verb where there is such a verb."""
        if (verb := " ".join(args[:2])) in self.commands:
            args = [verb, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; with --debug let the error through, traceback and all."""
        try:
            return super().invoke(ctx)
        except (*USER_ERRORS, OSError) as error:
            # A broken pipe names no file: click ends the program quietly.
            about_input = isinstance(error, USER_ERRORS) or error.filename is not None
            if ctx.params.get("debug") or not about_input:
                raise
            typer.echo(f"mla-ref: error: {_message(error)}", err=True)
            raise typer.Exit(2) from error


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"mla-ref {mla_ref.__version__}")
        raise typer.Exit
    return wanted


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show an error's traceback.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """MLA attention from a causal loop to the stack that serves DeepSeek-V3.2 and GLM-5.2."""


def examples_text(examples: Sequence[Example]) -> str:
    """The end of a verb's help: each example's note and, on a line of its own, its command."""
    return escape("\n\n".join(["Examples", *(f"{e.note}:\n  {e.line}" for e in examples)]))


def build_app() -> typer.Typer:
    """Make the app from the table of verbs."""
    app = typer.Typer(
        cls=OneLineErrors,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="`mla-ref VERB --help` ends with examples to copy.",
    )
    app.callback()(_options)
    for verb in VERBS:
        name = verb.replace(" ", "_")
        module = importlib.import_module(f"mla_ref.cli.{name}")
        app.command(verb, rich_help_panel=module.PANEL, epilog=examples_text(module.EXAMPLES))(
            getattr(module, name)
        )
    return app


app = build_app()

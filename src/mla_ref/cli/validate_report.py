"""What the parts of `mla-ref validate` share: options, prompts, versions, tables, progress."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from mla_ref.cli.bench_report import progress as progress

if TYPE_CHECKING:
    from mla_ref.models.tokenizer import Tokenizer

# Prompts of the package that a validation takes if nothing else is said, and with `--full`.
PROMPTS, FULL_PROMPTS = 5, 8


@dataclass(frozen=True)
class ValidateOptions:
    """What the user asked for; None where it was left to the validation.

    Attributes:
        rows: Verifier rows at least.
        prompts: A file of prompts.
        limit: Prompts of it at most.
        dtype: "fp32" or "bf16", of weights, queries and outputs.
        cache: "fp32", "bf16" or "fp8", of the cached rows.
        sparse: Attend to 256 chosen keys; False: to all.
        shards: Ranks that the heads are dealt to.
        mtp: Drafts a step.
        backend: Whose kernels, by name.
        device: Where they run.
        full: All configurations.
        as_json: Print one JSON object and nothing else.
        plot: Where to save a figure.
        out: The folder for what `full` writes.
    """

    rows: int | None = None
    prompts: Path | None = None
    limit: int | None = None
    dtype: str | None = None
    cache: str | None = None
    sparse: bool = True
    shards: int | None = None
    mtp: int | None = None
    backend: str | None = None
    device: str | None = None
    full: bool = False
    as_json: bool = False
    plot: Path | None = None
    out: Path | None = None

    def refuse(self, what: str, names: Sequence[str]) -> None:
        """Raise a ValueError that names the first of these options which was given.

        Args:
            what: Who does not take them.
            names: Fields of this class.
        """
        words = {"sparse": "dense", "as_json": "json"}
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(f"--{words.get(field.name, field.name)} is not for {what}")


def prompt_ids(options: ValidateOptions, tokenizer: "Tokenizer") -> dict[str, list[int]]:
    """Tokens of each prompt by its name: of the file, or of this package.

    Raises:
        ValueError: The limit is below 1, or two prompts have one name.
    """
    from mla_ref.checks import require_count
    from mla_ref.engine.prompts import read_prompts
    from mla_ref.validation import package_prompts

    if options.limit is not None:
        require_count("--limit", options.limit, at_least=1)
    if options.prompts is None:
        found = dict(package_prompts(tokenizer, FULL_PROMPTS if options.full else PROMPTS))
    else:
        found = {}
        for prompt in read_prompts(options.prompts):
            if prompt.name in found:
                raise ValueError(f"{options.prompts}: two prompts are called {prompt.name!r}")
            found[prompt.name] = tokenizer.encode(prompt.model_text)
    return dict(list(found.items())[: options.limit])


def first_prompts(
    options: ValidateOptions, prompts: dict[str, list[int]], count: int
) -> dict[str, list[int]]:
    """Those that a validation runs which takes fewer of the package's prompts than there are.

    Args:
        options: With a file of prompts or a limit the user has chosen, and all of them run.
        prompts: From `prompt_ids`.
        count: How many of the package's own.
    """
    if options.prompts is not None or options.limit is not None:
        return prompts
    return dict(list(prompts.items())[:count])


def table_of(*headings: str) -> Table:
    """A table without rows: its first column holds names, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def versions() -> dict[str, Any]:
    """Of what the numbers come from."""
    import platform

    import torch

    import mla_ref

    return {
        "mla_ref": mla_ref.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }


def command(what: str, options: ValidateOptions) -> str:
    """The command line that asks for this, without those options that only say how to print."""
    words = ["mla-ref validate", what]
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in ("as_json", "plot", "out") or value == option.default:
            continue
        if option.name == "sparse":
            words.append("--dense")
        elif option.name == "full":
            words.append("--full")
        elif isinstance(value, Path):
            # Its folder is the reader's own business.
            words.append(f"--{option.name} {shlex.quote(value.name)}")
        else:
            words.append(f"--{option.name} {shlex.quote(str(value))}")
    return " ".join(words)

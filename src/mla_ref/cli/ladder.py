"""`mla-ref ladder`: a real text climbs every rung, and each is held against the one below."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mla_ref.cli.comma_numbers import comma_numbers
from mla_ref.cli.example import Example

if TYPE_CHECKING:
    import torch

    from mla_ref.ladder.activations import LayerActivations

PANEL = "Learn"
EXAMPLES = (
    Example(
        "ladder --tokens 64 --layers 0",
        "One layer of the real model, in a few seconds",
        needs_model=True,
    ),
    Example("ladder --model glm-5.2 --tokens 32", "GLM-5.2's full head geometry, random weights"),
    Example("ladder --where", "Which file to read for each rung"),
)


def ladder(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2 (a real model), or a preset with random weights: glm-5.2, "
            "glm-5, v3.2, v3, deepseek-v2-lite."
        ),
    ] = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="A text file for the real model. Default: Emma, chapter 1.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that climb. Default: 512, or 128 with random weights."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers, by comma. Default: first, middle and last of the real model; "
            "one layer with random weights."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float32",
    gguf: Annotated[Path | None, typer.Option(help="Your own SmolLM2 GGUF file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    where: Annotated[
        bool, typer.Option("--where", help="Print each rung's file and stop.")
    ] = False,
) -> None:
    """Climb the ladder: check every rung against the one below it.

    The exit code is 1 if a rung disagrees; the last line then names it.
    """
    if where:
        _print_where(as_json)
        return

    # Rung 14 climbs in Triton's interpreter, which is chosen when triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from mla_ref.ladder.climb import climb
    from mla_ref.ladder.report import disagreement, table, to_json
    from mla_ref.ladder.rung_runs import RUNNERS, gaps

    # Progress goes to stderr, so that a table or JSON on stdout can be piped.
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    reports = []
    # Without a terminal even a hidden progress bar would leave an empty line.
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("running the model", total=None)
        activations, title = _activations(model, text, tokens, layers, dtype, gguf)
        missing = {number: why for layer in activations for number, why in gaps(layer).items()}
        height = len(RUNNERS) - len(missing)
        progress.update(task, total=height, completed=0, description=f"rung 1 of {height}")
        for report in climb(activations):
            reports.append(report)
            done = len(reports)
            progress.update(
                task, completed=done, description=f"rung {min(done + 1, height)} of {height}"
            )

    wrong = [report for report in reports if not report.ok]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "title": title,
                    "model": model,
                    "dtype": dtype,
                    "tokens": activations[0].q.shape[0],
                    "layers": [a.layer for a in activations],
                    "ok": not wrong,
                    "rungs": [to_json(report) for report in reports],
                    "not_climbed": missing,
                },
                indent=2,
            )
        )
    else:
        Console(highlight=False, soft_wrap=True).print(table(reports, title), end="")
    for report in wrong:
        typer.echo(disagreement(report), err=True)
    if wrong:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"All {len(reports)} rungs agree, each with the one below it.")
        for why in dict.fromkeys(missing.values()):
            numbers = ", ".join(str(number) for number in missing if missing[number] == why)
            typer.echo(f"Not climbed: {numbers} ({why})")


def _activations(
    model: str,
    text: Path | None,
    tokens: int | None,
    layers: str | None,
    dtype: str,
    gguf: Path | None,
) -> "tuple[list[LayerActivations], str]":
    """Run the model as asked; returns what climbs and the table's title."""
    from mla_ref.checks import require_choice, require_count
    from mla_ref.ladder.activations import DTYPES, MODELS, random_activations

    require_choice("--model", model, MODELS)
    torch_dtype = DTYPES[require_choice("--dtype", dtype, tuple(DTYPES))]
    if tokens is not None:
        require_count("--tokens", tokens, at_least=1)
    if model == "smollm2":
        return _real(text, tokens or 512, layers, torch_dtype, gguf)
    if text is not None or gguf is not None:
        raise ValueError(f"--text and --gguf are for the real model; {model} has random weights")
    tokens = tokens or 128
    chosen = _layer_list(layers or "0")
    result = random_activations(model, tokens, chosen, torch_dtype)
    heads = result[0].q.shape[1]
    return result, (
        f"{model}: random weights, {heads} heads, {len(chosen)} layer(s), {tokens} tokens, {dtype}"
    )


def _real(
    text: Path | None, tokens: int, layers: str | None, dtype: "torch.dtype", gguf: Path | None
) -> "tuple[list[LayerActivations], str]":
    import torch

    from mla_ref.checks import require_utf8
    from mla_ref.ladder.activations import smollm2_activations
    from mla_ref.models.passage import passage
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.models.tokenizer import Tokenizer

    if text is None:
        words = passage()
    else:  # lines that end as on Windows are the same text
        words = require_utf8(f"--text {text}", text.read_bytes()).replace("\r\n", "\n")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = SmolLM2.from_gguf(gguf, dtype=wide)
    ids = Tokenizer.from_gguf(gguf).encode(words)
    if not ids:
        raise ValueError(f"--text {text} holds no text")
    if len(ids) < tokens:
        typer.echo(f"the text has {len(ids)} tokens only; all of them climb", err=True)
    ids = ids[:tokens]
    last = model.config.num_layers - 1
    chosen = _layer_list(layers or f"0,{last // 2},{last}")
    for layer in chosen:
        if layer > last:
            raise ValueError(f"--layers must be 0 to {last} for SmolLM2-135M, got {layer}")
    name = text.name if text else "Emma, chapter 1"
    listed = ", ".join(map(str, chosen))
    title = (
        f"SmolLM2-135M on {name}: {len(ids)} tokens, layers {listed}, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    return smollm2_activations(model, ids, chosen, dtype), title


def _layer_list(text: str) -> tuple[int, ...]:
    return tuple(comma_numbers("--layers", text, such_as="0,14,29", at_least=0))


def _print_where(as_json: bool) -> None:
    from mla_ref.ladder.rungs import RUNGS, where

    rows = [
        {
            "rung": r.number,
            "name": r.name,
            "file": str(where(r) or r.file),
            "test": r.test,
            "lesson": r.lesson,
        }
        for r in RUNGS
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['rung']:>2} {row['name']:<22} {row['file']}")
        for key in ("test", "lesson"):
            typer.echo(f"{'':<25} {key}: {row[key]}")

"""`mla-ref validate recipe`: what the formats of a served GLM-5.2 do to a real model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from mla_ref.cli.validate_report import (
    ValidateOptions,
    command,
    first_prompts,
    progress,
    prompt_ids,
    table_of,
    versions,
)

if TYPE_CHECKING:
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.speculative import Drafter
    from mla_ref.validation import Finding
    from mla_ref.validation.recipe import RecipeRow

OUT = Path("book/data")
FILE = "validation-recipe.json"
# Tokens of the text, keys a row (and so the first position that is scored), prompts of the package,
# tokens to write, verifier rows of the last part: by default, and with --full.
TEXT, FULL_TEXT = 192, 768
TOPK, FULL_TOPK = 64, 256
PROMPTS, FULL_PROMPTS = 2, 4
TOKENS, FULL_TOKENS = 24, 48
# Rows: a number that is rounded to 8 bits the other way is rare and far off, and in too few rows
# the null control has met none.
ROWS, FULL_ROWS = 32, 256
# A short run takes the end of each prompt, still longer than its lists. The verifier rows take all.
SHORT_PROMPT = 96
EMULATED = (
    "Weights are dequantised once, which is exact, and multiplied in float32; MXFP8 products take "
    "their activations through MXFP8 as well, token by token. Not emulated: bfloat16 activations "
    "of the NVFP4 products, and the order in which a tensor core sums."
)


def validate_recipe(options: ValidateOptions) -> None:
    """Measure every recipe, validate verifier rows of the last, print; exit code 1 if not held."""
    import torch

    from mla_ref.checks import require_count
    from mla_ref.engine import new_drafter
    from mla_ref.models.passage import passage
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.models.tokenizer import Tokenizer
    from mla_ref.validation.recipe import RECIPES, measure_recipes

    options.refuse("recipe", ("dtype", "cache", "sparse", "shards", "backend", "device", "plot"))
    if not options.full:
        options.refuse("the short run, only for --full", ("out",))
    drafts = require_count("--mtp", 3 if options.mtp is None else options.mtp, at_least=1)
    rows_wanted = FULL_ROWS if options.full else ROWS
    if options.rows is not None:
        rows_wanted = require_count("--rows", options.rows, at_least=1)
    folder = OUT if options.out is None else options.out
    if options.full and not folder.is_dir():
        raise FileNotFoundError(f"--out {folder}: there is no such folder")
    length, topk, count, tokens = (
        (FULL_TEXT, FULL_TOPK, FULL_PROMPTS, FULL_TOKENS)
        if options.full
        else (TEXT, TOPK, PROMPTS, TOKENS)
    )

    with progress() as bar:
        task = bar.add_task("loading the model", total=len(RECIPES) + 1)

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what)

        tokenizer = Tokenizer.from_gguf()
        prompts = first_prompts(options, prompt_ids(options, tokenizer), count)
        dense = SmolLM2.from_gguf(attention="gqa")
        drafter = new_drafter("mtp", dense, drafts)
        rows = list(
            measure_recipes(
                dense,
                drafter,
                tokenizer.encode(passage())[-length:],
                prompts if options.full else {n: p[-SHORT_PROMPT:] for n, p in prompts.items()},
                score_from=topk,
                topk=topk,
                num_drafts=drafts,
                tokens=tokens,
                on_recipe=tell,
            )
        )
        tell("verifier rows")
        finding = _verifier_rows(dense, drafter, prompts, drafts, rows_wanted)

    finite = all(row.finite for row in rows)
    report: dict[str, Any] = {
        "what": _first_line(rows, finding, len(prompts)),
        "command": command("recipe", options),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "chance": "none: decoding is greedy, and nothing else is drawn",
        "text": f"the last {length} tokens of the passage of Emma, scored from {topk} on",
        "topk": topk,
        "prompts": len(prompts),
        "emulated": EMULATED,
        "passed": finite and finding.verdict.passed,
        "recipes": [row.to_json() for row in rows],
        "verifier_rows": finding.to_json(),
    }
    if options.full:
        (folder / FILE).write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    if options.as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(rows, finding, len(prompts))
        if options.full:
            Console(highlight=False).print(f"Data: {folder / FILE}", soft_wrap=True)
    if not report["passed"]:
        raise typer.Exit(1)


def _verifier_rows(
    dense: "SmolLM2",
    drafter: "Drafter",
    prompts: dict[str, list[int]],
    num_drafts: int,
    rows: int,
) -> "Finding":
    """Decode against extend on verifier batches of the served model."""
    from mla_ref.validation import Configuration, validate_configuration, write_scripts
    from mla_ref.validation.recipe import SERVED, trunk_of

    trunk = trunk_of(SERVED, dense)
    scripts = write_scripts(trunk, drafter, prompts, num_drafts=num_drafts, rows=rows)
    return validate_configuration(Configuration(), trunk, scripts)


def _first_line(rows: "Sequence[RecipeRow]", finding: "Finding", prompts: int) -> str:
    broken = [row.recipe.name for row in rows if not row.finite]
    if broken:
        return f"BROKEN: logits of {', '.join(broken)} hold NaN or infinity."
    plain, served = rows[0], rows[-1]
    return (
        f"SmolLM2-135M as GLM-5.2 is served: perplexity {served.perplexity:.2f} for "
        f"{plain.perplexity:.2f} plain on {plain.tokens} held-out tokens, "
        f"{served.acceptance.accepted} of {served.acceptance.drafted} drafted tokens accepted for "
        f"{plain.acceptance.accepted} of {plain.acceptance.drafted} on {prompts} "
        f"prompt{'s' * (prompts != 1)}. {finding.headline}"
    )


def _print(rows: "Sequence[RecipeRow]", finding: "Finding", prompts: int) -> None:
    from mla_ref.validation.modes_acceptance import what_it_says

    console = Console(highlight=False)
    console.print(_first_line(rows, finding, prompts), markup=False)
    headings = ("recipe", "perplexity", "KL", "top-1", "accepted", "rate", "95%", "length")
    table = table_of(*headings)
    for row in rows:
        found = row.acceptance
        low, high = found.interval
        table.add_row(
            row.recipe.name,
            f"{row.perplexity:.2f}",
            f"{row.kl:.1e}",
            f"{row.top1:.1%}",
            f"{found.accepted}/{found.drafted}",
            f"{found.rate:.0%}",
            f"{low:.0%}-{high:.0%}",
            f"{found.mean_length:.2f}",
        )
    console.print(table)
    for line in (
        "KL: mean of KL(plain || recipe) in nats a token; top-1: likeliest token as plain has it.",
        f"Acceptance of the last: {what_it_says(rows[-1].acceptance)} And each recipe writes a "
        "text of its own, of which some are easier to guess.",
        EMULATED,
    ):
        console.print(line, markup=False)

"""`mla-ref validate`: decode against extend on real verifier rows, and what serves them."""

from pathlib import Path
from typing import Annotated

import typer

from mla_ref.cli.example import Example
from mla_ref.cli.validate_modes import validate_modes
from mla_ref.cli.validate_recipe import validate_recipe
from mla_ref.cli.validate_report import ValidateOptions
from mla_ref.cli.validate_rows import validate_rows

PANEL = "Check your kernel"
EXAMPLES = (
    Example(
        "validate --rows 8 --limit 1 --cache fp32",
        "Two verifier steps of a real model, by both kernels and with controls",
        needs_model=True,
    ),
    Example(
        "validate --rows 4 --limit 1 --dtype bf16 --shards 3 --json",
        "The same in bfloat16 on three ranks' heads, as one JSON object",
        needs_model=True,
    ),
)

# What WHAT may be.
VALIDATIONS = {"rows": validate_rows, "modes": validate_modes, "recipe": validate_recipe}


def validate(
    what: Annotated[
        str, typer.Argument(help="What to validate: rows, modes or recipe.", show_default=True)
    ] = "rows",
    rows: Annotated[
        int | None,
        typer.Option(
            help="Verifier rows at least. Default: 64, with --full 2048 in all; for recipe 32, "
            "with --full 256."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines as of HumanEval or MT-bench, or text. Default: five beginnings of "
            "code, each behind a page of Emma, and with --full three pages more; of these modes "
            "takes the first 2, with --full 5 (ranks 2), and recipe 2, with --full 4.",
            dir_okay=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="The first so many prompts only. Default: all of --prompts.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16: weights, queries, outputs. Default: fp32.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp8: cached rows. Default: fp8.")
    ] = None,
    dense: Annotated[
        bool,
        typer.Option(
            "--dense",
            help="Attend to all keys, not to 256 chosen ones (modes without --full and ranks: 64).",
        ),
    ] = False,
    shards: Annotated[
        int | None, typer.Option(help="Ranks that share the heads: 1, 3 or 9. Default: 1.")
    ] = None,
    mtp: Annotated[int | None, typer.Option(help="Drafts a step. Default: 3.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Whose kernels, by name. Default: torch.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where they run: cpu, cuda, cuda:N (not for modes) or auto. Default: cpu."
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="All configurations: 10 to 40 minutes. Writes into --out."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Save a figure here (png, svg or pdf).", dir_okay=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what --full writes. Default: book/data.", file_okay=False),
    ] = None,
) -> None:
    """Validate decode for verifier batches, on a real model and with controls.

    rows: a small real model decodes with drafts; then each verifier step
    runs again on the same cache by decode, by extend and by torch's own
    attention, row by row. KL divergence of the logits, best tokens, and
    the error of each layer by itself. Two controls say what it is worth:
    decode with other splits is noise; decode that hides earlier drafts is
    the error that must be seen.

    modes: the same greedy text by every mode of the router, and on several
    ranks that share a cache, each a process. On GPUs rank r takes the r-th;
    with one GPU no cache is shared, and that proves nothing.

    recipe: NVFP4, MXFP8, the FP8 cache and sparse lists on the real model:
    perplexity, acceptance, and the rows again.

    The exit code is 1 if it does not hold, or proves nothing.
    """
    from mla_ref.checks import require_choice

    require_choice("WHAT", what, tuple(VALIDATIONS))
    options = ValidateOptions(
        rows=rows,
        prompts=prompts,
        limit=limit,
        dtype=dtype,
        cache=cache,
        sparse=not dense,
        shards=shards,
        mtp=mtp,
        backend=backend,
        device=device,
        full=full,
        as_json=as_json,
        plot=plot,
        out=out,
    )
    VALIDATIONS[what](options)

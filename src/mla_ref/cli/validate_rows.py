"""`mla-ref validate rows`: replay verifier rows by decode and extend, and print what it shows."""

import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from mla_ref.cli.bench_report import check_figure
from mla_ref.cli.validate_report import (
    ValidateOptions,
    command,
    progress,
    prompt_ids,
    table_of,
    versions,
)
from mla_ref.platform import device_name

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from mla_ref.backends import Backend
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.models.tokenizer import Tokenizer
    from mla_ref.speculative import Drafter
    from mla_ref.validation import Configuration, Finding, PairStatistics, Script

ROWS = 64
# Of SmolLM2-135M.
HEADS = 9
OUT = Path("book/data")
FILE = "validation-rows.json"
# The 16 rows of local-inference-lab/vllm#164, for comparison.
ORIGINAL = (
    "The pull request that made decode the default (local-inference-lab/vllm#164) had 16 rows of "
    "GLM-5.2 in bf16: KL mean 1.5e-03, median 1.5e-06, largest 2.0e-02 at draft 3, no best token "
    "changed; 632 layer errors of at most 7.8e-03, relative L2 5.7e-04."
)


def validate_rows(options: ValidateOptions) -> None:
    """Write the scripts, replay them in each configuration, print, and leave with 1 if not held."""
    from mla_ref.backends import find_backend
    from mla_ref.checks import require_count
    from mla_ref.platform import resolve_device
    from mla_ref.validation import (
        FULL_ROWS,
        Configuration,
        full_axes,
        plot_validation,
        validate_configuration,
        write_scripts,
    )

    if options.full:
        options.refuse("--full, which takes all", ("dtype", "cache", "sparse", "shards"))
        axes = full_axes()
    else:
        options.refuse("one configuration, only for --full", ("out",))
        axes = [_configuration(options, Configuration)]
    if options.rows is not None:
        require_count("--rows", options.rows, at_least=1)
    drafts = require_count("--mtp", 3 if options.mtp is None else options.mtp, at_least=1)
    backend = find_backend(options.backend or "torch")
    device = resolve_device(options.device or "cpu")
    if options.plot is not None:
        check_figure(options.plot)
    folder = OUT if options.out is None else options.out
    if options.full and not folder.is_dir():
        raise FileNotFoundError(f"--out {folder}: there is no such folder")

    if options.rows is None and options.full:
        wanted = {axis: FULL_ROWS[axis.dtype] for axis in axes}
    else:
        wanted = {axis: -(-(options.rows or ROWS) // len(axes)) for axis in axes}

    with progress() as bar:
        task = bar.add_task("loading the model", total=sum(wanted.values()))
        model, tokenizer, drafter = _load(drafts, device)
        prompts = prompt_ids(options, tokenizer)
        bar.update(task, description="decoding with drafts")
        scripts = {
            rows: write_scripts(model, drafter, prompts, num_drafts=drafts, rows=rows)
            for rows in set(wanted.values())
        }
        findings: list[Finding] = []
        for configuration, rows in wanted.items():
            bar.update(task, description=str(configuration))
            findings.append(
                validate_configuration(
                    configuration,
                    _in_dtype(model, configuration.dtype),
                    scripts[rows],
                    backend=backend,
                    prompt_model=model,
                    on_rows=lambda rows: bar.update(task, advance=rows),
                )
            )
    report = _report(options, backend, device, scripts[max(scripts)], findings)
    if options.full:
        (folder / FILE).write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot_validation(_served(findings).to_json(), options.plot)
    if options.as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(findings, options, folder)
    if not all(finding.verdict.passed for finding in findings):
        raise typer.Exit(1)


def _configuration(options: ValidateOptions, kind: "type[Configuration]") -> "Configuration":
    """The one that the user asked for; what the real model's heads do not allow is said now."""
    shards = 1 if options.shards is None else options.shards
    found = kind(options.dtype or "fp32", options.cache or "fp8", options.sparse, shards)
    if HEADS % shards:
        raise ValueError(f"--shards must divide the {HEADS} heads, got {shards}")
    return found


def _load(num_drafts: int, device: "torch.device") -> "tuple[SmolLM2, Tokenizer, Drafter]":
    """The model that decodes, with the attention as it was trained: the cheapest."""
    from mla_ref.engine import new_drafter
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.models.tokenizer import Tokenizer

    model = SmolLM2.from_gguf(attention="gqa").to(device)
    return model, Tokenizer.from_gguf(), new_drafter("mtp", model, num_drafts)


def _in_dtype(model: "SmolLM2", dtype: str) -> "SmolLM2":
    """The same weights in another precision: the drafts are those of float32 in both."""
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.validation import DTYPES

    if model.dtype == DTYPES[dtype]:
        return model
    return SmolLM2.from_gguf(dtype=DTYPES[dtype]).to(model.device)


def _served(findings: Sequence["Finding"]) -> "Finding":
    """The one to draw: bf16 with an FP8 cache and lists, as it is served; else the first."""
    from mla_ref.validation import Configuration

    served = Configuration("bf16", "fp8")
    return next((f for f in findings if f.configuration == served), findings[0])


def _report(
    options: ValidateOptions,
    backend: "Backend",
    device: "torch.device",
    scripts: Sequence["Script"],
    findings: Sequence["Finding"],
) -> dict[str, Any]:
    from mla_ref.backends import kernel_hash

    return {
        "what": "decode against extend on verifier rows of SmolLM2-135M",
        "command": command("rows", options),
        "versions": versions(),
        "chance": "none: decoding is greedy, and nothing else is drawn",
        "backend": backend.name,
        "kernel_hash": kernel_hash(backend),
        "device": str(device),
        "device_name": device_name(device),
        "scripts": [
            {
                "name": script.name,
                "prompt_tokens": len(script.prompt_ids),
                "steps": len(script.steps),
                "rows": script.num_rows,
            }
            for script in scripts
        ],
        "rows": sum(finding.replay.num_rows for finding in findings),
        "passed": all(finding.verdict.passed for finding in findings),
        "findings": [finding.to_json() for finding in findings],
    }


def _print(findings: Sequence["Finding"], options: ValidateOptions, folder: Path) -> None:
    console = Console(highlight=False)
    if options.full:
        held = sum(finding.verdict.passed for finding in findings)
        rows = sum(finding.replay.num_rows for finding in findings)
        console.print(
            f"Decode against extend on {rows:,} verifier rows in {len(findings)} configurations: "
            f"the same to rounding in {held}."
        )
        console.print(_axes_table(findings))
        for finding in findings:
            if not finding.verdict.passed:
                console.print(finding.headline, markup=False)
    else:
        (finding,) = findings
        console.print(finding.headline, markup=False)
        console.print(_pair_table(finding))
        console.print(_position_table(finding))
        console.print(_layer_table(finding))
        for line in _notes(finding):
            console.print(line, markup=False)
    console.print(ORIGINAL)
    if options.plot is not None:
        console.print(f"Figure: {options.plot}", soft_wrap=True)
    if options.full:
        console.print(f"Data: {folder / FILE}", soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _pair_table(finding: "Finding") -> "Table":
    table = table_of("KL(p || q)", "mean", "median", "std dev", "min", "max", "top-1", "top-10")
    for name, pair in finding.replay.pairs.items():
        kl = pair.kl
        table.add_row(
            name,
            *map(_number, (kl.mean, kl.median, kl.stdev, kl.min, kl.max)),
            _changes(pair),
            f"{pair.overlap.mean:.1%}",
        )
    return table


def _changes(pair: "PairStatistics") -> str:
    return f"{len(pair.top1_changes):,}"


def _position_table(finding: "Finding") -> "Table":
    pairs = finding.replay.pairs
    count = max(len(pair.kl_by_position) for pair in pairs.values())
    table = table_of("mean by position", "accepted", *(f"draft {i}" for i in range(1, count)))
    for name, pair in pairs.items():
        table.add_row(name, *(_number(summary.mean) for summary in pair.kl_by_position))
    return table


def _layer_table(finding: "Finding") -> "Table":
    table = table_of("layer by layer", "comparisons", "max abs", "rel L2", "median rel L2")
    for entry in finding.replay.layers.to_json():
        table.add_row(
            ", ".join(entry["pair"]),
            f"{entry['comparisons']:,}",
            *(
                "NaN" if value is None else _number(value)
                for value in (
                    entry["max_abs"]["max"],
                    entry["rel_l2"]["max"],
                    entry["rel_l2"]["median"],
                )
            ),
        )
    return table


def _notes(finding: "Finding") -> list[str]:
    found, verdict = finding.replay, finding.verdict
    null = found.pairs["decode || null"]
    splits = ["an unknown number of" if s is None else s for s in (found.splits, found.null_splits)]
    lines = [
        f"decode cuts each list into {splits[0]} splits, the null control into {splits[1]}"
        + (": the bits are equal." if null.identical else "."),
        "The positive control hides the earlier candidates of the same step, in decode.",
        "top-1: rows whose best token changed; top-10: share of the best ten that stayed.",
    ]
    lines += [f"Best token changed: {change}." for change in verdict.top1_changes]
    return lines


def _axes_table(findings: Sequence["Finding"]) -> "Table":
    from mla_ref.validation.verdict import FAILS, HOLDS, PROVES_NOTHING

    words = {HOLDS: "ok", FAILS: "no", PROVES_NOTHING: "?"}
    table = table_of("configuration", "mean KL", "null", "positive", "top-1", "rel L2", "")
    for finding in findings:
        pairs = finding.replay.pairs
        errors = finding.replay.layers.of("decode", "extend")
        table.add_row(
            str(finding.configuration).replace(",", ""),
            _number(pairs["extend || decode"].kl.mean),
            _number(pairs["decode || null"].kl.mean),
            _number(pairs["decode || positive"].kl.mean),
            _changes(pairs["extend || decode"]),
            _number(max((error.rel_l2 for error in errors), default=nan)),
            words[finding.verdict.status],
        )
    return table

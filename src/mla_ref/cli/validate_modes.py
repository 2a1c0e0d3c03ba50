"""`mla-ref validate modes`: the same greedy text by every mode and on every number of ranks?"""

import json
from collections.abc import Sequence
from functools import partial
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
from mla_ref.platform import count_gpus, device_name, resolve_device

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from mla_ref.models.smollm2_sparse import SparseSmolLM2
    from mla_ref.speculative import Drafter
    from mla_ref.validation.modes import ModesFinding
    from mla_ref.validation.modes_acceptance import Acceptance
    from mla_ref.validation.modes_texts import Departure
    from mla_ref.validation.ranks import RanksFinding

OUT = Path("book/data")
FILE = "validation-modes.json"
# Tokens to write, prompts of the package, numbers of ranks: by default, and with --full.
TOKENS, FULL_TOKENS = 24, 48
PROMPTS, FULL_PROMPTS = 2, 5
WORLDS, FULL_WORLDS = (1, 2), (1, 2, 4, 8)
# A prompt costs every way and every rank its whole length. So a short run takes the end of each and
# as many fewer keys, that rows still have to leave some out. The ranks are short with --full too.
SHORT_PROMPT, SHORT_TOPK, FULL_TOPK = 96, 64, 256
# A machine with fewer cores than ranks runs them in turn, and a busy one slowly.
TIMEOUT_S = 1800.0


def validate_modes(options: ValidateOptions) -> None:
    """Write the texts in every mode and on ranks, print, and leave with 1 if it does not hold."""
    import torch

    from mla_ref.backends import find_backend, kernel_hash
    from mla_ref.checks import require_choice, require_count
    from mla_ref.models.tokenizer import Tokenizer
    from mla_ref.validation import CACHES, DTYPES
    from mla_ref.validation.modes import compare_modes
    from mla_ref.validation.ranks import RankError, RankJob, compare_ranks

    options.refuse("modes", ("rows", "shards", "plot"))
    if not options.full:
        options.refuse("the short run, only for --full", ("out",))
    dtype = require_choice("--dtype", options.dtype or "fp32", tuple(DTYPES))
    cache = require_choice("--cache", options.cache or "fp8", tuple(CACHES))
    drafts = require_count("--mtp", 3 if options.mtp is None else options.mtp, at_least=1)
    folder = OUT if options.out is None else options.out
    if options.full and not folder.is_dir():
        raise FileNotFoundError(f"--out {folder}: there is no such folder")
    tokens = FULL_TOKENS if options.full else TOKENS
    worlds: tuple[int, ...] = FULL_WORLDS if options.full else WORLDS
    backend = find_backend(options.backend or "torch")
    if (options.device or "").startswith("cuda:"):
        raise ValueError(
            f"--device must name no single GPU for modes, got {options.device!r}: rank r takes the "
            "r-th GPU; say cuda, and hide other GPUs with CUDA_VISIBLE_DEVICES"
        )
    device = resolve_device(options.device or "cpu")
    if device.type == "cuda":  # each rank has a GPU of its own
        worlds = tuple(world for world in worlds if world <= count_gpus())

    with progress() as bar:
        task = bar.add_task("loading the model", total=None)

        def tell(what: str) -> None:
            bar.update(task, description=what)

        found = prompt_ids(options, Tokenizer.from_gguf())
        prompts = first_prompts(options, found, FULL_PROMPTS if options.full else PROMPTS)
        on_a_rank = first_prompts(options, found, PROMPTS)
        short = {name: ids[-SHORT_PROMPT:] for name, ids in on_a_rank.items()}
        keys = _topk(options, short, TOKENS, SHORT_TOPK)
        on_ranks = partial(load, dtype, keys, drafts, backend.name)
        if options.full:
            keys = _topk(options, prompts, tokens, FULL_TOPK)
            model, drafter = load(dtype, keys, drafts, backend.name, device)
        else:
            prompts = short
            model, drafter = on_ranks(device)
        modes = compare_modes(
            model,
            drafter,
            prompts,
            num_drafts=drafts,
            tokens=tokens,
            cache_dtype=CACHES[cache],
            on_way=lambda way: tell(f"mode {way}"),
        )
        job = RankJob(on_ranks, short, worlds, TOKENS, drafts, CACHES[cache], device=device.type)
        try:
            ranks = compare_ranks(job, timeout=TIMEOUT_S, on_way=tell)
        except RankError as error:
            typer.echo(f"mla-ref: error: {error}", err=True)
            raise typer.Exit(1) from error

    keys = FULL_TOPK if options.full else SHORT_TOPK
    lists = f"{keys} keys a row (ranks: {SHORT_TOPK})" if options.sparse else "all keys"
    what = f"SmolLM2-135M, {dtype}, {cache} cache, {lists}, {drafts} MTP drafts a step"
    what += f", {backend.name} kernels on {device_name(device) or 'a CPU'}"
    report = {
        "what": what,
        "command": command("modes", options),
        "versions": versions(),
        "backend": backend.name,
        "kernel_hash": kernel_hash(backend),
        "device": str(device),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "chance": "none: decoding is greedy, and nothing else is drawn",
        "passed": modes.status == ranks.status == "holds",
        "modes": modes.to_json(),
        "ranks": ranks.to_json(),
        "original": _original(),
    }
    if options.full:
        (folder / FILE).write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    if options.as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(what, cache, modes, ranks)
        if options.full:
            Console(highlight=False).print(f"Data: {folder / FILE}", soft_wrap=True)
    if not report["passed"]:
        raise typer.Exit(1)


def load(
    dtype: str, topk: int, num_drafts: int, backend: str, device: "torch.device"
) -> "tuple[SparseSmolLM2, Drafter]":
    """The model and its drafter: in this process and again in that of each rank.

    Args:
        dtype: "fp32" or "bf16".
        topk: Keys a row.
        num_drafts: Drafts a step.
        backend: Whose kernels, by name.
        device: Where they run.
    """
    from mla_ref.backends import find_backend
    from mla_ref.engine import new_drafter
    from mla_ref.models.smollm2 import SmolLM2
    from mla_ref.models.smollm2_sparse import SparseSmolLM2
    from mla_ref.validation import DTYPES

    dense = SmolLM2.from_gguf(attention="gqa", dtype=DTYPES[dtype]).to(device)
    model = SparseSmolLM2.trained(dense, topk=topk, backend=find_backend(backend))
    return model, new_drafter("mtp", model, num_drafts)


def _topk(options: ValidateOptions, prompts: dict[str, list[int]], tokens: int, sparse: int) -> int:
    """Keys a row; with --dense as many as the longest text has."""
    return sparse if options.sparse else max(map(len, prompts.values())) + tokens


def _original() -> list[dict[str, Any]]:
    from mla_ref.validation.modes_acceptance import ORIGINAL

    return [found.to_json() for found in ORIGINAL]


def _print(what: str, cache: str, modes: "ModesFinding", ranks: "RanksFinding") -> None:
    from mla_ref.validation.modes_acceptance import ORIGINAL, what_it_says

    console = Console(highlight=False)
    for line in (modes.headline, ranks.headline, f"Model: {what}."):
        console.print(line, markup=False)
    console.print(_way_table(modes, ranks))
    console.print(acceptance_table((*modes.acceptance, *ranks.acceptance, *ORIGINAL)))
    said = what_it_says(modes.acceptance[0])
    console.print(f"Acceptance of mode auto: {said} The texts say more.", markup=False)
    found = [f"Mode {departure}." for departure in modes.departures]
    for line in (*found, *(f"{departure}." for departure in ranks.departures)):
        console.print(line, markup=False)
    if cache != "fp32" and (modes.departures or ranks.departures):
        console.print(
            f"Rounding to {cache} turns last digits into whole steps; --cache fp32 does not round.",
            markup=False,
        )


def _way_table(modes: "ModesFinding", ranks: "RanksFinding") -> "Table":
    table = table_of("way", "steps", "verifier steps", "texts")
    table.add_row("plain", str(modes.plain.steps), "none", "")
    ways = [(f"mode {m.name}", m, modes.departures) for m in modes.modes]
    ways += [(ranks.one_process.name, ranks.one_process, ranks.departures)]
    ways += [(texts.name, texts, ranks.departures) for texts in ranks.worlds.values()]
    for name, texts, departures in ways:
        routes = ", ".join(f"{count} to {kind}" for kind, count in sorted(texts.routes.items()))
        against = "" if texts is ranks.one_process else _against(texts.name, departures)
        table.add_row(name, str(texts.steps), routes or "none", against)
    return table


def _against(way: str, departures: "Sequence[Departure]") -> str:
    own = [departure for departure in departures if departure.way == way]
    wrong = sum(not departure.tie for departure in own)
    if wrong:
        return f"{wrong} DIFFER"
    return f"{len(own)} near ties" if own else "the same"


def acceptance_table(rows: "Sequence[Acceptance]") -> "Table":
    """Acceptance of several ways, one a row."""
    table = table_of("acceptance", "accepted / drafted", "rate", "95% (Wilson)", "length")
    for row in rows:
        low, high = row.interval
        table.add_row(
            row.name,
            f"{row.accepted} / {row.drafted}",
            f"{row.rate:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{row.mean_length:.2f}",
        )
    return table

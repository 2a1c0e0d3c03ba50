"""`mla-ref bench speculative`: one request, plainly and with drafts, by the same engine."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mla_ref.cli.bench_report import (
    BenchOptions,
    check_figure,
    machine,
    machine_in_words,
    progress,
)

if TYPE_CHECKING:
    from mla_ref.bench import Gain, SpeculativeRow
    from mla_ref.models.language_model import LanguageModel
    from mla_ref.speculative import Drafter

WAYS = {"mtp": ("mtp",), "ngram": ("ngram",), "both": ("mtp", "ngram")}


def bench_speculative(options: BenchOptions) -> None:
    """Measure, then print each prompt, where the time of a step goes, and what it comes to."""
    from mla_ref.bench import Gain, in_a_sentence, measure_speculative, plot_speculative
    from mla_ref.checks import require_choice, require_count
    from mla_ref.models.smollm2_layer import ATTENTIONS
    from mla_ref.models.tokenizer import Tokenizer

    asked = options.speculative
    for name, value in (
        ("--lengths", options.lengths),
        ("--heads", options.heads),
        ("--head-dim", options.head_dim),
        ("--peer-length", options.peer_length),
    ):
        if value is not None:
            raise ValueError(f"{name} is not for speculative")
    # What can be seen without the model is said before it is loaded.
    tokens = require_count("--tokens", 64 if asked.tokens is None else asked.tokens, at_least=1)
    num_drafts = require_count("--mtp", 3 if asked.mtp is None else asked.mtp, at_least=1)
    repeats = 3 if options.repeats is None else options.repeats
    require_count("--repeats", repeats, at_least=1)
    drafter_names = WAYS[
        require_choice("--drafter", "mtp" if asked.drafter is None else asked.drafter, [*WAYS])
    ]
    attention = require_choice("--attention", asked.attention or "packed", ATTENTIONS)
    if asked.sparse and attention != "packed":
        raise ValueError(f"--sparse attends on the packed form; leave out --attention {attention}")
    if options.figure is not None:
        check_figure(options.figure)
    texts = _prompts(options)

    with progress() as bar:
        ways = 1 + len(drafter_names)
        task = bar.add_task("loading the model", total=len(texts) * ways * repeats)
        model, drafters = _model(attention, bool(asked.sparse), drafter_names, num_drafts)
        tokenizer = Tokenizer.from_gguf()
        bar.update(task, description="warming up")
        rows: list[SpeculativeRow] = []
        for row in measure_speculative(
            model,
            {name: tokenizer.encode(text) for name, text in texts.items()},
            drafters,
            num_drafts=num_drafts,
            tokens=tokens,
            eos_id=tokenizer.eos_id,
            repeats=repeats,
            on_run=lambda name, way: bar.update(task, advance=1, description=f"{name}: {way}"),
        ):
            rows.append(row)
    gains = [Gain.of(rows, name) for name in drafter_names]
    kind = "sparse, top-k 256, FP8 cache" if asked.sparse else f"attention {attention}, float32"
    first_line = (
        f"SmolLM2-135M ({kind}) writes up to {tokens} tokens after each prompt: batch 1, greedy, "
        f"drafts a step: {num_drafts}, runs of each: {repeats}. {machine_in_words()}"
    )
    sentences = [in_a_sentence(gain) for gain in gains]
    if options.figure is not None:
        plot_speculative(gains, options.figure, title=first_line)
    if options.as_json:
        report = {
            "what": first_line,
            "machine": machine(),
            "rows": [row.to_json() for row in rows],
            "gains": [g.to_json() | {"in_words": s} for g, s in zip(gains, sentences, strict=True)],
        }
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    console.print(first_line)
    console.print(_prompt_table(rows))
    console.print(_part_table(gains))
    for line in (*sentences, *map(_acceptance, gains), *_notes(rows, gains)):
        console.print(line, markup=False)
    if options.figure is not None:
        console.print(f"Figure: {options.figure}", soft_wrap=True)


def _prompts(options: BenchOptions) -> dict[str, str]:
    from mla_ref.bench.speculative_prompts import PROMPTS
    from mla_ref.checks import require_count

    asked = options.speculative
    limit = asked.limit
    if limit is not None:
        require_count("--limit", limit, at_least=1)
    if asked.prompts is None:
        found = dict(PROMPTS)
    else:
        from mla_ref.engine.prompts import read_prompts

        found = {}
        for prompt in read_prompts(asked.prompts):
            if prompt.name in found:
                raise ValueError(f"{asked.prompts}: two prompts are called {prompt.name!r}")
            found[prompt.name] = prompt.model_text
    return dict(list(found.items())[:limit])


def _model(
    attention: str, sparse: bool, names: Sequence[str], num_drafts: int
) -> "tuple[LanguageModel, list[Drafter]]":
    from mla_ref.engine import load_model, new_drafter
    from mla_ref.layers import preset
    from mla_ref.models.gguf_file import GGUFFile, default_gguf

    indexer = preset("smollm2-packed").indexer
    topk = indexer.topk if sparse and indexer else None
    model = load_model(GGUFFile(default_gguf()), attention=attention, topk=topk)
    return model, [new_drafter(name, model, num_drafts) for name in names]


def _table(headings: Mapping[str, bool]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading, left in headings.items():
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    return table


def _prompt_table(rows: "Sequence[SpeculativeRow]") -> Table:
    headings = dict.fromkeys(
        ("prompt", "way", "tokens", "steps", "length", "tokens/s", "speed-up", "decode"), False
    )
    table = _table(headings | {"prompt": True, "way": True})
    for number, row in enumerate(rows, 1):
        for place, way in enumerate(row.runs):
            run = row.first(way)
            drafted = run.acceptance.num_drafts
            ratios = (
                ("", "")
                if place == 0
                else (_ratio(row.speed_up(way)), _ratio(row.speed_up(way, decode=True)))
            )
            table.add_row(
                row.name if place == 0 else "",
                way + (" *" if way in row.differences else ""),
                str(row.tokens(way)),
                str(len(run.decode_steps)),
                f"{run.acceptance.mean_acceptance_length:.2f}" if drafted else "",
                f"{row.rate(way):.1f}",
                *ratios,
                end_section=place == len(row.runs) - 1 and number < len(rows),
            )
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _part_table(gains: "Sequence[Gain]") -> Table:
    from mla_ref.bench.speculative_run import PLAIN
    from mla_ref.engine import PARTS

    table = _table({"ms by part": True} | dict.fromkeys((*PARTS, "all"), False))
    totals = [(PLAIN, gains[0].plain)] + [(gain.drafter, gain.speculative) for gain in gains]
    for per in ("step", "token"):
        for number, (way, total) in enumerate(totals, 1):
            of = total.per_step if per == "step" else total.per_token
            values = [1e3 * of(part) for part in PARTS]
            table.add_row(
                f"{way}, a {per}",
                *(f"{value:.1f}" for value in (*values, sum(values))),
                end_section=per == "step" and number == len(totals),
            )
    return table


def _acceptance(gain: "Gain") -> str:
    """How often drafts were right, in a line."""
    if not gain.acceptance.num_drafts:
        return f"{gain.drafter}: it proposed nothing."
    places = ", ".join(f"{rate:.0%}" for rate in gain.acceptance.per_position_rates)
    return (
        f"{gain.drafter}: a step with drafts gave "
        f"{gain.acceptance.mean_acceptance_length:.2f} tokens on average (length); accepted "
        f"by position: {places}. Median speed-up of a prompt: {gain.median_speed_up:.2f}."
    )


def _notes(rows: "Sequence[SpeculativeRow]", gains: "Sequence[Gain]") -> list[str]:
    from mla_ref.bench.speculative_gate import NEAR_TIE
    from mla_ref.bench.speculative_summary import RESAMPLES, SEED

    lines = [
        f"* A tie at {row.name!r}, {way}: {found}."
        for row in rows
        for way, found in row.differences.items()
    ]
    lines.append(
        "Time: tokens/s and speed-up are end to end, prompt included; decode and the parts are of "
        "the steps after the prompt. Medians over the runs, which took turns."
    )
    if any(gain.interval for gain in gains):
        lines.append(
            "Prompts drawn anew: paired bootstrap over prompts, end to end, 95%, "
            f"{RESAMPLES:,} resamples, seed {SEED}."
        )
    lines.append(
        "Gate: every text was that of plain decoding, token by token, but for ties of logits "
        f"closer than {NEAR_TIE:.0e}: {sum(len(row.differences) for row in rows)} here."
    )
    return lines

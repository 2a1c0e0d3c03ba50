"""`mla-ref generate`: a small real model writes on, its attention computed as you choose.

The verb has seven files, one for each question:

    generate.py          the options, and the order of things
    generate_options.py  what the options must not be
    generate_run.py      from options to a model and requests, and the run
    generate_result.py   what a run has written, and its steps in numbers
    generate_display.py  what is to be seen meanwhile
    show_drafts.py       the marks of --show-drafts
    generate_report.py   figures and JSON
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mla_ref.cli.example import Example
from mla_ref.cli.generate_options import GenerateOptions

PANEL = "Learn"
EXAMPLES = (
    Example(
        'generate "def fibonacci(n):" --tokens 16',
        "SmolLM2-135M writes code, its attention as absorbed MLA",
        needs_model=True,
    ),
    Example(
        'generate "def quicksort(xs):" --tokens 12 --mtp 3 --show-drafts',
        "Drafts by multi-token prediction, and what became of each",
        needs_model=True,
    ),
    Example(
        'generate "def add(a, b):" --tokens 8 --sparse --topk 64',
        "Sparse: 64 keys a row, chosen by an indexer, from an FP8 cache",
        needs_model=True,
    ),
    Example(
        'generate "Who are you?" --chat --tokens 8 --temperature 0.7 --json',
        "A question, an answer drawn by chance, one JSON object",
        needs_model=True,
    ),
)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads stdin, less its last newline.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Many prompts from a file, run together: .jsonl, .jsonl.gz or .txt."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts of the file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a question; the model answers.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Tokens to write at most, for each prompt.")] = 40,
    stop_at: Annotated[
        str | None, typer.Option(help="End a text in front of this, if it comes.")
    ] = None,
    mtp: Annotated[
        int,
        typer.Option("--mtp", "--num-speculative-tokens", help="Drafts a step; 0: plain decoding."),
    ] = 0,
    drafter: Annotated[
        str | None,
        typer.Option(help="mtp (a trained module, default) or ngram (prompt look-up)."),
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the drafts in the text, and --compare.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it again without drafts: time, and tokens.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0: the most likely token; else tokens are drawn.")
    ] = 0.0,
    sample_top_k: Annotated[
        int | None, typer.Option(help="Draw among the k most likely tokens only.")
    ] = None,
    sample_top_p: Annotated[
        float | None,
        typer.Option(
            "--sample-top-p", "--top-p", help="Draw among the likeliest with this mass only."
        ),
    ] = None,
    top_k: Annotated[str | None, typer.Option("--top-k", hidden=True)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the draws; each prompt has its own by its number.")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="packed or split (both exact MLA forms), or gqa (as trained).")
    ] = "packed",
    form: Annotated[
        str | None, typer.Option(help="absorbed or expanded. Default: absorbed; none for gqa.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Attend to the keys that an indexer chooses.")
    ] = False,
    topk: Annotated[
        int | None, typer.Option(help="Keys a row attends to, with --sparse. Default: 256.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Who computes it, with --sparse.")] = "torch",
    mode: Annotated[
        str | None,
        typer.Option(help="Verifier rows with --sparse: auto, 0 (extend) or 1 (decode if short)."),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="What the KV cache stores: float32 (default), bfloat16, or with --sparse fp8 "
            "(its default)."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a page of the KV cache.")] = 64,
    chunk_size: Annotated[
        int,
        typer.Option(
            "--chunk-size", "--max-batched-tokens", help="Tokens that run in a step at most."
        ),
    ] = 256,
    max_seqs: Annotated[int, typer.Option(help="Prompts that run at once at most.")] = 8,
    device: Annotated[
        str, typer.Option(help="Where: cpu, cuda, cuda:N, or auto (a GPU if there is one).")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="What the model computes in: fp32 or bf16.")] = "fp32",
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Replay decode steps from CUDA graphs. Default: on a GPU; on a CPU it only shows "
            "that nothing changes.",
        ),
    ] = None,
    gguf: Annotated[Path | None, typer.Option(help="Your own SmolLM2 GGUF file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a text, or many at once, with a small real model.

    The text goes to stdout as it comes, progress and figures to stderr. Drafts (--mtp) change how
    fast it comes, not what it says: but for rounding the tokens are the same, or with --temperature
    their law. --topk is about attention, --sample-top-k about the choice of tokens.
    """
    # First of all, so that nothing but the options is there.
    _generate(GenerateOptions(**locals()))


def _generate(options: GenerateOptions) -> None:
    options.check()
    from mla_ref.cli import generate_display as displays
    from mla_ref.cli.generate_report import Comparison, lines, to_json
    from mla_ref.cli.generate_run import Job
    from mla_ref.cli.show_drafts import marks_for_stdout

    prompts = options.read_prompts()
    with displays.progress("loading the model"):
        job = Job.load(options, prompts)
    # One prompt is shown as it is written; of many, each when all are done.
    stream = options.prompts is None and not options.as_json
    marks = marks_for_stdout() if options.show_drafts and not options.as_json else None
    if marks:
        typer.echo(f"{marks.legend}\n")
    with displays.progress("reading the prompt") as bar:
        if options.compares:
            job.warm_up()
        display = displays.streaming(bar, job) if stream else displays.counting(bar, job)
        drafted = job.run(display, drafts=True, marks=marks)
    if stream:
        typer.echo()
    elif not options.as_json:
        displays.show_all(drafted)
    comparison = None
    if options.compares:
        with displays.progress("again without drafts") as bar:
            plain = job.run(displays.counting(bar, job, "without drafts: "), drafts=False)
        comparison = Comparison(drafted, plain, options.sampling.is_greedy, options.cache_format)
    if options.as_json:
        typer.echo(json.dumps(to_json(drafted, job.facts, comparison), indent=2, allow_nan=False))
        return
    console = Console(stderr=True, highlight=False)
    for line in lines(drafted, job.facts):
        console.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)
    if comparison:
        console.print(escape(comparison.line), soft_wrap=True)
    elif options.mtp:
        console.print("[dim]Time against plain decoding: add --compare[/dim]", soft_wrap=True)

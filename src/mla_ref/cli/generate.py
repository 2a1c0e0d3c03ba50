"""`mla-ref generate`: a small real model writes on, its attention computed as you choose."""

import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mla_ref.cli.example import Example

if TYPE_CHECKING:
    from mla_ref.engine import NewToken, Prefilled
    from mla_ref.models.language_model import LanguageModel

PANEL = "Learn"
EXAMPLES = (
    Example(
        'generate "def fibonacci(n):" --tokens 16',
        "SmolLM2-135M writes code, its attention as absorbed MLA",
        needs_model=True,
    ),
    Example(
        'generate "def add(a, b):" --tokens 8 --sparse --topk 64',
        "Sparse: 64 keys a row, chosen by an indexer, from an FP8 cache",
        needs_model=True,
    ),
    Example(
        'generate "Once upon a time" --tokens 8 --attention gqa --json',
        "Its attention as it was trained, and one JSON object",
        needs_model=True,
    ),
)

CACHE_DTYPES = ("float32", "bfloat16", "fp8")


def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - reads stdin, less its last newline.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 40,
    attention: Annotated[
        str, typer.Option(help="packed or split (both exact MLA forms), or gqa (as trained).")
    ] = "packed",
    form: Annotated[
        str | None, typer.Option(help="absorbed or expanded. Default: absorbed; none for gqa.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Attend to the keys that an indexer chooses.")
    ] = False,
    topk: Annotated[int, typer.Option(help="Keys a row attends to, with --sparse.")] = 256,
    backend: Annotated[str, typer.Option(help="Who computes it, with --sparse.")] = "torch",
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="What the KV cache stores: float32 (default), bfloat16, or with --sparse fp8 "
            "(its default)."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a page of the KV cache.")] = 64,
    chunk_size: Annotated[int, typer.Option(help="Tokens of the prompt that run at once.")] = 256,
    gguf: Annotated[Path | None, typer.Option(help="Your own SmolLM2 GGUF file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a text with a small real model, the most likely token each time.

    Prompt and continuation go to stdout as they come, progress and figures to stderr.
    """
    import torch

    from mla_ref.backends import find_backend
    from mla_ref.checks import require_choice, require_count
    from mla_ref.engine import generate as run
    from mla_ref.models.gguf_file import GGUFFile, default_gguf
    from mla_ref.models.smollm2 import ATTENTIONS, SmolLM2
    from mla_ref.models.smollm2_sparse import SparseSmolLM2
    from mla_ref.models.smollm2_weights import SmolLM2Weights
    from mla_ref.models.tokenizer import StreamDecoder, Tokenizer

    # What can be seen without the model is said before it is loaded.
    require_count("--tokens", tokens, at_least=1)
    require_choice("--attention", attention, ATTENTIONS)
    cache_dtype = cache_dtype or ("fp8" if sparse else "float32")
    require_choice("--cache-dtype", cache_dtype, CACHE_DTYPES)
    if cache_dtype == "fp8" and not sparse:
        raise ValueError("--cache-dtype fp8 needs --sparse: dense attention reads plain rows")
    if sparse and (attention, form) != ("packed", None):
        raise ValueError("--sparse attends on the packed form; leave --attention and --form out")
    require_count("--topk", topk, at_least=1)
    found_backend = find_backend(backend)
    dtype = torch.uint8 if cache_dtype == "fp8" else getattr(torch, cache_dtype)
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("PROMPT must hold some text, got an empty one")

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    chunks: list[Prefilled] = []
    with bar:
        task = bar.add_task("loading the model", total=None)
        file = GGUFFile(gguf or default_gguf())
        tokenizer = Tokenizer(file)
        prompt_ids = tokenizer.encode(prompt)
        dense = SmolLM2(SmolLM2Weights.read(file), attention=attention, form=form)
        model: "LanguageModel" = dense
        if sparse:
            model = SparseSmolLM2.trained(
                dense, topk=topk, backend=found_backend, max_rows=chunk_size
            )
        bar.update(task, description="reading the prompt", total=len(prompt_ids))

        def show(chunk: "Prefilled") -> None:
            chunks.append(chunk)
            bar.update(task, completed=chunk.done)

        stream = run(
            model,
            prompt_ids,
            max_new_tokens=tokens,
            eos_id=tokenizer.eos_id,
            decoder=StreamDecoder(tokenizer),
            page_size=page_size,
            chunk_size=chunk_size,
            cache_dtype=dtype,
            on_prefill=show,
        )
        first = next(stream)
    # Bar and text may be on one terminal, so the bar is gone before the text begins.
    if not as_json:
        typer.echo(prompt, nl=False)
    new = []
    for token in chain([first], stream):
        new.append(token)
        if not as_json:
            typer.echo(token.text, nl=False)

    figures = {
        "attention": dense.attention,
        "form": dense.form,
        "topk": topk if sparse else None,
        "cache_dtype": cache_dtype,
        "kv_bytes_per_token": model.new_cache(1, 1, dtype).nbytes,
        "prompt_tokens": len(prompt_ids),
        "new_tokens": len(new),
        "finish_reason": new[-1].finish_reason,
        "prefill_tokens_per_second": _rate(chunks, len(prompt_ids)),
        # The first token's step is the prefill.
        "decode_tokens_per_second": _rate(new[1:], len(new) - 1),
    }
    if as_json:
        text = {"prompt": prompt, "text": "".join(token.text for token in new)}
        token_ids = {"token_ids": [token.token_id for token in new]}
        typer.echo(json.dumps({**text, **token_ids, **figures}, indent=2))
    else:
        typer.echo()
        console.print(f"[dim]{_one_line(figures)}[/dim]", soft_wrap=True)


def _rate(events: "Sequence[Prefilled | NewToken]", num_tokens: int) -> float | None:
    """Tokens a second, or None where none has run."""
    seconds = sum(event.seconds for event in events)
    return num_tokens / seconds if seconds > 0 else None


def _one_line(figures: dict[str, Any]) -> str:
    rate = figures["decode_tokens_per_second"]
    decode = f", decode {rate:.1f} tokens/s" if rate else ""
    sparse = figures["topk"] and f"top-{figures['topk']}"
    name = " ".join(filter(None, (figures["attention"], figures["form"], sparse)))
    return (
        f"{figures['new_tokens']} tokens ({figures['finish_reason']}), prefill "
        f"{figures['prefill_tokens_per_second']:.0f} tokens/s{decode}, KV cache "
        f"{figures['kv_bytes_per_token']:,} bytes a token ({name}, {figures['cache_dtype']})"
    )

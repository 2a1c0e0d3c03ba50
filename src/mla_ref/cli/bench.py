"""`mla-ref bench`: measurements that run here, each behind a check of its result."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mla_ref.cli.bench_context import bench_context
from mla_ref.cli.bench_report import BenchOptions, SpeculativeOptions
from mla_ref.cli.bench_routing import bench_routing
from mla_ref.cli.bench_sparse import bench_sparse
from mla_ref.cli.bench_speculative import bench_speculative
from mla_ref.cli.comma_numbers import comma_numbers
from mla_ref.cli.example import Example

PANEL = "This machine"
EXAMPLES = (
    Example(
        "bench context --lengths 64,128,256 --heads 1 --repeats 2 --threads 1",
        "What a longer context costs rungs 2, 3 and 4, in a second or two",
    ),
    Example(
        "bench --lengths 64,128 --heads 1 --repeats 1 --threads 1 --json",
        "The same as one JSON object with every sample",
    ),
    Example(
        "bench sparse --lengths 512,1024 --heads 4 --peer-length 0",
        "Sparse against dense decode, with 4 of the 128 heads",
    ),
    Example(
        "bench routing --lengths 8 --requests 1 --heads 1 --repeats 1",
        "What one prefill chunk costs the verifier rows beside it",
    ),
    Example(
        "bench speculative --attention gqa --limit 1 --tokens 6 --repeats 1",
        "What drafts gain: plain and speculative decoding of a real model",
        needs_model=True,
    ),
)

# What WHAT may be.
BENCHES = {
    "context": bench_context,
    "sparse": bench_sparse,
    "routing": bench_routing,
    "speculative": bench_speculative,
}


def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="What to measure: context, sparse, routing or speculative.", show_default=True
        ),
    ] = "context",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths in tokens, with commas. Default: 256,512,1024 for context; "
            "4096,8192,16384,32768 for sparse; for routing those of the chunk: 16,64,256."
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="Query heads. Default: 4 for context, 128 for sparse, 8 for routing."),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head, for context. Default: 64.")
    ] = None,
    peer_length: Annotated[
        int | None,
        typer.Option(
            help="Longest length at which transformers runs too, for sparse; 0: never. "
            "Default: 4096, where its keys and values take 0.9 GB."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Verifier requests, for routing. Default: 8.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Timed runs of each. Default: 3 for sparse and speculative, else 5."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts for speculative: JSON lines as of HumanEval or MT-bench, or text. "
            "Default: five beginnings of code.",
            dir_okay=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="The first so many prompts only, for speculative.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to write, for speculative. Default: 64.")
    ] = None,
    mtp: Annotated[
        int | None, typer.Option(help="Drafts a step, for speculative. Default: 3.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="mtp, ngram or both, for speculative. Default: mtp."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="packed, split or gqa, for speculative. Default: packed."),
    ] = None,
    sparse: Annotated[
        bool,
        typer.Option("--sparse", help="Attend to 256 chosen keys, for speculative."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: as many as torch takes by itself.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Save a figure here (png, svg or pdf).", dir_okay=False)
    ] = None,
) -> None:
    """Measure memory and time on this machine; no time for a wrong result.

    context: causal attention of rungs 2 (vectorised), 3 (online) and 4
    (paged) over a whole prompt. Memory is counted tensor by tensor and is
    the same on every machine; times are not.

    sparse: one decode step of one layer of DeepSeek-V3.2, 4 new tokens:
    sparse (top-k 2048), dense, and transformers' own layer. By default it
    takes minutes, and 0.8 GB for the weights.

    routing: one prefill chunk among verifier requests, 4 rows each: all to
    extend as the batch-wide rule has it, or each request by itself. Timed
    here; thread blocks are counted for a GPU of 188 SMs.

    speculative: a small real model writes on, with drafts and without, one
    prompt at a time; time counts where the tokens are the same. Minutes.

    The exit code is 1 if a result is wrong.
    """
    from mla_ref.bench import GateError
    from mla_ref.checks import require_choice

    require_choice("WHAT", what, tuple(BENCHES))
    asked = None
    if lengths is not None:
        asked = comma_numbers("--lengths", lengths, such_as="256,512")
    only_speculative = SpeculativeOptions(
        prompts, limit, tokens, mtp, drafter, attention, sparse or None
    )
    options = BenchOptions(
        asked, heads, head_dim, peer_length, requests, repeats, as_json, plot, only_speculative
    )
    if requests is not None and what != "routing":
        raise ValueError(f"--requests is for routing; {what} has one request")
    if what != "speculative":
        only_speculative.require_none(what)
    try:
        with _threads(threads):
            BENCHES[what](options)
    except GateError as error:
        typer.echo(f"mla-ref: error: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Give torch this many threads for a while. On a busy machine two can be slower than one."""
    import torch

    from mla_ref.checks import require_count

    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(require_count("--threads", wanted, at_least=1))
    try:
        yield
    finally:
        torch.set_num_threads(before)

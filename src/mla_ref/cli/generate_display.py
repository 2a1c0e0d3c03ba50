"""What is to be seen while `mla-ref generate` runs: the text, or how far all of them are."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mla_ref.cli.generate_result import Run, Writing
from mla_ref.cli.generate_run import Display, Job
from mla_ref.engine import Engine, Prompt


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A bar on stderr, gone when it is done; nothing where stderr is no terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(10), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(title, total=None)
    with bar:
        yield bar


def counting(bar: Progress, job: Job, title: str = "") -> Display:
    """Counts on the bar: who runs, who waits, how fast, how well the drafts do."""
    [task] = bar.task_ids
    bar.update(task, total=len(job.requests), completed=0)
    start, done, tokens = perf_counter(), 0, 0

    def show(engine: Engine, writing: Writing, news: str) -> None:
        nonlocal done, tokens
        done += writing.transcript.finish_reason is not None
        tokens += len(writing.outputs[-1].token_ids)
        words = [
            f"{len(engine.scheduler.running)} running",
            f"{len(engine.scheduler.waiting)} waiting",
            f"{done} done",
            f"{tokens / (perf_counter() - start):.1f} tokens/s",
        ]
        if engine.acceptance.num_drafts:
            words.append(f"acceptance {engine.acceptance.mean_acceptance_length:.2f}")
        bar.update(task, completed=done, description=title + ", ".join(words))

    return show


def streaming(bar: Progress, job: Job) -> Display:
    """The text itself, on stdout as it comes; before its first token, the prompt on the bar."""
    [task] = bar.task_ids
    [request], [prompt] = job.requests, job.prompts
    bar.update(task, total=len(request.prompt_ids), completed=0)
    opened = False

    def show(engine: Engine, writing: Writing, news: str) -> None:
        nonlocal opened
        bar.advance(task, writing.outputs[-1].num_prefilled)
        if not writing.transcript.token_ids:
            return
        if not opened:
            # Bar and text may be on one terminal, so the bar is gone before the text begins.
            bar.stop()
            typer.echo(_opening(prompt), nl=False)
            opened = True
        typer.echo(news, nl=False)

    return show


def show_all(run: Run) -> None:
    """Each prompt with its text, under its name."""
    for number, writing in enumerate(run.writings):
        said = writing.transcript
        title = f"=== {writing.request.request_id}: {len(said.token_ids)} tokens"
        typer.echo(f"{chr(10) * (number > 0)}{title} ({said.finish_reason})")
        typer.echo(f"{_opening(writing.prompt)}{writing.shown}")


def _opening(prompt: Prompt) -> str:
    """A text goes on where its prompt ends; an answer stands below its question."""
    return f"{prompt.text}\n\n" if prompt.chat else prompt.text

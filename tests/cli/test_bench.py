"""`mla-ref bench`: what it prints, its JSON, its figure, and a wrong result."""

import json
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from mla_ref.bench import context
from mla_ref.cli.bench import BENCHES, bench

pytestmark = pytest.mark.thorough

SMALL = ("--lengths", "16,32", "--heads", "1", "--head-dim", "8", "--repeats", "1")


def run(*words: str, width: int = 80) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, words, env={"COLUMNS": str(width)})


def test_the_first_line_says_what_was_measured_on_what() -> None:
    result = run("context", *SMALL, width=400)
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    for words in ("s_q = s_kv", "heads: 1 of width 8", "float32", "CPU only", torch.__version__):
        assert words in first
    assert first.endswith(f"threads: {torch.get_num_threads()}.")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_whole(width: int) -> None:
    result = run(*SMALL, width=width)  # context is what is measured if nothing is named
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    for rung in ("2 vectorised", "3 online", "4 paged"):
        assert result.stdout.count(rung) == 2
    assert "From 16 to 32 tokens the peak grows" in result.stdout


def test_one_length_has_no_growth() -> None:
    result = run(*SMALL, "--lengths", "16")
    assert result.exit_code == 0
    assert "grows" not in result.stdout


def test_json_is_the_only_thing_on_stdout() -> None:
    read = json.loads(run(*SMALL, "--json").stdout)
    assert [(row["length"], row["rung"]) for row in read["rows"]] == [
        (length, rung) for length in (16, 32) for rung in (2, 3, 4)
    ]
    assert read["machine"]["torch"] == torch.__version__
    assert read["machine"]["device"] == "cpu"


def test_threads_are_set_for_the_measurement_only() -> None:
    read = json.loads(run(*SMALL, "--threads", "3", "--json").stdout)
    assert read["machine"]["threads"] == 3
    assert torch.get_num_threads() == 1


def test_plot_saves_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "context.png"
    result = run(*SMALL, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in result.stdout


def test_a_wrong_rung_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = context.paged_attention
    monkeypatch.setattr(
        context, "paged_attention", lambda *a, **k: right(*a, **k)._replace(lse=torch.ones(16, 1))
    )
    result = run(*SMALL)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("mla-ref: error: rung 4 (paged), 16 tokens: no time")


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("kernels",), ValueError, "WHAT must be one of context"),
        (("--lengths", "64,x"), ValueError, "--lengths"),
        (("--lengths", ""), ValueError, "--lengths"),
        (("--peer-length", "64"), ValueError, "--peer-length is for sparse"),
        (("--threads", "0"), ValueError, "--threads must be at least 1"),
        (("--lengths", "64,0"), ValueError, "--lengths must be numbers of 1 or more"),
        (("--plot", "context.gif"), ValueError, "--plot"),
        (("--plot", "no/such/folder/context.png"), FileNotFoundError, "no folder"),
        (("--plot", "context.png", "--lengths", "64"), ValueError, "two lengths"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    words: tuple[str, ...], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "measure", lambda *a, **k: pytest.fail("measured"))
    result = run(*words)
    assert isinstance(result.exception, error)
    assert says in str(result.exception)


def test_the_table_of_what_can_be_measured() -> None:
    assert list(BENCHES) == ["context", "sparse", "routing", "speculative"]

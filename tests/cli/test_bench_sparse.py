"""`mla-ref bench sparse`: what it prints, its JSON, its figure, and a peer that is missing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

import mla_ref.bench
import mla_ref.layers
from mla_ref.bench import sparse
from mla_ref.cli import bench_sparse
from mla_ref.cli.bench import bench

pytestmark = pytest.mark.thorough

V32 = mla_ref.layers.preset("v3.2")
TINY = replace(
    V32,
    hidden_size=48,
    num_heads=3,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    v_head_dim=20,
    softmax_scale=mla_ref.layers.default_softmax_scale(16, 64, V32.rope.yarn),
    indexer=replace(V32.indexer, num_heads=8, topk=8),
)
SMALL = ("sparse", "--lengths", "8,70", "--repeats", "1")
NO_PEER = (*SMALL, "--peer-length", "0")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's head geometry takes 0.8 GB."""
    monkeypatch.setattr(mla_ref.layers, "preset", lambda name: {"v3.2": TINY}[name])


def run(*words: str, width: int = 80) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, words, env={"COLUMNS": str(width)})


def test_the_first_line_says_what_was_measured_on_what() -> None:
    result = run(*NO_PEER, width=400)
    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[0]
    for words in ("v3.2", "4 new tokens", "3 heads", "top-k 8", "float32", torch.__version__):
        assert words in first
    assert first.endswith("threads: 1.")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_and_the_ratios_are_whole(width: int) -> None:
    result = run(*NO_PEER, width=width)
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    lines = result.stdout.splitlines()
    for name in ("dense", "sparse float32", "sparse FP8"):
        assert sum(f" {name} " in line and line.endswith("s") for line in lines) == 2
        assert any(line.startswith(f"{name} 70 / 8: ") for line in lines)
    assert any(line.startswith("dense / sparse FP8 at 70: ") for line in lines)


def test_heads_may_be_fewer() -> None:
    assert " 2 heads" in run(*NO_PEER, "--heads", "2", width=400).stdout


def test_json_is_the_only_thing_on_stdout() -> None:
    read = json.loads(run(*NO_PEER, "--json").stdout)
    assert [(row["length"], row["name"]) for row in read["rows"]] == [
        (length, name) for length in (8, 70) for name in ("dense", "sparse float32", "sparse FP8")
    ]
    assert "dense / sparse FP8 at 70" in [ratio["what"] for ratio in read["ratios"]]
    assert read["machine"]["device"] == "cpu"
    assert "--peer-length 0" in read["no_peer"]


@pytest.mark.peers
@pytest.mark.usefixtures("plain_calls")
def test_the_peer_is_measured_up_to_its_length() -> None:
    pytest.importorskip("transformers")
    read = json.loads(run(*SMALL, "--peer-length", "8", "--json").stdout)
    assert [row["length"] for row in read["rows"] if row["name"] == "peer"] == [8]
    assert read["no_peer"] is None


def test_without_transformers_a_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(
            f'{name} is needed here and is not installed: pip install "mla-ref[peers]"'
        )

    monkeypatch.setattr(bench_sparse, "require", missing)
    result = run(*SMALL, width=200)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("No peer")]
    assert "mla-ref[peers]" in line
    assert " peer " not in result.stdout


def test_plot_saves_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sparse.png"
    result = run(*NO_PEER, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in result.stdout


def test_a_wrong_result_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sparse.DecodeStep.dense_fp8
    monkeypatch.setattr(
        sparse.DecodeStep, "dense_fp8", lambda self: right(self)._replace(out=right(self).out + 1)
    )
    result = run(*NO_PEER)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("mla-ref: error: sparse FP8: no time is reported. The result")


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--lengths", "8,x"), ValueError, "--lengths"),
        (("--lengths", "8,3"), ValueError, "lengths must be at least 4"),
        (("--head-dim", "8"), ValueError, "--head-dim is for context"),
        (("--heads", "0"), ValueError, "heads must be at least 1"),
        (("--peer-length", "-1"), ValueError, "--peer-length must be at least 0"),
        (("--repeats", "0"), ValueError, "repeats must be at least 1"),
        (("--plot", "sparse.gif"), ValueError, "--plot"),
        (("--plot", "sparse.png", "--lengths", "64"), ValueError, "two lengths"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    words: tuple[str, ...], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse.Layer, "random", lambda *a: pytest.fail("made weights"))
    result = run(*SMALL, *words)
    assert isinstance(result.exception, error), result.output
    assert says in str(result.exception)

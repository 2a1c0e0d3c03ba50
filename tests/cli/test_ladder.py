"""`mla-ref ladder` as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

from mla_ref.cli.app import app
from mla_ref.ladder import rung_runs
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import AttentionResult

# The smallest preset: 16 heads, no compressed query.
QUICK = ["ladder", "--model", "deepseek-v2-lite", "--tokens", "5"]


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_table_ends_with_the_verdict():
    result = run(*QUICK)
    assert result.exit_code == 0, result.output
    assert "All 7 rungs agree" in result.output
    assert "Not climbed: 8, 9, 10, 11, 12, 13, 14, 15 (needs an indexer)" in result.output


def test_json_holds_seven_rungs():
    data = json.loads(run(*QUICK, "--json").stdout)
    assert data["ok"] is True
    assert [r["rung"] for r in data["rungs"]] == [1, 2, 3, 4, 5, 6, 7]
    assert data["rungs"][5]["kv_bytes_per_token_per_layer"] == 576 * 4
    assert data["rungs"][6]["kv_bytes_per_token_per_layer"] == 656


def test_float64_and_bfloat16_climb_too():
    for dtype in ("float64", "bfloat16"):
        result = run(*QUICK, "--dtype", dtype)
        assert result.exit_code == 0, result.output


def test_a_wrong_rung_gives_exit_code_one_and_its_name(monkeypatch):
    right = rung_runs.online_attention

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return AttentionResult(-out, lse)

    monkeypatch.setattr(rung_runs, "online_attention", wrong)
    result = run(*QUICK)
    assert result.exit_code == 1
    assert "rung 3 (online) disagrees with rung 2" in result.stderr


def test_where_names_the_file_of_every_rung():
    result = run("ladder", "--where")
    assert "causal.py" in result.output
    assert "mla_kernels" in result.output
    assert len(json.loads(run("ladder", "--where", "--json").stdout)) == 15


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--model", "gpt-2"], "--model"),
        (["--dtype", "int8"], "--dtype"),
        (["--layers", "a,b"], "--layers"),
        (["--layers", "-1"], "--layers"),
        (["--tokens", "0"], "--tokens"),
        (["--text", "x.txt"], "--text"),
    ],
)
def test_bad_options_are_one_line_that_names_the_option(args, named):
    result = run("ladder", "--model", "deepseek-v2-lite", *args)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.output


def test_a_text_that_is_not_utf8_is_named_with_its_option(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("été".encode("latin-1"))
    result = run("ladder", "--text", str(path))
    assert result.exit_code == 2
    assert f"mla-ref: error: --text {path} is not UTF-8: " in result.stderr


def test_what_an_editor_on_windows_adds_is_no_part_of_the_text(tmp_path, monkeypatch):
    class Listener:
        """A tokenizer that finds no token."""

        def encode(self, text):
            read.append(text)
            return []

    read = []
    monkeypatch.setattr(SmolLM2, "from_gguf", lambda *_, **__: None)
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda *_: Listener())
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    result = run("ladder", "--text", str(path))
    assert f"--text {path} holds no text" in result.stderr
    assert read == ["one\ntwo\n"]


@pytest.mark.model
def test_the_real_model_climbs(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3, encoding="utf-8")
    result = run("ladder", "--text", str(text), "--layers", "0,29", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["ok"] and data["layers"] == [0, 29]
    # Layer 29 has no indexer of its own: it takes the list of layer 26.
    assert [r["rung"] for r in data["rungs"]] + list(map(int, data["not_climbed"])) == [
        *range(1, 16)
    ]
    assert data["rungs"][7]["lse_rel_l2"] is None
    assert "tokens only" in result.stderr


@pytest.mark.model
@pytest.mark.parametrize(("layers", "content"), [("30", "words"), ("0", "")])
def test_a_layer_or_text_that_is_not_there(tmp_path, layers, content):
    text = tmp_path / "text.txt"
    text.write_text(content, encoding="utf-8")
    result = run("ladder", "--text", str(text), "--layers", layers)
    assert result.exit_code == 2
    assert "mla-ref: error: --" in result.stderr

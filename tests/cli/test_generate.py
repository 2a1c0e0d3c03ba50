"""`mla-ref generate`: what goes to stdout, what to stderr, and the errors of its input."""

import json

import pytest
from typer.testing import CliRunner

from mla_ref.cli.app import app


def invoke(*args: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["generate", *args], input=stdin)


@pytest.mark.model
def test_text_on_stdout_and_figures_on_stderr():
    result = invoke("-", "--tokens", "16", "--form", "expanded", stdin="def fibonacci(n):\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("def fibonacci(n):\n    if n ")
    assert "return" in result.stdout and result.stdout.endswith("\n")
    assert "tokens/s" not in result.stdout
    assert result.stderr.startswith("16 tokens (length), prefill ")
    # 30 layers of 576 numbers in float32.
    assert "KV cache 69,120 bytes a token (packed expanded, float32)" in result.stderr


@pytest.mark.model
def test_json_is_one_object_and_the_only_output():
    words = ("Once upon a time", "--tokens", "3", "--attention", "gqa", "--cache-dtype", "bfloat16")
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert result.stderr == ""
    assert said["prompt"] == "Once upon a time" and said["prompt_tokens"] == 4
    assert len(said["token_ids"]) == said["new_tokens"] == 3
    assert said["text"] and said["finish_reason"] == "length"
    assert (said["attention"], said["form"], said["cache_dtype"]) == ("gqa", None, "bfloat16")
    # 30 layers, 3 keys and 3 values of 64 numbers, 2 bytes each.
    assert said["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert said["prefill_tokens_per_second"] > 0 and said["decode_tokens_per_second"] > 0


@pytest.mark.parametrize(
    "args, message",
    [
        (("",), "PROMPT must hold some text, got an empty one"),
        (("-",), "PROMPT must hold some text"),
        (("a", "--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("a", "--attention", "mla"), "--attention must be one of gqa, split, packed, got 'mla'"),
        (("a", "--cache-dtype", "int8"), "--cache-dtype must be one of float32, bfloat16"),
        (("a", "--gguf", "nothing.gguf"), "there is no file nothing.gguf"),
        (("a", "--gguf", __file__), "test_generate.py is not a GGUF file"),
    ],
)
def test_wrong_input_is_found_before_the_model_is_loaded(args, message):
    result = invoke(*args, stdin="\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mla-ref: error: ") and message in result.stderr

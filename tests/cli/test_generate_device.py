"""`mla-ref generate` on a device, with graphs and with a backend: what it checks and reports."""

import json
from typing import Any

import pytest
import torch
from tests.engine.byte_tokenizer import ByteTokenizer
from typer.testing import CliRunner

from mla_ref.cli import generate_run
from mla_ref.cli.app import app
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model in the packed form; the choices with which it was asked for."""
    found: dict[str, Any] = {}
    config = SmolLM2Config(num_layers=1, vocab_size=256, context_length=192)

    def load_model(file: None, **choices: Any) -> SmolLM2:
        found.update(choices)
        return SmolLM2.random(config, 5, dtype=choices["dtype"])

    monkeypatch.setattr(generate_run, "GGUFFile", lambda path: None)
    monkeypatch.setattr(generate_run, "default_gguf", lambda: None)
    monkeypatch.setattr(generate_run, "Tokenizer", ByteTokenizer)
    monkeypatch.setattr(generate_run, "load_model", load_model)
    return found


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["generate", "abcab", "--tokens", "9", *args])


def told(*args: str) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_names_device_backend_graphs_and_kernels(loaded: dict[str, Any]) -> None:
    plain = told()
    assert (plain["device"], plain["device_name"], plain["dtype"]) == ("cpu", None, "fp32")
    assert (plain["graphs"], plain["replayed_steps"], plain["recorded_graphs"]) == (False, 0, 0)
    assert (plain["backend"], plain["kernels"]) == (None, None)
    replayed = told("--graphs", "--mtp", "3", "--drafter", "ngram")
    # One of steps with drafts, and one of steps where nobody has any.
    assert replayed["graphs"] and replayed["recorded_graphs"] == 2
    assert replayed["replayed_steps"] == replayed["steps"] - 1  # all but the prompt's
    assert replayed["prompts"][0]["token_ids"] == plain["prompts"][0]["token_ids"]


def test_the_figures_say_where_it_ran_if_not_as_always(loaded: dict[str, Any]) -> None:
    assert "replayed" not in invoke().stderr
    said = invoke("--graphs", "--dtype", "bf16", "--device", "cpu").stderr
    assert "on cpu in bf16; 8 of 9 steps replayed from 1 graphs" in said
    assert loaded["dtype"] == torch.bfloat16 and loaded["device"] == torch.device("cpu")


def test_a_row_attends_to_256_keys_if_sparse_and_nothing_else_is_said(
    loaded: dict[str, Any],
) -> None:
    for args, topk in (((), None), (("--sparse",), 256), (("--sparse", "--topk", "9"), 9)):
        assert told(*args, "--cache-dtype", "float32")["topk"] == topk == loaded["topk"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "cuda:99"), "device 'cuda:99'"),
        (("--device", "gpu"), "device must be cpu, cuda, cuda:N or auto, got 'gpu'"),
        (("--dtype", "float32"), "--dtype must be one of fp32, bf16, got 'float32'"),
        (("--backend", "emulated-b12x"), "--backend needs --sparse"),
        (("--graphs", "--attention", "gqa"), "--graphs needs the absorbed form"),
        (("--graphs", "--form", "expanded"), "--graphs needs the absorbed form"),
    ],
)
def test_wrong_options_are_found_before_the_model_is_loaded(
    loaded: dict[str, Any], args: tuple[str, ...], message: str
) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stdout, loaded) == (2, "", {})
    assert message in result.stderr

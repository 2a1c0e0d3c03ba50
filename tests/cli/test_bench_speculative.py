"""`mla-ref bench speculative`: what it prints, its JSON, a wrong text, and the real model."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cli.verbs import run_verb, words

from mla_ref.cli import bench_speculative
from mla_ref.cli.bench import bench
from mla_ref.engine import runner
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.speculative import NewTokens, NgramDrafter

pytestmark = pytest.mark.thorough

SMALL = ("speculative", "--limit", "2", "--tokens", "5", "--repeats", "1")


class Mtp(NgramDrafter):
    """Stands for the trained module, whose weights fit the real model alone."""

    @property
    def name(self) -> str:
        return "mtp"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one layer that reads letters."""
    config = SmolLM2Config(num_layers=1, vocab_size=128, context_length=512)
    model = SmolLM2.random(config, attention="gqa")
    kinds = {"mtp": Mtp, "ngram": NgramDrafter}

    def build(attention: str, sparse: bool, names: Any, num_drafts: int) -> Any:
        return model, [kinds[name](num_drafts) for name in names]

    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text[-40:]], eos_id=None)
    monkeypatch.setattr(bench_speculative, "_model", build)
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda: tokenizer)


run = partial(run_verb, bench)


@pytest.mark.usefixtures("tiny")
def test_tables_are_whole_and_say_what_was_found() -> None:
    result = run(*SMALL, "--drafter", "both", "--mtp", "2")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    shown = words(result.stdout)
    first = shown[: shown.index("prompt way")]
    for part in ("batch 1, greedy", "drafts a step: 2", "runs of each: 1", torch.__version__):
        assert part in first
    assert first.endswith("threads: 1. ")
    assert "sort plain 5 4" in shown and "text plain 5 4" in shown
    for part in ("plain, a step", "mtp, a token", "ngram, a step", "schedule forward logits"):
        assert part in shown
    assert shown.count("2 prompts are too few to say how sure that is.") == 2
    assert "accepted by position:" in shown
    assert "ties of logits closer than 1e-04: 0 here." in shown


@pytest.mark.usefixtures("tiny")
def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gain.png"
    result = run(*SMALL, "--json", "--plot", str(path))
    read = json.loads(result.stdout)
    assert [row["name"] for row in read["rows"]] == ["sort", "text"]
    assert list(read["rows"][0]["ways"]) == ["plain", "mtp"]
    (gain,) = read["gains"]
    assert gain["drafter"] == "mtp" and gain["num_prompts"] == 2 and gain["interval"] is None
    assert gain["in_words"].startswith("mtp: ") and "seed 0" in gain["interval_method"]
    assert read["machine"]["threads"] == 1 and "greedy" in read["what"]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny")
def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"task_id": "HumanEval/0", "prompt": "def f"}, {"question_id": 81, "turns": ["Why?"]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    read = json.loads(run(*SMALL, "--prompts", str(path), "--json").stdout)
    plain, chat = read["rows"]
    assert plain["name"] == "HumanEval/0" and plain["prompt_tokens"] == len("def f")
    assert "81" in chat["name"] and chat["prompt_tokens"] == 40  # the chat's frame around it


@pytest.mark.usefixtures("tiny")
def test_a_wrong_text_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = runner.verify

    def off(logits: Any, drafts: Any, params: Any, positions: Any, **more: Any) -> NewTokens:
        found = right(logits, drafts, params, positions, **more)
        wrong = bool(drafts[0])
        return NewTokens([[(i + wrong) % 128 for i in t] for t in found[0]], found[1])

    monkeypatch.setattr(runner, "verify", off)
    result = run(*SMALL)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("mla-ref: error: mtp, prompt 'sort': no time is reported.")
    assert "top-2 gap" in result.stderr and "sort" not in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--mtp", "0"), "--mtp must be at least 1"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--drafter", "oracle"), "--drafter must be one of mtp"),
        (("--attention", "flash"), "--attention must be one of gqa"),
        (("--attention", "gqa", "--sparse"), "--sparse attends on the packed form"),
        (("--lengths", "8"), "--lengths is not for speculative"),
        (("--heads", "8"), "--heads is not for speculative"),
        (("--head-dim", "8"), "--head-dim is not for speculative"),
        (("--peer-length", "8"), "--peer-length is not for speculative"),
        (("--requests", "8"), "--requests is for routing"),
        (("--plot", "gain.gif"), "the ending of --plot"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    args: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_speculative, "_model", lambda *a: pytest.fail("loaded"))
    result = run(*SMALL, *args)
    assert isinstance(result.exception, ValueError), result.output
    assert says in str(result.exception)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(*SMALL, "--prompts", str(tmp_path / "none.jsonl"))
    assert isinstance(result.exception, FileNotFoundError)
    assert "none.jsonl" in str(result.exception)


@pytest.mark.parametrize(
    "args",
    [
        ("--prompts", "p.txt"),
        ("--limit", "1"),
        ("--tokens", "1"),
        ("--mtp", "1"),
        ("--drafter", "mtp"),
        ("--attention", "gqa"),
        ("--sparse",),
    ],
)
def test_its_options_are_for_it_alone(args: tuple[str, ...]) -> None:
    result = run("routing", *args)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == f"{args[0]} is for speculative, not for routing"


@pytest.mark.model
@pytest.mark.slow  # The examples of the command run the real model in every run of the tests.
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--attention", "packed"), "attention packed, float32"),
        (("--sparse",), "sparse, top-k 256, FP8 cache"),
    ],
)
def test_the_real_model_says_the_same_with_drafts(args: tuple[str, ...], says: str) -> None:
    result = run("speculative", *args, "--limit", "1", "--tokens", "4", "--repeats", "1")
    assert result.exit_code == 0, result.output
    shown = words(result.stdout)
    assert says in shown and "sort plain 4 3" in shown

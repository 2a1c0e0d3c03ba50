"""`mla-ref generate`: what goes to stdout, what to stderr, and the errors of its input.

Most of it is seen on a random model of one layer whose tokens are bytes; the real one is asked
whether drafts leave its text as it is.
"""

import json
import re
from functools import cache

import pytest
import torch
from tests.engine.byte_tokenizer import ByteTokenizer
from typer.testing import CliRunner

from mla_ref.cli import generate_display, generate_run
from mla_ref.cli.app import app
from mla_ref.engine import load
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config, SmolLM2Weights


def invoke(*args: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["generate", *args], input=stdin)


def told(*args: str) -> dict:
    result = invoke(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def unmarked(text: str) -> str:
    """What `--show-drafts` has printed without a terminal, less rejected drafts and marks."""
    return re.sub(r"\[-.*?-\]", "", text).replace("{+", "").replace("+}", "")


@pytest.fixture
def tiny(monkeypatch):
    """A model that writes printable characters, in turns that prompt look-up finds now and then."""
    config = SmolLM2Config(num_layers=1, vocab_size=256, context_length=192)
    model = SmolLM2.random(config, 5, attention="gqa")
    # With the embedding as its head, a random model says the same token again and again.
    head = torch.randn(256, config.hidden_size, generator=torch.Generator().manual_seed(1)) / 4
    others = torch.tensor([chr(token) not in "abcdef" for token in range(256)])
    model.logits = lambda hidden: (hidden @ head.T).masked_fill(others, -1e4)
    monkeypatch.setattr(generate_run, "GGUFFile", lambda path: None)
    monkeypatch.setattr(generate_run, "default_gguf", lambda: None)
    monkeypatch.setattr(generate_run, "Tokenizer", ByteTokenizer)
    monkeypatch.setattr(generate_run, "load_model", lambda file, **choices: model)


DRAFTED = ("--mtp", "3", "--drafter", "ngram")


def test_the_text_is_on_stdout_and_the_figures_on_stderr(tiny):
    result = invoke("-", "--tokens", "12", stdin="an end\n")
    assert result.exit_code == 0, result.output
    assert re.fullmatch("an end[a-f]{12}\n", result.stdout)
    first, second = result.stderr.splitlines()
    assert first.startswith("12 tokens (length), prefill ") and " tokens/s, decode " in first
    assert second.startswith("a decode step: ") and "forward" in second


def test_with_drafts_the_tokens_are_the_same(tiny):
    plain, drafted = told("abc", "--tokens", "24"), told("abc", "--tokens", "24", *DRAFTED)
    assert plain["prompts"][0]["token_ids"] == drafted["prompts"][0]["token_ids"]
    assert plain["steps"] == 24 > drafted["steps"]
    assert plain["drafter"] is None and drafted["drafter"] == "ngram"
    stats = drafted["acceptance"]
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["mean_acceptance_length"] > 1 and len(stats["per_position_rates"]) == 3
    assert plain["acceptance"]["mean_acceptance_length"] is None and plain["comparison"] is None
    steps = drafted["prompts"][0]["steps"]
    assert [t for step in steps for t in step["new_tokens"]] == drafted["prompts"][0]["token_ids"]
    assert sum(step["num_accepted"] for step in steps) == stats["accepted_tokens"]


def test_show_drafts_marks_them_and_ends_with_the_comparison(tiny):
    plain = invoke("abc", "--tokens", "24").stdout
    result = invoke("abc", "--tokens", "24", *DRAFTED, "--show-drafts")
    assert result.exit_code == 0, result.output
    legend, blank, text = result.stdout.split("\n", 2)
    assert "{+drafted and accepted+}  [-drafted and rejected-]" in legend and not blank
    assert "{+" in text and "[-" in text and unmarked(text) == plain
    last = result.stderr.splitlines()[-1]
    said = told("abc", "--tokens", "24", *DRAFTED, "--compare")
    steps, saved = said["steps"], said["comparison"]["steps_saved"]
    assert said["comparison"]["plain"]["steps"] == 24 == steps + saved
    assert last.startswith(f"{steps} steps instead of 24 ({saved} saved), mean acceptance length ")
    assert " s for plain decoding, " in last and last.endswith(" times as fast; the same tokens")
    assert said["comparison"]["same_tokens"] and said["comparison"]["first_difference"] is None
    assert "--compare" in invoke("abc", *DRAFTED).stderr.splitlines()[-1]


def test_other_tokens_are_not_passed_over(tiny, monkeypatch):
    # Runs: twice to warm up, with drafts, without; the last is to be another text.
    runs, real = [], generate_run.Job._engine

    def engine(job, requests, drafts):
        runs.append(drafts)
        made = real(job, requests, drafts)
        if len(runs) % 4 == 0:
            logits = made.runner.model.logits
            monkeypatch.setattr(made.runner.model, "logits", lambda h: logits(h).roll(1, dims=1))
        return made

    monkeypatch.setattr(generate_run.Job, "_engine", engine)
    result = invoke("abc", "--tokens", "8", *DRAFTED, "--compare")
    assert result.exit_code == 0 and runs == [False, True, True, False]
    assert "; OTHER TOKENS from number 0 of prompt on: two logits" in result.stderr


def test_many_prompts_run_together_and_come_in_their_order(tiny, tmp_path):
    path = tmp_path / "mine.jsonl"
    names = ["long", "short", "short"]
    entries = [{"name": n, "prompt": t} for n, t in zip(names, ["ab" * 40, "e", "ff"], strict=True)]
    path.write_text("\n".join(map(json.dumps, entries)))
    result = invoke("--prompts", str(path), "--tokens", "9", "--max-seqs", "2", *DRAFTED)
    assert result.exit_code == 0, result.output
    alone = [invoke(entry["prompt"], "--tokens", "9").stdout for entry in entries]
    titles = [f"=== {name}: 9 tokens (length)\n" for name in ("long", "short", "short #2")]
    assert result.stdout == "\n".join(map(str.__add__, titles, alone))
    assert result.stderr.startswith("27 tokens (3 length), ")
    said = told("--prompts", str(path), "--limit", "2", "--tokens", "9")
    assert [p["name"] for p in said["prompts"]] == ["long", "short"]
    assert said["steps"] == 9 and said["new_tokens"] == 18


def test_sampled_prompts_have_a_seed_each_and_the_same_text_in_any_company(tiny, tmp_path):
    path = tmp_path / "same.txt"
    path.write_text("abc\n---\nabc\n---\nabc\n")
    words = ("--tokens", "12", "--temperature", "1.5", "--seed", "4", "--sample-top-k", "6")
    prompts = told("--prompts", str(path), *words)["prompts"]
    assert len({p["text"] for p in prompts}) == len({p["sampling"]["seed"] for p in prompts}) == 3
    assert {p["sampling"]["top_k"] for p in prompts} == {6}
    one_by_one = told("--prompts", str(path), *words, "--max-seqs", "1", "--chunk-size", "2")
    assert [p["text"] for p in one_by_one["prompts"]] == [p["text"] for p in prompts]
    assert told("abc", *words)["prompts"][0]["text"] == prompts[0]["text"]
    result = invoke("abc", *words, *DRAFTED, "--compare")
    assert result.stderr.rstrip().endswith(("the same tokens", "their law is the same"))


def test_a_stop_text_ends_the_text_with_drafts_or_without(tiny):
    whole = told("abc", "--tokens", "24")["prompts"][0]["text"]
    stop = whole[9:12]
    for words in ((), DRAFTED):
        run = told("abc", "--tokens", "24", "--stop-at", stop, *words)
        [said] = run["prompts"]
        # The engine does not go on behind it.
        assert run["steps"] <= len(said["token_ids"]) < 24
        assert said["text"] == whole.partition(stop)[0] and said["finish_reason"] == "stop"
        assert bytes(said["token_ids"]).decode() == said["text"] + stop
    result = invoke("abc", "--tokens", "24", "--stop-at", stop, *DRAFTED, "--show-drafts")
    assert unmarked(result.stdout.split("\n", 2)[2]) == f"abc{whole.partition(stop)[0]}\n"
    assert result.stderr.splitlines()[-1].endswith("; the same tokens")


def test_a_question_is_put_in_the_form_of_a_chat(tiny):
    said = told("Why?", "--chat", "--tokens", "2")["prompts"][0]
    assert said["prompt"] == "Why?" and said["chat"]
    assert said["prompt_tokens"] == len("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert re.fullmatch("Why\\?\n\n[a-f]{2}\n", invoke("Why?", "--chat", "--tokens", "2").stdout)


def test_the_bar_counts_requests_and_drafts(tiny, tmp_path, monkeypatch):
    path = tmp_path / "two.txt"
    path.write_text("abc\n---\nfed\n")
    said = []
    update = generate_display.Progress.update

    def note(bar, task, **changes):
        said.append(changes.get("description"))
        return update(bar, task, **changes)

    monkeypatch.setattr(generate_display.Progress, "update", note)
    words = ("--prompts", str(path), "--tokens", "16", "--max-seqs", "1")
    assert invoke(*words, *DRAFTED).exit_code == 0
    assert said[1].startswith("1 running, 1 waiting, 0 done, ")
    assert re.fullmatch(
        r"0 running, 0 waiting, 2 done, [\d.]+ tokens/s, acceptance [\d.]+", said[-1]
    )


@pytest.fixture
def weights_once(monkeypatch, plain_calls):
    """The weights are read once; the shape checks, in other tests of the engine, take most time."""
    monkeypatch.setattr(load, "SmolLM2Weights", _ReadOnce)


class _ReadOnce:
    read = staticmethod(lambda file, dtype: _read(str(file.path), dtype))


@cache
def _read(path: str, dtype: torch.dtype) -> SmolLM2Weights:
    return SmolLM2Weights.read(generate_run.GGUFFile(path), dtype)


@pytest.mark.model
def test_mtp_leaves_the_text_of_the_real_model_as_it_is(weights_once):
    words = ("def fibonacci(n):", "--tokens", "8")
    result = invoke(*words, "--mtp", "3", "--show-drafts")
    assert result.exit_code == 0, result.output
    text = unmarked(result.stdout.split("\n", 2)[2])
    assert text.startswith("def fibonacci(n):\n    if n ")
    # 30 layers of 576 numbers in float32.
    assert "KV cache 69,120 bytes a token (packed absorbed, float32)" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("; the same tokens")


@pytest.mark.model
def test_json_of_the_real_model(weights_once):
    words = ("Once upon a time", "--tokens", "3", "--attention", "gqa", "--cache-dtype", "bfloat16")
    said = told(*words)
    [prompt] = said["prompts"]
    assert prompt["prompt"] == "Once upon a time" and prompt["prompt_tokens"] == 4
    assert len(prompt["token_ids"]) == prompt["new_tokens"] == said["new_tokens"] == 3
    assert prompt["text"] and prompt["finish_reason"] == "length"
    assert (said["attention"], said["form"], said["cache_dtype"]) == ("gqa", None, "bfloat16")
    # 30 layers, 3 keys and 3 values of 64 numbers, 2 bytes each.
    assert said["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert said["prefill_tokens_per_second"] > 0 and said["decode_tokens_per_second"] > 0
    assert set(said["seconds_of_a_decode_step"]) >= {"forward", "drafting"}


@pytest.mark.model
@pytest.mark.parametrize(
    "mode, routes",
    [
        ("auto", {"decode": {"verifier", "single-token"}, "extend": {"prefill-in-batch"}}),
        ("0", {"extend": {"mode-off"}, "decode": {"single-token"}}),
    ],
)
def test_the_routes_of_sparse_verifier_rows_are_counted(weights_once, mode, routes):
    words = ("def add(a, b):", "--tokens", "6", "--sparse", "--topk", "16", "--mtp", "3")
    said = told(*words, "--mode", mode)
    assert said["mode"] == mode and (said["topk"], said["cache_dtype"]) == (16, "fp8")
    counted = said["routes"]
    assert sum(n for reasons in counted.values() for n in reasons.values()) == said["steps"]
    for route, reasons in counted.items():
        assert set(reasons) <= routes[route]
    assert counted["decode"]["verifier"] if mode == "auto" else counted["extend"]["mode-off"]


@pytest.mark.parametrize(
    "args, message",
    [
        (("",), "PROMPT must hold some text, got an empty one"),
        (("-",), "PROMPT must hold some text"),
        ((), "give either a PROMPT or --prompts FILE"),
        (("a", "--prompts", "b.txt"), "give either a PROMPT or --prompts FILE"),
        (("--prompts", "nothing.jsonl"), "No such file or directory: nothing.jsonl"),
        (("--prompts", __file__), "prompts are read from .jsonl, .jsonl.gz and .txt"),
        (("a", "--limit", "1"), "--limit needs --prompts FILE"),
        (("a", "--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("a", "--stop-at", ""), "--stop-at must hold some text"),
        (("a", "--mtp", "-1"), "--mtp must be at least 0, got -1"),
        (("a", "--mtp", "3", "--chunk-size", "3"), "--chunk-size must hold the newest token and 3"),
        (("a", "--mtp", "1", "--drafter", "eagle"), "--drafter must be one of mtp, ngram"),
        (("a", "--drafter", "mtp"), "--drafter needs --mtp N"),
        (("a", "--compare"), "--compare needs --mtp N"),
        (("a", "--show-drafts"), "--show-drafts needs --mtp N"),
        (("a", "--temperature", "-1"), "temperature must be 0 or a normal float32 above 0"),
        (("a", "--temperature", "1", "--sample-top-k", "0"), "--sample-top-k must be at least 1"),
        (("a", "--temperature", "1", "--top-p", "0"), "top_p must be greater than 0"),
        (("a", "--seed", "1"), "--seed needs --temperature"),
        (("a", "--top-k", "5"), "--top-k is no option: --topk K is the keys that a row attends to"),
        (("a", "--attention", "mla"), "--attention must be one of gqa, split, packed, got 'mla'"),
        (("a", "--form", "folded"), "--form must be one of expanded, absorbed"),
        (("a", "--attention", "gqa", "--form", "absorbed"), "--form is for MLA"),
        (("a", "--cache-dtype", "int8"), "--cache-dtype must be one of float32, bfloat16"),
        (("a", "--cache-dtype", "fp8"), "--cache-dtype fp8 needs --sparse"),
        (("a", "--sparse", "--attention", "gqa"), "--sparse attends on the packed form"),
        (("a", "--mode", "0"), "--mode needs --sparse"),
        (("a", "--topk", "64"), "--topk needs --sparse"),
        (("a", "--topk", "0", "--sparse"), "--topk must be at least 1, got 0"),
        (("a", "--sparse", "--mode", "2"), "mode must be one of auto, 0"),
        (("a", "--backend", "cuda"), "backend must be one of torch"),
        (("a", "--page-size", "0"), "--page-size must be at least 1"),
        (("a", "--max-seqs", "0"), "--max-seqs must be at least 1"),
        (("a", "--gguf", "nothing.gguf"), "there is no file nothing.gguf"),
        (("a", "--gguf", __file__), "test_generate.py is not a GGUF file"),
    ],
)
def test_wrong_input_is_found_before_the_model_is_loaded(monkeypatch, args, message):
    monkeypatch.setattr(load, "SmolLM2Weights", None)
    result = invoke(*args, stdin="\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mla-ref: error: ") and message in result.stderr


def test_a_prompt_beyond_the_context_is_refused_by_name(tiny):
    result = invoke("abc", "--tokens", "190")
    assert result.exit_code == 2 and result.stdout == ""
    assert "request 'prompt': prompt and new tokens must fit into the model's context of 192" in (
        result.stderr
    )

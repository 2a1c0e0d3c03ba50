"""`mla-ref validate`: what it prints and writes, its exit codes, and the real model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cli.verbs import run_verb, words
from tests.validation.small import SCRIPTS, Faulty, scales_wrong
from tests.validation.small import validate as replay_small

import mla_ref.validation as validation
from mla_ref.bench.speculative_prompts import PROMPTS
from mla_ref.cli import validate_rows
from mla_ref.cli.validate import VALIDATIONS, validate
from mla_ref.cli.validate_report import ValidateOptions, command, prompt_ids
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.validation import Configuration, Finding, LayerErrors, Replay, judge

pytestmark = pytest.mark.thorough


@cache
def replayed(kind: type, shards: int) -> Replay:
    """Of the small model, by torch or by a decode that scales wrongly."""
    backend = Faulty(scales_wrong) if kind is Faulty else kind()
    return replay_small(backend, SCRIPTS, shards=shards)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small random model and scripts by hand in place of the real ones; `asked` is kept."""
    asked: dict[str, Any] = {"configurations": []}
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) % 60 for c in text[-40:]])

    def write(model: Any, drafter: Any, prompts: Mapping[str, Any], **kwargs: Any) -> Any:
        asked.update(prompts=prompts, **kwargs)
        return list(SCRIPTS)

    def one(configuration: Configuration, dense: Any, scripts: Any, **kwargs: Any) -> Finding:
        asked["configurations"].append(configuration)
        found = replayed(type(kwargs["backend"]), 3 if configuration.shards == 3 else 1)
        kwargs["on_rows"](found.num_rows)
        return Finding(configuration, 128, found, judge(found))

    monkeypatch.setattr(validate_rows, "_load", lambda drafts, device: (None, tokenizer, drafts))
    monkeypatch.setattr(validate_rows, "_in_dtype", lambda model, dtype: model)
    monkeypatch.setattr(
        validation, "package_prompts", lambda _, count: {str(i): [1, 2] for i in range(count)}
    )
    monkeypatch.setattr(validation, "write_scripts", write)
    monkeypatch.setattr(validation, "validate_configuration", one)
    return asked


run = partial(run_verb, validate)


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import mla_ref.backends

    monkeypatch.setattr(mla_ref.backends, "find_backend", lambda name: Faulty(scales_wrong))


def test_the_first_line_says_whether_it_holds_and_the_tables_are_whole(tiny: Any) -> None:
    result = run("--shards", "3")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    shown = words(result.stdout)
    assert shown.startswith(
        "The same to rounding: decode against extend on 16 verifier rows (fp32, fp8 cache, sparse, "
        "3 shards, 128 keys a row). KL(extend || decode) is "
    )
    for name in validation.PAIRS:
        assert shown.count(f"{name} ") >= 2
    assert "decode, extend 6 " in shown  # 2 layers on 3 shards
    assert "into 2 splits, the null control into 1." in shown and "vllm#164" in shown
    assert tiny["rows"] == 64 and tiny["num_drafts"] == 3 and len(tiny["prompts"]) == 5


def test_a_wrong_kernel_is_exit_code_1(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    result = run()
    assert result.exit_code == 1
    assert result.stdout.startswith("NOT the same: decode against extend on 16 verifier rows")


def test_json_is_the_only_thing_on_stdout(tiny: Any) -> None:
    read = json.loads(run("--json", "--dtype", "bf16", "--cache", "bf16", "--dense").stdout)
    assert read["command"] == "mla-ref validate rows --dtype bf16 --cache bf16 --dense"
    assert read["passed"] is True and read["rows"] == 16
    assert read["versions"]["torch"] == torch.__version__
    (finding,) = read["findings"]
    assert finding["configuration"] == {
        "dtype": "bf16",
        "cache": "bf16",
        "sparse": False,
        "shards": 1,
        "topk": 128,
    }
    assert finding["headline"].startswith("The same to rounding: ")
    assert len(finding["pairs"]) == 5 and len(finding["pairs"][0]["kl_of_rows"]) == 16


def test_full_covers_the_axes_and_writes_the_same_file_twice(tiny: Any, tmp_path: Path) -> None:
    result = run("--full", "--rows", "100", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80 and "…" not in result.stdout
    assert tiny["configurations"] == validation.full_axes() and tiny["rows"] == 10
    assert len(tiny["prompts"]) == 8
    shown = words(result.stdout)
    assert shown.startswith("Decode against extend on 160 verifier rows in 10 configurations: ")
    assert "the same to rounding in 10." in shown and "bf16 fp8 cache sparse 9 shards " in shown
    path = tmp_path / "validation-rows.json"
    first = path.read_bytes()
    assert json.loads(first)["command"] == "mla-ref validate rows --rows 100 --full"
    run("--full", "--rows", "100", "--out", str(tmp_path))
    assert path.read_bytes() == first


def test_full_says_which_configuration_does_not_hold(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    result = run("--full", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "the same to rounding in 0." in words(result.stdout)
    assert result.stdout.count("NOT the same: ") == 10
    assert json.loads((tmp_path / "validation-rows.json").read_text())["passed"] is False


@pytest.mark.parametrize("full", [False, True])
def test_no_row_is_exit_code_1_and_no_table_breaks(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    def none(configuration: Configuration, *args: Any, **kwargs: Any) -> Finding:
        found = replayed(type(kwargs["backend"]), 1)
        pairs = {name: replace(pair, rows=()) for name, pair in found.pairs.items()}
        empty = replace(found, places=(), pairs=pairs, layers=LayerErrors({}, 2))
        return Finding(configuration, 128, empty, judge(empty))

    monkeypatch.setattr(validation, "validate_configuration", none)
    result = run(*(("--full", "--out", str(tmp_path)) if full else ()))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert words(result.stdout).count("No verifier row was measured.") == (10 if full else 1)


def test_full_axes() -> None:
    axes = validation.full_axes()
    assert len(axes) == len(set(axes)) == 10
    assert {(a.dtype, a.cache, a.sparse) for a in axes if a.shards == 1} == {
        (dtype, cache, sparse)
        for dtype in ("fp32", "bf16")
        for cache in (dtype, "fp8")
        for sparse in (True, False)
    }
    assert [a.shards for a in axes[8:]] == [3, 9]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_saves_a_figure(tiny: Any, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"rows.{ending}"
    result = run("--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 10_000 and str(path) in result.stdout


def test_prompts_of_a_file(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("first\n---\nsecond")
    run("--prompts", str(path), "--limit", "1", "--rows", "7", "--mtp", "2")
    assert list(tiny["prompts"]) == ["two/1"] and tiny["rows"] == 7 and tiny["num_drafts"] == 2
    path = tmp_path / "same.jsonl"
    path.write_text('{"name": "a", "text": "x"}\n{"name": "a", "text": "y"}')
    with pytest.raises(ValueError, match="two prompts are called 'a'"):
        prompt_ids(ValidateOptions(prompts=path), SimpleNamespace(encode=list))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (("kernels",), ValueError, "WHAT must be one of rows, modes, recipe"),
        (("--rows", "0"), ValueError, "--rows must be at least 1"),
        (("--mtp", "0"), ValueError, "--mtp must be at least 1"),
        (("--dtype", "fp16"), ValueError, "dtype must be one of fp32, bf16"),
        (("--cache", "fp4"), ValueError, "cache must be one of fp32, bf16, fp8"),
        (("--shards", "2"), ValueError, "--shards must divide the 9 heads"),
        (("--backend", "mine"), ValueError, "backend must be one of torch"),
        (("--device", "tpu"), ValueError, "device must be cpu"),
        (("--plot", "rows.gif"), ValueError, "--plot"),
        (("--full", "--dense"), ValueError, "--dense is not for --full"),
        (("--full", "--shards", "3"), ValueError, "--shards is not for --full"),
        (("--full", "--out", "no/such"), FileNotFoundError, "there is no such folder"),
        (("--out", "."), ValueError, "--out is not for one configuration"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    args: tuple[str, ...], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate_rows, "_load", lambda drafts, device: pytest.fail("loaded"))
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda: pytest.fail("loaded"))
    result = run(*args)
    assert isinstance(result.exception, error), result.output
    assert says in str(result.exception)


def test_the_command_in_a_file_names_no_folder() -> None:
    options = ValidateOptions(prompts=Path("a/b.jsonl"), rows=8, as_json=True, out=Path("x"))
    assert command("rows", options) == "mla-ref validate rows --rows 8 --prompts b.jsonl"


def test_the_command_in_a_file_can_be_pasted_into_a_shell() -> None:
    options = ValidateOptions(prompts=Path("a/my $b.jsonl"), backend="a folder/k.py:make()")
    line = command("rows", options)
    assert line == (
        "mla-ref validate rows --prompts 'my $b.jsonl' --backend 'a folder/k.py:make()'"
    )


def test_the_table_of_what_can_be_validated() -> None:
    assert list(VALIDATIONS) == ["rows", "modes", "recipe"]


@pytest.mark.model
def test_the_real_model_holds(tmp_path: Path) -> None:
    """On a short prompt, but of more than 64 tokens: then decode merges splits with keys.

    In float32 throughout: four rows are too few where an FP8 cache lets a few rows carry the mean.
    """
    path = tmp_path / "code.txt"
    path.write_text(PROMPTS["tests"])
    result = run("--rows", "4", "--prompts", str(path), "--cache", "fp32", "--json")
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert read["scripts"][0]["prompt_tokens"] > 64 and read["rows"] == 4
    (finding,) = read["findings"]
    assert finding["verdict"]["status"] == "holds"
    assert (finding["splits"], finding["null_splits"]) == (4, 2)
    pairs = {f"{p['reference']} || {p['tested']}": p["kl"]["mean"] for p in finding["pairs"]}
    assert pairs["extend || decode"] < 1e-3 < 0.1 < pairs["decode || positive"]
    assert all(entry["comparisons"] == 30 for entry in finding["layers"])
    assert all(entry["rel_l2"]["max"] < 1e-5 for entry in finding["layers"])

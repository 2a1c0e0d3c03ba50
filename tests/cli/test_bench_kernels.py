"""`mla-ref bench kernels`: its table, JSON, receipt, sweep and refusals, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from mla_ref.backends import TorchBackend
from mla_ref.backends.torch_backend import TorchPlan
from mla_ref.bench import read_receipt, receipt_run
from mla_ref.bench.receipt_run import CheckCounts
from mla_ref.cli.app import app
from mla_ref.numerics import AttentionResult

pytestmark = pytest.mark.thorough

SMALL = ("--device", "cpu", "--heads", "2", "--topk", "64", "--repeats", "1")
TABLE = ("--rows", "4", "--slots", "512", "--sample", "2")
SWEEP = ("--sweep", "--contexts", "200", "--concurrency", "1", "--mtp", "1")


def run(*words: str) -> Result:
    sizes = SMALL if "--sweep" in words else (*SMALL, *TABLE)
    return CliRunner().invoke(app, ["bench", "kernels", *sizes, *words], env={"COLUMNS": "80"})


def test_the_table_has_every_contender_and_a_reason_for_each_without_a_time() -> None:
    result = run("--overlap", "0.5")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "wall clock" in words and "disjoint, top-k 64" in words
    assert "verifier: the rows of a request have 0.5 in common" in words
    for name in ("decode", "extend", "torch SDPA", "FlashMLA", "b12x", "FlashInfer SM120"):
        assert f" {name} " in words
    assert "No time of FlashMLA: needs a GPU" in words
    assert "2 rows of each result were held against float64" in words
    assert "never run here" in words and "vLLM merge: needs a GPU" in words
    assert all(len(line) <= 80 for line in result.output.split("merge of")[0].splitlines())


def test_json_holds_rates_ratios_and_the_machine() -> None:
    result = run("--json", "--workload", "disjoint")
    data = json.loads(result.output)
    (point,) = data["points"]
    assert (point["workload"], point["rows"], point["heads"]) == ("disjoint", 4, 2)
    assert point["lines"][0]["name"] == "decode" and point["lines"][0]["times_decode"] == 1
    assert point["gathered_bytes"] == 4 * 64 * 656
    assert data["machine"]["device"].startswith("CPU") and data["ceilings"]["copy_bytes_s"] > 0


def test_without_peers_there_are_none() -> None:
    data = json.loads(run("--json", "--no-peers", "--workload", "disjoint").output)
    assert {line["name"] for line in data["points"][0]["lines"]} == {"decode", "extend"}
    assert data["parts"] == []


class WrongBackend(TorchBackend):
    """One number too high."""

    def plan(self, *args: Any, **named: Any) -> Any:
        plan = super().plan(*args, **named)

        class Wrong:
            nbytes = 0

            def decode(self, *args: Any, **named: Any) -> AttentionResult:
                out, lse = plan.extend(*args, **named)
                out[0, 0, 0] += 1
                return AttentionResult(out, lse)

            extend = decode

        return Wrong()


@pytest.fixture
def _wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import mla_ref.testing
    from mla_ref.testing import as_adapter

    monkeypatch.setattr(mla_ref.testing, "load_target", lambda name: as_adapter(WrongBackend()))


@pytest.mark.usefixtures("_wrong_is_found")
def test_a_wrong_backend_gets_no_time_and_exit_code_1() -> None:
    result = run("--workload", "disjoint", "--backend", "wrong:one")
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "No time of decode" in words and "wrong result or fails: decode" in words


@pytest.mark.parametrize("fault", ["wrong", "raises"])
@pytest.mark.parametrize("words", [("--workload", "disjoint"), SWEEP], ids=["table", "sweep"])
def test_a_backend_that_fails_in_any_run_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, fault: str, words: tuple[str, ...]
) -> None:
    def extend(self: Any, *args: Any, **more: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no such kernel")
        result = right(self, *args, **more)
        result.out.add_(0.1)
        return result

    right = TorchPlan.extend
    monkeypatch.setattr(TorchPlan, "extend", extend)
    result = run(*words)
    assert result.exit_code == 1 and "torch has a wrong result or fails" in result.stderr


def test_where_nothing_was_timed_the_exit_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "supports", lambda *_: "not this shape")
    result = run("--workload", "disjoint")
    assert result.exit_code == 1 and "nothing of torch was timed" in result.stderr


def test_a_receipt_is_shown_whole_and_says_last_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(backend: str, device: torch.device, progress: Any) -> CheckCounts:
        progress("decode")
        return CheckCounts({"decode": {"passed": 3}}, ())

    monkeypatch.setattr(receipt_run, "run_check", checked)
    path = tmp_path / "receipt.json"
    result = run("--receipt", str(path), "--workload", "disjoint")
    assert result.exit_code == 0, result.output
    assert result.stdout == path.read_text()
    assert result.stderr.endswith("receipt.json holds.\n")
    receipt = read_receipt(path)
    assert receipt.check == {"decode": {"passed": 3}} and receipt.kernel_hash is None
    assert [line.contender for line in receipt.lines][:2] == ["decode", "extend"]


def test_no_receipt_where_a_case_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = CheckCounts({"decode": {"failed": 1}}, ("decode/sink",))
    monkeypatch.setattr(receipt_run, "run_check", lambda *_: bad)
    path = tmp_path / "receipt.json"
    result = run("--receipt", str(path))
    assert result.exit_code == 1 and not path.exists()
    assert "no receipt, decode/sink" in result.stderr


def test_no_receipt_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("an older one")
    result = run("--receipt", str(path))
    assert result.exit_code == 2 and "the file is there" in result.stderr
    assert path.read_text() == "an older one"


def test_what_cannot_be_sent_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_ref.bench.receipt_text.private_words", lambda: ["torch"])
    monkeypatch.setattr(receipt_run, "run_check", None)
    result = run("--receipt", str(tmp_path / "receipt.json"))
    assert result.exit_code == 2 and "would name this machine or its user: torch" in result.stderr


def test_a_sweep_takes_8_heads_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the table's own default is three numbers of heads, and a sweep takes one."""
    seen: list[Any] = []
    monkeypatch.setattr("mla_ref.platform.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(
        "mla_ref.cli.bench_kernels_sweep.run_sweep", lambda options, *_, **__: seen.append(options)
    )
    result = CliRunner().invoke(app, ["bench", "kernels", "--sweep"])
    assert result.exit_code == 0, result.output
    assert seen[0].heads == [8]


def test_the_sweep_prints_totals_and_shares() -> None:
    result = run(*SWEEP)
    assert result.exit_code == 0, result.output
    assert "verifier: shares of the step by decode" in result.output
    assert "prefill: shares of the step by extend" in result.output
    data = json.loads(run(*SWEEP, "--json").output)
    assert [(p["what"], p["context"], p["rows_per_request"]) for p in data["points"]] == [
        ("verifier", 200, 2),
        ("prefill", 200, 200),
    ]


def test_the_figure_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "kernels.png"
    result = run("--rows", "4,8", "--no-peers", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 10_000 and "Figure: " in result.output


@pytest.mark.parametrize(
    "words, error",
    [
        (["--heads", "8,x"], "--heads must be numbers of 1 or more with commas"),
        (["--rows", "0"], "--rows must be numbers of 1 or more"),
        (["--rows", "6", "--workload", "verifier"], "come in fours of a request, got 6"),
        (["--workload", "all"], "--workload must be one of both, disjoint, verifier"),
        (["--overlap", "most"], "--overlap must be a number from 0 to 1, or indexer"),
        (["--overlap", "2"], "overlap must be from 0 to 1"),
        (["--cache-format", "int4"], "cache_format must be"),
        (["--sweep", "--tune"], "three runs: give one of them"),
        (["--sweep", "--heads", "8,64"], "--sweep takes one number of --heads"),
        (["--sweep", "--mtp", "-1"], "--mtp must be numbers of 0 or more"),
        (["--tune"], "backend 'torch' has none"),
        (["--plot", "x.png"], "--plot needs two numbers of --rows"),
        (["--receipt", "nowhere/receipt.json"], "there is no folder nowhere"),
        (["--backend", "nonsense"], "nonsense"),
        (["--slots", "100"], "slots must be a multiple of 64"),
        (["--slots", "0"], "slots must be"),
        (["--sweep", "--cache-format", "bf16"], "--cache-format is not for --sweep"),
        (["--sweep", "--no-peers"], "--peers is not for --sweep"),
        (["--tune", "--flashmla", "x.so"], "--flashmla is not for --tune"),
        (["--contexts", "64"], "--contexts is not for the table of kernels"),
        (["--sweep", "--contexts", "1"], "context must hold the step's own 2 tokens, got 1"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_2(words: list[str], error: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert error in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_two_words_are_one_verb_and_bench_keeps_its_own() -> None:
    runner = CliRunner()
    kernels = runner.invoke(app, ["bench", "kernels", "--help"])
    assert "--flashmla" in kernels.output and kernels.exit_code == 0
    bench = runner.invoke(app, ["bench", "--help"])
    assert "--flashmla" not in bench.output and "--peer-length" in bench.output

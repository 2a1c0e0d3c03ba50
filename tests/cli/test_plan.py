"""`mla-ref plan` as someone asks it whose verifier batches are slow."""

import json

import pytest
from typer.testing import CliRunner

from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import REASONS, TRUTH_TABLE, ServingLimits, plan_scratch
from mla_ref.batching.modes import MAX_Q_VARIABLES, MODE_VARIABLES
from mla_ref.cli.app import app

pytestmark = pytest.mark.thorough

STALE = {
    "query_start_loc": [0, 4, 8, 12, 12],
    "is_prefilling": [False, False, False, True],
    "num_actual_tokens": 16,
    "num_reqs": 4,
    "seq_lens": [100, 3000, 70, 0],
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    for name in (*MODE_VARIABLES, *MAX_Q_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == code, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines()) or "--json" in args
    return result


def ask(*args: str) -> dict:
    return json.loads(run(*args, "--json").stdout)


def words(text: str) -> str:
    """The text with its line breaks and columns closed up."""
    return " ".join(text.split())


def test_capacity_of_the_three_modes() -> None:
    shown = words(run("--seqs", "16", "--mtp", "3").stdout)
    for line in ("auto 4 64", "0 1 16", "1 8 128"):
        assert line in shown
    data = ask("--seqs", "16", "--num-speculative-tokens", "3")
    assert {p["mode"]: p["decode_rows"] for p in data["plans"]} == {"auto": 64, "0": 16, "1": 128}
    plan = plan_scratch(TorchBackend(), AttnSpec(num_heads=8), ServingLimits(16, 8192, 3))
    (auto,) = [p for p in data["plans"] if p["mode"] == "auto"]
    assert auto["decode_bytes"] == plan.decode.nbytes
    assert auto["extend_bytes"] == plan.extend.nbytes == 0
    assert {p["decode_rows"] for p in ask("--mtp", "9")["plans"]} == {16, 160}
    rows = {p["mode"]: p["decode_rows"] for p in ask("--max-batched-tokens", "32")["plans"]}
    assert rows == {"auto": 32, "0": 16, "1": 32}


def test_the_table_of_truth_is_the_one_table() -> None:
    shown = words(run().stdout)
    data = ask()
    assert data["reasons"] == dict(REASONS)
    assert [row["name"] for row in data["routes"]] == [kind.name for kind in TRUTH_TABLE]
    for kind in TRUTH_TABLE:
        (way, reason), off, forced = (kind.routes[mode] for mode in kind.routes)
        assert f"{way} {reason} {off[0]} {forced[0]}" in shown.partition(kind.name)[2]


@pytest.mark.parametrize("kind", TRUTH_TABLE, ids=lambda kind: kind.name)
def test_each_kind_of_batch(kind, tmp_path) -> None:
    starts = [0]
    for q in kind.query_lens:
        starts.append(starts[-1] + q)
    dump = {"query_start_loc": starts, "num_actual_tokens": kind.facts.num_tokens_padded}
    (tmp_path / "step.json").write_text(json.dumps(dump | {"is_prefilling": kind.flags}))
    for mode, (way, reason) in kind.routes.items():
        data = ask(
            "--metadata",
            str(tmp_path / "step.json"),
            "--mtp",
            str(kind.num_speculative_tokens),
            "--mode",
            mode,
        )
        assert (data["kind"], data["route"]["reason"]) == (way, reason)


def test_one_prefill_sends_all_to_extend_and_the_page_says_so() -> None:
    args = ("--query-lens", "4,4,4", "--prefilling", "0,0,1")
    shown = words(run(*args).stdout)
    assert shown.startswith("extend (prefill-in-batch): a request is still prefilling (request 2")
    assert "For decode: Run request 2 in another step" in shown
    assert "Each request by itself: rows 0 to 7 decode, 8 to 11 extend." in shown
    assert "3 requests, 12 rows: 4,4,4p" in shown
    data = ask(*args)
    assert (data["route"]["blame"], data["route"]["remedy"]["value"]) == (2, [2])
    assert [s["kind"] for s in data["per_request"]["segments"]] == ["decode", "extend"]


def test_four_blocks_or_128() -> None:
    args = ("--query-lens", "4", "--prefilling", "0")
    shown = words(run(*args).stdout)
    assert shown.startswith("decode (verifier):")
    assert "extend 1 4 2%" in shown and "decode 32 128 68%" in shown
    assert "For decode" not in shown and "by itself" not in shown
    extend, decode = ask(*args)["costs"]
    assert (extend["blocks"], decode["blocks"], decode["num_splits"]) == (4, 128, 32)
    assert decode["moved_bytes"] > extend["moved_bytes"] > extend["gathered_bytes"]
    assert ask(*args, "--sms", "8")["costs"][1]["num_splits"] == 2
    assert ask(*args, "--heads", "128", "--topk", "64")["costs"][1]["blocks"] == 32


def test_no_advice_where_none_would_help() -> None:
    shown = words(run("--query-lens", "512", "--prefilling", "1").stdout)
    assert "No single change would give decode." in shown


def test_nobody_said_who_is_prefilling() -> None:
    shown = words(run("--query-lens", "4,4").stdout)
    assert shown.startswith("extend (prefilling-unknown)")
    assert "4?,4?" in shown


def test_vllm41841_as_the_original_answers(tmp_path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STALE))
    shown = words(run("--metadata", str(path), "--as", "original").stdout)
    assert shown.startswith("extend in the original: is_spec_decode False, use_spec False.")
    assert "mla-ref: decode instead (verifier)" in shown and "vllm#41841" in shown
    assert "3 requests, 12 rows and 4 of padding" in shown
    data = ask("--metadata", str(path), "--as", "original")
    assert (data["kind"], data["route"]["kind"]) == ("extend", "decode")
    # The lengths bound what is read: rows 97 to 100, a full list each, and rows 67 to 70.
    seen = sum(range(97, 101)) + 4 * 2048 + sum(range(67, 71))
    assert data["costs"][0]["gathered_bytes"] == seen * 656
    assert data["costs"][1]["num_splits"] == 32
    assert ask("--metadata", str(path))["kind"] == "decode"
    shown = words(run("--query-lens", "4,4", "--prefilling", "0", "--as", "original").stdout)
    assert "mla-ref: decode too (verifier)" in shown and "vllm#41841" not in shown


def test_a_byte_order_mark_is_no_part_of_the_metadata(tmp_path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STALE), encoding="utf-8-sig")
    assert ask("--metadata", str(path))["kind"] == "decode"


def test_the_environment_of_a_server(monkeypatch) -> None:
    monkeypatch.setenv(MODE_VARIABLES[1], " Off ")
    monkeypatch.setenv(MAX_Q_VARIABLES[1], "5")
    data = ask("--query-lens", "4", "--prefilling", "0")
    assert (data["server"]["mode"], data["server"]["max_q"]) == ("0", 5)
    assert data["route"]["reason"] == "mode-off"
    monkeypatch.setenv(MODE_VARIABLES[0], "1")
    assert ask("--query-lens", "4")["kind"] == "decode"
    assert ask("--query-lens", "4", "--mode", "0")["kind"] == "extend"
    monkeypatch.setenv(MAX_Q_VARIABLES[0], "many")
    result = run("--query-lens", "4")
    assert f"mla-ref: warning: {MAX_Q_VARIABLES[0]} must be an int" in result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--query-lens", "4,,4"], "--query-lens"),
        (["--query-lens", "-4"], "--query-lens"),
        (["--query-lens", "4,4", "--prefilling", "0,0,1"], "--prefilling"),
        (["--query-lens", "4,4", "--prefilling", "2"], "--prefilling"),
        (["--prefilling", "0"], "--query-lens"),
        (["--metadata", "x.json", "--query-lens", "4"], "--metadata"),
        (["--metadata", "no-such.json"], "no-such.json"),
        (["--metadata", "text.json"], "--metadata text.json is no JSON: "),
        (["--metadata", "bytes.json"], "--metadata bytes.json is not UTF-8: "),
        (["--metadata", "list.json"], "metadata"),
        (["--query-lens", "9000"], "9000 rows, but max_num_batched_tokens is 8192"),
        (["--query-lens", ",".join("1" * 17)], "17 requests, but max_num_seqs is 16"),
        (["--mode", "maybe"], "mode must be one of auto"),
        (["--max-q", "0"], "max_q"),
        (["--seqs", "0"], "--seqs"),
        (["--max-batched-tokens", "0"], "--max-batched-tokens"),
        (["--mtp", "-1"], "--mtp"),
        (["--sms", "0"], "--sms"),
        (["--heads", "0"], "num_heads"),
        (["--topk", "0"], "topk"),
        (["--backend", "no-such"], "no-such"),
        (["--as", "vllm", "--query-lens", "4"], "--as"),
        (["--as", "original"], "--as original needs a batch"),
    ],
)
def test_bad_options_are_one_line_that_names_them(
    args, named, plain_calls, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "bytes.json").write_bytes(b'{"seqs": "\xff"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    result = run(*args, code=2)
    assert named in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.splitlines()) == 1

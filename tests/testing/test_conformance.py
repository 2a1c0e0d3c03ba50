"""The worker: a crash or a call that never returns costs one case, and says so."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.testing import faults

from mla_ref.testing import Adapter, cases, find_case, storage
from mla_ref.testing.conformance import Worker, run_cases
from mla_ref.testing.export import export, script
from mla_ref.testing.worker import run_case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch) -> None:
    """So that tests.testing is importable, as a user's module in the current directory."""
    monkeypatch.chdir(ROOT)


def heads(*numbers: int) -> list:
    return [find_case(f"decode/heads-{n}") for n in numbers]


@pytest.fixture
def stub() -> Iterator[Worker]:
    """A worker whose process starts at once, and misbehaves by the name of the case."""
    with Worker("any", module="tests.testing.stub_worker") as worker:
        assert worker.kinds == ("decode",)
        yield worker


def test_a_crash_costs_one_case(stub: Worker) -> None:
    before, crash, after = (stub.run(case, 60.0) for case in heads(8, 9, 4))
    assert (before.status, crash.status, after.status) == ("passed", "crashed", "passed")
    assert crash.bad and not before.bad
    assert crash.case == "decode/heads-9"
    assert "ends the process: " in crash.reason and "(an illegal address)" in crash.reason
    assert "the case: 9 query heads" in crash.reason
    if sys.platform != "win32":
        assert "SIGABRT" in crash.reason
    assert before.reason != after.reason, "the same process answers before and after its end"


def test_a_call_that_never_returns_costs_one_case(stub: Worker) -> None:
    (late,) = (stub.run(case, 0.2) for case in heads(12))
    assert late.status == "timed out" and late.bad
    assert "gives no result in 0.2 s\n  the case: 12 query heads" in late.reason
    assert stub.run(heads(8)[0], 60.0).status == "passed"


def test_a_lost_gpu_context_starts_the_process_again(stub: Worker) -> None:
    lost, after, same = (stub.run(case, 60.0) for case in heads(16, 8, 4))
    assert lost.status == "crashed"
    assert lost.reason != after.reason == same.reason


def test_a_process_that_ends_between_two_cases(stub: Worker) -> None:
    last, after, again = (stub.run(case, 60.0) for case in heads(24, 8, 4))
    assert last.status == "passed"
    assert (after.status, again.status) == ("crashed", "passed")
    assert "exit code 0" in after.reason


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("broken", "broken cannot be used: no module named broken"),
        ("aborts", r"aborts cannot be used: importing it fails: .*\(last words of the import\)"),
    ],
)
def test_a_target_that_cannot_be_imported_is_named(target: str, words: str) -> None:
    worker = Worker(target, module="tests.testing.stub_worker")
    with pytest.raises(ImportError, match=words), worker:
        pass


@pytest.mark.thorough
def test_the_true_worker_crashes_and_goes_on() -> None:
    results = list(run_cases(heads(8, 9, 12), "tests.testing.faults:aborting"))
    assert [r.status for r in results] == ["passed", "crashed", "passed"]
    assert all(r.seconds > 0 for r in results if r.status == "passed")


ADAPTER = Adapter(decode=faults.bare, extend=faults.last_row, topk=faults.convert)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("decode/plain", "passed", ""),
        ("decode/sink", "skipped", "it has no parameter sink"),
        ("merge/two", "skipped", "there is no merge to test"),
        ("extend/none-strewn", "failed", "it looks like this: -1 is read as the last row"),
        ("topk/plain", "failed", "topk/plain raises TypeError: .*missing 1 required"),
    ],
)
def test_what_the_worker_answers(name: str, status: str, words: str) -> None:
    answer = run_case(find_case(name).to_json(), ADAPTER, CPU)
    assert answer["status"] == status
    assert re.search(words, answer.get("reason", ""))
    json.dumps(answer, allow_nan=False)


def test_a_failure_has_its_numbers_as_plain_data() -> None:
    answer = run_case(find_case("extend/none-strewn").to_json(), ADAPTER, CPU)
    assert answer["looks_like"] == ["-1 is read as the last row of the cache (kv[-1])"]
    finding = answer["findings"][0]
    assert finding["part"] == "out" and len(finding["index"]) == 3
    assert abs(finding["actual"] - finding["expected"]) > finding["limit"] > 0


def test_an_error_of_cuda_means_that_the_process_is_lost() -> None:
    plain = find_case("decode/plain").to_json()
    answer = run_case(plain, Adapter(decode=faults.cuda_lost), CPU)
    assert answer["status"] == "crashed" and answer["lost"]
    assert "illegal memory access" in answer["reason"]


def test_a_case_too_large_for_the_memory_is_skipped(monkeypatch) -> None:
    monkeypatch.setattr(storage, "available_bytes", lambda: 1000 * 4096)
    answer = run_case(find_case("decode/far-fp8").to_json(), Adapter(decode=faults.kernel), CPU)
    assert answer == {
        "status": "skipped",
        "reason": "needs 2.6 GB of memory, 0.0 GB are available",
    }


def test_memory_that_holds_files_can_be_had(monkeypatch, tmp_path) -> None:
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__, raising=False)
    monkeypatch.setattr(storage, "_MEMINFO", tmp_path / "meminfo")
    assert storage.available_bytes() == 1000 * 4096  # where there is no such file: all memory
    (tmp_path / "meminfo").write_text(
        "MemTotal:       8000 kB\nMemFree:          10 kB\nMemAvailable:   7000 kB\n"
    )
    assert storage.available_bytes() == 7000 * 1024


def test_the_script_of_a_case_runs(capsys) -> None:
    program = script(find_case("decode/none-strewn-fp8"), "tests.testing.faults:kernel")
    assert len(program.splitlines()) == 10
    exec(compile(program, "repro.py", "exec"), {})
    assert capsys.readouterr().out.endswith("decode/none-strewn-fp8 passes\n")


def test_a_case_as_files(tmp_path) -> None:
    case = find_case("decode/gaps-between-pages-fp8")
    path = export(case, tmp_path / "new")
    data = json.loads(path.read_text("utf-8"))
    tensors = load_file(path.with_suffix(".safetensors"))
    assert data["case"] == case.to_json()
    assert data["arguments"] == {"softmax_scale": case.softmax_scale}
    assert data["strides"] == {"input.kv_cache": list(case.build()["kv_cache"].stride())}
    results = ("expected", "limit", "limit_bfloat16")
    assert set(tensors) == {
        *(f"input.{name}" for name in ("q", "kv_cache", "indices")),
        *(f"{result}.{part}" for result in results for part in ("out", "lse")),
    }
    assert tensors["input.kv_cache"].equal(case.build()["kv_cache"])
    assert tensors["expected.out"].equal(case.expect().out)
    assert tensors["limit.lse"].shape == (case.rows, case.heads)
    for kind in ("topk", "cache_write"):
        assert export(cases(kind)[0], tmp_path).exists()
    with pytest.raises(ValueError, match="GB; it is not exported"):
        export(find_case("decode/far"), tmp_path)

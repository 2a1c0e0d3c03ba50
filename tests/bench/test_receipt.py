"""Receipts: they read back as they were, refuse what is not one, and name nobody."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import CEILINGS, CPU, FakeClock, small_workload

from mla_ref.backends import TorchBackend
from mla_ref.bench import (
    KernelPoint,
    NoTime,
    Receipt,
    is_fresh,
    measure_kernels,
    read_receipt,
    receipt_run,
    receipt_text,
)
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.kernel_machine import KernelMachine, read_machine
from mla_ref.bench.peers import FlashMLA
from mla_ref.bench.receipt import receipt_lines
from mla_ref.bench.receipt_run import CheckCounts, ReceiptRun, run_check
from mla_ref.bench.receipt_text import public_text, require_public
from mla_ref.platform import GpuState
from mla_ref.testing import as_adapter
from mla_ref.testing.outcome import Result

MACHINE = KernelMachine(
    device="NVIDIA Test",
    sm="sm_120",
    num_sms=100,
    l2_bytes=1,
    memory_bytes=2,
    cuda="13.0",
    state=GpuState(driver="580.1", power_limit_w=600.0),
    versions={"torch": "2.11.0"},
    settings={"DISABLE_MMA_V3": "1"},
)
CHECK = CheckCounts({"decode": {"passed": 5, "skipped": 1}}, ())


@pytest.fixture(scope="module")
def points() -> list[KernelPoint]:
    timer = GpuTimer(FakeClock(10 / 1e6, 20 / 1e6, 40 / 1e6, 30 / 1e6), rounds=2, replays=1)
    work = iter([small_workload()])
    return list(measure_kernels(as_adapter(TorchBackend(1)), work, timer, CEILINGS, [FlashMLA()]))


@pytest.fixture
def receipt(points: list[KernelPoint]) -> Receipt:
    return ReceiptRun(CPU).receipt(
        backend="torch",
        kernel_hash="abc",
        machine=MACHINE,
        ceilings=CEILINGS,
        check=CHECK,
        points=points,
    )


def test_a_receipt_reads_back_as_it_was(receipt: Receipt, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(receipt.to_text())
    assert read_receipt(path) == receipt


def test_its_lines_hold_times_errors_and_reasons(receipt: Receipt) -> None:
    decode, extend, missing = receipt.lines
    # Turns go decode, extend, decode, extend.
    assert (decode.median_us, decode.lowest_us, decode.highest_us) == (25.0, 10.0, 40.0)
    assert extend.median_us == 25.0 and decode.checked_rows == 4
    assert decode.out_rel_l2 is not None and 0 < decode.out_rel_l2 < 3e-3
    assert decode.lse_max_abs is not None and decode.lse_max_abs < 1e-5
    assert (missing.median_us, missing.checked_rows, missing.out_max_abs) == (None, 0, None)
    assert missing.why is not None and missing.why.startswith("needs a GPU")
    assert decode.unique_bytes < decode.gathered_bytes == 4 * 64 * 656
    assert "CUDA graph replays" in receipt.clock


def test_a_receipt_is_fresh_only_of_the_same_kernels(receipt: Receipt) -> None:
    assert is_fresh(receipt, "abc")
    assert not is_fresh(receipt, "abd") and not is_fresh(receipt, None)
    assert not is_fresh(replace(receipt, kernel_hash=None), None)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.pop("machine"), "machine is missing"),
        (lambda d: d.update(host="me"), "host is no field of Receipt"),
        (lambda d: d["lines"][0].update(rows="4"), r"lines\[0\].rows must be int, got '4'"),
        (lambda d: d["lines"][0].update(rows=True), r"lines\[0\].rows must be int"),
        (lambda d: d["lines"][0].update(median_us=None), "a time or why there is none"),
        (lambda d: d["lines"][0].update(checked_rows=0), "times above 0 of checked rows"),
        (lambda d: d["lines"][2].update(why=None), "a time or why there is none: FlashMLA"),
        (lambda d: d.update(format=2), "format must be 1, got 2"),
        (lambda d: d.update(day="yesterday"), "yesterday"),
        (lambda d: d["machine"].update(state=[]), "state must be an object"),
        (lambda d: d.update(lines={}), "lines must be a list"),
    ],
)
def test_what_is_no_receipt_is_refused_by_field(
    receipt: Receipt, tmp_path: Path, change: Any, words: str
) -> None:
    data = json.loads(receipt.to_text())
    change(data)
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words):
        read_receipt(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"receipt.json is no JSON"):
        read_receipt(path)


# ---- nobody is named


@pytest.fixture
def _ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_text.platform, "node", lambda: "enigma-7")
    monkeypatch.setattr(receipt_text.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(receipt_text.Path, "home", lambda: Path("/home/ada"))


@pytest.mark.usefixtures("_ada")
@pytest.mark.parametrize(
    "text, public",
    [
        ("OSError: /home/ada/so/x.so: no such file", "OSError: x.so: no such file"),
        (r"OSError: C:\Users\ada\so\flash.dll is bad", "OSError: flash.dll is bad"),
        ("ada on enigma-7 has no GPU", "... on ... has no GPU"),
        ("adamant 656 B/token, tests/v1/quant.py", "adamant 656 B/token, tests/v1/quant.py"),
    ],
)  # fmt: skip
def test_folders_and_names_leave_a_message(text: str, public: str) -> None:
    assert public_text(text) == public
    assert require_public(public) == public
    if public != text:
        with pytest.raises(ValueError, match="would name this machine or its user"):
            require_public(text)


@pytest.mark.usefixtures("_ada")
def test_a_reason_with_a_folder_does_not_reach_the_receipt(points: list[KernelPoint]) -> None:
    outcome = NoTime("FlashMLA", "OSError: /home/ada/x.so: bad")
    line = replace(points[0].lines[2], outcome=outcome)
    (written,) = receipt_lines([replace(points[0], lines=(line,))])
    assert written.why == "OSError: x.so: bad"


@pytest.mark.usefixtures("_ada")
def test_a_receipt_that_would_name_the_machine_is_not_written(receipt: Receipt) -> None:
    named = replace(receipt, machine=replace(MACHINE, device="GPU of enigma-7"))
    with pytest.raises(ValueError, match="enigma-7"):
        named.to_text()


def test_the_facts_of_this_machine_name_nobody() -> None:
    machine = read_machine(CPU)
    require_public(json.dumps(machine.to_json()))
    assert machine.sm is None and machine.state == GpuState()
    assert machine.versions["torch"] == torch.__version__ in str(machine)


# ---- the conformance cases before it


def test_cases_are_counted_by_kind_and_bad_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeWorker:
        kinds = ("merge",)

        def __init__(self, target: str, *, device: str) -> None:
            assert (target, device) == ("torch", "cpu")

        def __enter__(self) -> "FakeWorker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, case: Any, timeout: float) -> Result:
            return Result(str(case), "failed" if "empty" in str(case) else "passed")

    monkeypatch.setattr(receipt_run, "Worker", FakeWorker)
    found = run_check("torch", CPU)
    assert set(found.counts["merge"]) == {"passed", "failed"}
    assert found.bad and all("empty" in name for name in found.bad) and not found.ok
    assert CHECK.ok and not CheckCounts({"decode": {"skipped": 3}}, ()).ok

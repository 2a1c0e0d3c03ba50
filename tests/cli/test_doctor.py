"""`mla-ref doctor`: its first line, its table at any width, its JSON, its exit code."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mla_ref.cli import doctor as doctor_module
from mla_ref.cli.app import app
from mla_ref.cli.doctor import show
from mla_ref.platform import GROUPS, Finding, Gpu, inspect_machine
from mla_ref.platform.packages import Package

pytestmark = pytest.mark.thorough

LONG = 'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "mla-ref[cuda13]"'
ROWS = (
    Finding("Run the ladder", "torch", True, "2.13.0", required=True),
    Finding("Triton", "assembles for sm_121", True, "CUDA 13.1, /a/long/path" + "/and/on" * 12),
    Finding("CuPy", "one CuPy wheel only", False, reason="they share a folder " * 9, mend=LONG),
)


def _shown(width, **kwargs):
    console = Console(width=width, highlight=False, **kwargs)
    with console.capture() as capture:
        show("All is well.", ROWS, console)
    return capture.get()


def _doctor(*words):
    return CliRunner().invoke(app, ["doctor", *words])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_words_wrap_in_their_column_and_commands_and_paths_never(width):
    lines = _shown(width).splitlines()
    assert lines[0] == "All is well."
    assert [line for line in lines if line in GROUPS] == list(GROUPS)
    assert f"    {LONG}" in lines
    assert any("/a/long/path" + "/and/on" * 12 in line for line in lines)
    reasons = [line for line in lines if "share" in line or "folder" in line]
    assert len(reasons) > 1
    for line in reasons:
        assert len(line) <= width
    for line in reasons[1:]:
        assert line.startswith(" " * 31)


def test_the_answer_is_a_word_and_needs_no_colour():
    plain, coloured = _shown(80), _shown(80, force_terminal=True, color_system="standard")
    assert "\x1b[" not in plain
    assert "\x1b[32myes" in coloured
    assert "\x1b[31mno" in coloured
    assert "torch                   yes  2.13.0" in plain
    assert "one CuPy wheel only     no   they" in plain


def test_this_machine_in_words():
    result = _doctor()
    assert result.exit_code == 0, result.output
    first, *rest = result.output.splitlines()
    assert first.startswith("The ladder")
    assert first.endswith(".")
    assert [line for line in rest if line in GROUPS] == list(GROUPS)


def test_json_has_stable_keys():
    result = _doctor("--json")
    data = json.loads(result.stdout)
    assert list(data) == ["summary", "base_works", "findings", "gpus"]
    assert data["base_works"] is True
    assert {group["group"] for group in data["findings"]} == set(GROUPS)
    for finding in data["findings"]:
        assert list(finding) == ["group", "name", "ok", "value", "reason", "mend", "required"]


def test_json_describes_a_gpu():
    sm120 = Gpu(0, "Test Card", (12, 0), 96 * 2**30, 95 * 2**30, 188, 128 * 2**20, 101_376)
    data = doctor_module.report(replace(inspect_machine(), gpus=(sm120,), no_gpu=None), ())
    (gpu,) = json.loads(json.dumps(data))["gpus"]
    assert (gpu["sm"], gpu["capability"], gpu["num_sms"]) == ("sm_120", [12, 0], 188)
    assert gpu["features"]["shared_memory_per_block"] == 101_376
    assert gpu["features"]["wgmma"] is False


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_broken_base_is_exit_code_1(monkeypatch, words):
    broken = Package("torch", "2.13.0", "does not import: OSError: libtorch.so")
    machine = inspect_machine()
    machine = replace(machine, packages=machine.packages | {"torch": broken})
    monkeypatch.setattr(doctor_module, "inspect_machine", lambda: machine)
    result = _doctor(*words)
    assert result.exit_code == 1
    assert "The ladder does not run here: no working torch." in result.stdout
    assert "libtorch.so" in result.stdout

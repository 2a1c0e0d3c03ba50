"""Every verb's help ends with its examples, and every example runs as it is printed."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mla_ref.cli.app import PANELS, VERBS, app

pytestmark = pytest.mark.thorough

MODULES = {verb: importlib.import_module(f"mla_ref.cli.{verb.replace(' ', '_')}") for verb in VERBS}
EXAMPLES = [
    pytest.param(example, id=example.line, marks=[pytest.mark.model] if example.needs_model else [])
    for module in MODULES.values()
    for example in module.EXAMPLES
]


def _help(*words, width=80):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.output.strip().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_the_examples(verb, width):
    examples = MODULES[verb].EXAMPLES
    assert len(examples) >= 2
    lines = _help(verb, width=width)
    # Each command whole on a line of its own, in order; the last one ends the help.
    assert [line for line in lines if line.startswith("mla-ref ")] == [e.line for e in examples]
    assert lines[-1] == examples[-1].line
    for example in examples:
        assert f"{example.line} ".startswith(f"mla-ref {verb} ")
        assert f"{example.note}:" in lines


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_the_verb_in_one_of_the_panels(verb):
    assert MODULES[verb].PANEL in PANELS
    lines = _help()
    panel = next(i for i, line in enumerate(lines) if f" {MODULES[verb].PANEL} " in line)
    end = next(i for i, line in enumerate(lines) if i > panel and line.startswith("╰"))
    assert any(line.startswith(f"│ {verb} ") for line in lines[panel:end])


def test_panels_come_in_their_order():
    found = [p for line in _help() for p in PANELS if f" {p} " in line and line.startswith("╭")]
    assert found == [p for p in PANELS if any(p == m.PANEL for m in MODULES.values())]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # from anywhere, and what it writes is not left behind
    result = CliRunner().invoke(app, list(example.argv))
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_help_needs_neither_torch_nor_anything_optional():
    heavy = ["torch", "numpy", "triton", "cupy", "gguf", "tokenizers", "matplotlib", "transformers"]
    program = f"import sys, mla_ref.cli.app; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)

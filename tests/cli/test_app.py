"""What holds for all verbs: errors in one line, exit codes, the version, both ways to start."""

import errno
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import mla_ref
from mla_ref.cli import main
from mla_ref.cli.app import VERBS, build_app

pytestmark = pytest.mark.thorough


def _failing(error):
    """The app with a verb that raises."""
    app = build_app()

    def fail() -> None:
        raise error

    app.command("fail")(fail)
    return app


@pytest.mark.parametrize(
    "error",
    [
        ValueError("tokens must be at least 1, got 0"),
        TypeError("q must be a tensor"),
        FileNotFoundError("no model here"),
        ImportError('gguf is needed here: pip install "mla-ref[model]"'),
    ],
)
def test_an_error_about_the_input_is_one_line_and_exit_code_2(error):
    result = CliRunner().invoke(_failing(error), ["fail"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"mla-ref: error: {error}\n"


@pytest.mark.parametrize("number", [errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EROFS])
def test_an_error_of_the_file_system_names_the_file(number):
    error = OSError(number, os.strerror(number), "tests")
    result = CliRunner().invoke(_failing(error), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == f"mla-ref: error: {os.strerror(number)}: tests\n"


def test_one_that_names_no_file_does_not_name_none():
    error = PermissionError(errno.EACCES, "Permission denied")
    result = CliRunner().invoke(_failing(error), ["fail"])
    assert "Permission denied" in result.stderr and "None" not in result.stderr


def test_a_broken_pipe_ends_quietly_and_a_full_disk_is_no_error_of_the_user():
    result = CliRunner().invoke(_failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), ["fail"])
    assert (result.exit_code, result.stderr) == (1, "")
    error = OSError(errno.ENOSPC, "No space left on device")
    assert CliRunner().invoke(_failing(error), ["fail"]).exception is error


def test_an_error_of_many_lines_or_none_is_still_one():
    result = CliRunner().invoke(_failing(ValueError("first\n  second")), ["fail"])
    assert result.stderr == "mla-ref: error: first second\n"
    result = CliRunner().invoke(_failing(ValueError()), ["fail"])
    assert result.stderr == "mla-ref: error: ValueError\n"


def test_debug_lets_the_error_through():
    error = ValueError("wrong")
    assert CliRunner().invoke(_failing(error), ["--debug", "fail"]).exception is error


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), AssertionError()])
def test_a_bug_keeps_its_traceback(error):
    assert CliRunner().invoke(_failing(error), ["fail"]).exception is error


def test_a_verbs_own_exit_code_is_kept():
    result = CliRunner().invoke(_failing(typer.Exit(1)), ["fail"])
    assert (result.exit_code, result.output) == (1, "")


def test_main_leaves_with_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mla-ref", "--version"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"mla-ref {mla_ref.__version__}\n"


@pytest.mark.parametrize(
    "words, code, shown",
    [
        (["--help"], 0, "Usage: mla-ref [OPTIONS] COMMAND"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["doctor", "--nonsense"], 2, "No such option: --nonsense"),
    ],
)
def test_python_m_is_the_same_command(words, code, shown):
    command = [sys.executable, "-m", "mla_ref", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_no_verb_stands_twice_in_the_table():
    assert len(set(VERBS)) == len(VERBS)

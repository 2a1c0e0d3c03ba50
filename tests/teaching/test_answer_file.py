"""A file with answers: what is said of one that is right, blank, broken, or does not come back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla_ref.teaching import EXERCISES, answer_file, answer_worker
from mla_ref.teaching.answer_file import grade_file

ROOT = Path(__file__).parents[2]
MASK = EXERCISES["01-offset-mask"]
RIGHT = """
import torch

def offset_mask(s_q, s_kv):
    return torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
"""


def said(tmp_path, source, name="student.py", exercise=MASK):
    """The worker's last line, without a process of its own."""
    path, log = tmp_path / name, tmp_path / "log"
    path.write_text(source, encoding="utf-8")
    answer_worker.main(path, exercise.id, log)
    return json.loads(log.read_text().splitlines()[-1])


def test_a_right_answer_passes(tmp_path):
    assert said(tmp_path, RIGHT) == {
        "passed": True,
        "text": f"01-offset-mask: all {len(MASK.cases)} cases passed.",
    }


@pytest.mark.parametrize(
    "source, words",
    [
        ("def offset_mask(s_q, s_kv) -> 'Bool:", "cannot be imported: SyntaxError"),
        (
            "x = 1 / 0",
            "student.py cannot be imported: ZeroDivisionError: division by zero\nat line",
        ),
        (
            MASK.blank,
            "cannot be imported: NameError: name 'Bool' is not defined\nat line 1: def off",
        ),
        ("import no_such_package", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def my_mask(s_q, s_kv):\n    return 1", "has no function offset_mask; it has my_mask."),
        ("", f"has no function offset_mask. Expected:\n\n{MASK.signature}"),
        ("offset_mask = 3", "has no function offset_mask. Expected"),
        ("def offset_mask(s_q, s_kv):\n    raise NotImplementedError", "still blank, expected"),
        ("def offset_mask(s_q, s_kv):\n    return s_q + '1'", "at: return s_q + '1'"),
        ("def offset_mask(s_q, s_kv):\n    exit(3)", "it left the program (SystemExit: 3)"),
        ("exit()", "it left the program"),
        (RIGHT.replace("s_kv - s_q", "0"), "FAILED  one-token decode"),
    ],
)
def test_what_is_wrong_is_named_without_our_own_traceback(tmp_path, source, words):
    found = said(tmp_path, source)
    assert not found["passed"]
    assert words in found["text"]
    assert found["text"].startswith("01-offset-mask: ")
    assert "mla_ref/" not in found["text"] and "Traceback" not in found["text"]


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Sizes:
    s_q: int
    s_kv: int
"""


@pytest.mark.parametrize("name", ["student.py", "torch.py", "my-answer.2.py"])
def test_an_answer_may_hold_a_dataclass(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])  # a torch.py shall not stay on it
    torch_before = sys.modules["torch"]
    monkeypatch.setitem(sys.modules, "torch", torch_before)  # put back if it is lost
    body = "tril(s_kv - s_q)"
    right = DATACLASS + RIGHT.replace(body, "tril(Sizes(0, s_kv - s_q).s_kv)")
    assert said(tmp_path, right, name)["passed"]
    assert sys.modules["torch"] is torch_before


def test_in_a_notebook_an_import_from_the_future_may_come_late(tmp_path):
    cells = ("import torch", DATACLASS, RIGHT)
    assert said(tmp_path, notebook(*cells), "student.ipynb")["passed"]


def test_a_byte_order_mark_is_no_fault_of_the_answer(tmp_path):
    log = tmp_path / "log"
    for name, source in (("student.py", RIGHT), ("student.ipynb", notebook(RIGHT))):
        path = tmp_path / name
        path.write_text(source, encoding="utf-8-sig")
        answer_worker.main(path, MASK.id, log)
        assert json.loads(log.read_text().splitlines()[-1])["passed"]


def test_a_file_that_is_no_text_is_an_answer_too(tmp_path):
    path, log = tmp_path / "student.py", tmp_path / "log"
    path.write_bytes(b"\xff\xfe\x00")
    answer_worker.main(path, MASK.id, log)
    assert "student.py cannot be read" in json.loads(log.read_text().splitlines()[-1])["text"]


def test_a_file_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # takes back what the worker adds
    (tmp_path / "my_masks.py").write_text(RIGHT)
    assert said(tmp_path, "from my_masks import offset_mask")["passed"]


def notebook(*cells):
    return json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]})


def test_of_a_notebook_the_definitions_are_taken_and_nothing_is_run(tmp_path):
    cells = ("%matplotlib inline", "1 / 0", RIGHT, "grade('01-offset-mask', offset_mask)")
    assert said(tmp_path, notebook(*cells), "student.ipynb")["passed"]
    wrong = said(tmp_path, notebook("def offset_mask(s_q, s_kv):\n    return s_q + '1'"), "a.ipynb")
    assert "at: return s_q + '1'" in wrong["text"]
    assert "a.ipynb is no notebook" in said(tmp_path, "{}", "a.ipynb")["text"]


def test_the_lesson_s_own_notebook_is_blank(tmp_path):
    exercise = EXERCISES["02-merge"]
    (path,) = (ROOT / "lessons").glob("02_*.ipynb")
    answer_worker.main(path, exercise.id, tmp_path / "log")
    assert "still blank" in json.loads((tmp_path / "log").read_text().splitlines()[-1])["text"]


# -- The process -----------------------------------------------------------------------------------


def test_a_process_of_its_own_grades_and_passes_on_what_it_found(tmp_path):
    (tmp_path / "student.py").write_text(RIGHT)
    verdict = grade_file(tmp_path / "student.py", MASK)
    assert verdict.passed, verdict.text
    assert verdict.text == f"01-offset-mask: all {len(MASK.cases)} cases passed."


def test_a_loop_without_an_end_is_stopped(tmp_path, monkeypatch):
    def run(command, *, env, timeout):
        """The limit passes once the file is being read, however long Python takes to start."""
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            process.kill()
        raise subprocess.TimeoutExpired(command, timeout)

    (tmp_path / "student.py").write_text("print('here', flush=True)\nwhile True: pass")
    monkeypatch.setattr(answer_file.subprocess, "run", run)
    verdict = grade_file(tmp_path / "student.py", MASK, limit_s=0.3)
    assert not verdict.passed
    assert "no result after 0.3 s, while student.py was read: is there a loop" in verdict.text


@pytest.mark.parametrize("code, words", [(None, "no result after 60 s"), (-11, "with code -11")])
@pytest.mark.parametrize(
    "log, place",
    [
        (None, "before student.py was read"),
        ('{"reading": "student.py"}\n', "while student.py was read"),
        ('{"case": "first"}\n{"case": "square prefill"}\n', "in the case 'square prefill'"),
    ],
)
def test_where_it_hung_or_died_is_named(tmp_path, monkeypatch, code, words, log, place):
    def run(command, *, timeout, **_):
        if log is not None:
            Path(command[-1]).write_text(log)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(answer_file.subprocess, "run", run)
    verdict = grade_file(tmp_path / "student.py", MASK)
    assert not verdict.passed
    assert words in verdict.text and place in verdict.text
    assert ("is there a loop" in verdict.text) == (code is None and log is not None)


@pytest.mark.usefixtures("plain_calls")
def test_a_limit_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="limit_s"):
        grade_file(tmp_path, MASK, limit_s=0.0)

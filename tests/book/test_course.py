"""The page for teachers: its commands run as they are printed, and its answers are right."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_ref.cli.app import app
from mla_ref.ladder.lessons import find_lessons
from mla_ref.layers import preset
from mla_ref.teaching import EXERCISES, answer_file, answer_worker
from mla_ref.teaching.answer_file import Verdict

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book" / "course.md").read_text("utf-8")
BLOCKS = [
    block.replace("\\\n", " ")
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
]


def test_the_table_and_the_homework_are_those_of_the_lessons():
    rows = re.findall(r"^\| \d \| \[(\d\d), .*\| (.+\?) \| (\d+) min \| (\d+) min \|$", PAGE, re.M)
    chosen = find_lessons([row[0] for row in rows])
    assert [lesson.number for lesson in chosen] == ["02", "07", "11"]
    for row, lesson in zip(rows, chosen, strict=True):
        assert row[1:] == (lesson.question, str(lesson.minutes), str(lesson.exercise_minutes))
    homework = re.findall(r"^\*\*Homework:\*\* `(\w+)` and `(\w+)`\.$", PAGE, flags=re.M)
    for names, lesson in zip(homework, chosen, strict=True):
        mine = [e.name for e in EXERCISES.values() if e.id[:2] == lesson.number]
        assert sorted(names) == sorted(mine)


def graded_here(path, exercise, *, limit_s):
    """What `grade_file` says, without a process for each exercise."""
    log = path.with_suffix(f".{exercise.id}.log")
    answer_worker.main(path, exercise.id, log)
    return Verdict(**json.loads(log.read_text("utf-8").splitlines()[-1]))


def test_the_commands_run_as_they_are_printed(pytester, monkeypatch):
    monkeypatch.setattr(answer_file, "grade_file", graded_here)
    copy, one, loop = BLOCKS
    result = CliRunner().invoke(app, shlex.split(copy)[1:])
    assert result.exit_code == 0, result.output
    names = [path.name for path in sorted(Path("course").iterdir())]
    assert [name[:2] for name in names] == ["02", "07", "11"]

    # A student hands in the notebook of lesson 02 with one exercise done and one left blank.
    handed_in = Path("course", names[0]).read_text("utf-8")
    blank = "raise NotImplementedError  # your code here"
    words = shlex.split(one)
    handed_in = handed_in.replace(blank, "return torch.zeros(0)", 1)
    Path(words[-1]).write_text(handed_in, encoding="utf-8")
    plugin = ("-p", "mla_ref.cli.pytest_grade", "-p", "no:cacheprovider")
    found = pytester.runpytest_inprocess(*plugin, *words[1:])
    found.assert_outcomes(failed=2)
    found.stdout.fnmatch_lines(["*expected the tuple (out, lse)*", "*still blank*"])

    # The loop's own line, for one of its files.
    line = next(line for line in loop.splitlines() if line.strip().startswith("pytest"))
    solution = ROOT / "lessons" / "solutions" / "lesson_02.py"
    Path("answers").mkdir()
    Path("answers", "ada.py").write_bytes(solution.read_bytes())
    line = line.replace("${file%.ipynb}", "answers/ada").replace("$file", "answers/ada.py")
    pytester.runpytest_inprocess(*plugin, *shlex.split(line)[1:]).assert_outcomes(passed=2)
    assert 'name="02: one more tile"' in Path("answers/ada.xml").read_text("utf-8")


@pytest.mark.parametrize(
    "number",
    [
        f"{(1 + 2 * 4 + 10) / 4:.2f}",
        f"{(1 + math.e * 4 + 10) / (2 + math.e):.3f}",
        f"{32 * 2 * (192 + 128):,}".replace(",", "{,}"),
        f"{32 * 2 * (576 + 512):,}".replace(",", "{,}"),
        f"{32 * 2 * (576 + 512) / 1152:.0f} a byte",
        f"{4 * 32 * 2 * (576 + 512) / 1152:.0f} operations a byte",
        f"{1088 / 320:.1f} times the operations",
        f"{32 * 320 * 2 / 1152:.1f}",
        f"{math.sqrt(576 / 192):.3f}",
        f"{math.exp(3) / (1 + math.exp(3)):.3f}",
        f"{1 / (1 + math.exp(-(3**0.5))):.3f}",
        f"{1 + 0.8 + 0.64 + 0.512:.3f}",
        f"{(1 + 0.8 + 0.64 + 0.512) / 1.33:.2f} times as fast",
        f"{1.111 / 1.33:.2f}",
    ],
)
def test_a_number_of_the_answers_is_what_its_formula_gives(number):
    assert number in PAGE


def test_the_model_of_question_3_has_the_dimensions_of_deepseek():
    v32 = preset("v3.2")
    dims = v32.qk_nope_head_dim, v32.qk_rope_head_dim, v32.v_head_dim, v32.kv_lora_rank
    assert dims == (128, 64, 128, 512)

"""A lesson's page has each solution, folded, and the notebook has none."""

import ast
import importlib.util
import json
import os
import re
from html import unescape
from pathlib import Path

import pytest

from mla_ref.teaching import EXERCISES, grade

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "book" / "_build" / "html"
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folded = load(ROOT / "book" / "_ext" / "folded_solutions.py")


def solutions_of(lesson):
    return (ROOT / "lessons" / "solutions" / f"lesson_{lesson.name[:2]}.py").read_text("utf-8")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem[:2])
def test_a_fold_follows_each_grading_and_nothing_else_changes(lesson):
    before = lesson.read_text("utf-8")
    cells = json.loads(folded.with_solutions(before, solutions_of(lesson)))["cells"]
    added = [i for i, cell in enumerate(cells) if cell["id"].startswith("solution-")]
    assert [cell for i, cell in enumerate(cells) if i not in added] == json.loads(before)["cells"]
    ids = [exercise.id for exercise in EXERCISES.values() if exercise.id[:2] == lesson.name[:2]]
    assert sorted(cells[i]["id"].removeprefix("solution-") for i in added) == sorted(ids)
    for i in added:
        exercise = EXERCISES[cells[i]["id"].removeprefix("solution-")]
        assert f'grade("{exercise.id}", ' in "".join(cells[i - 1]["source"])


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_what_is_folded_runs_alone_and_passes(exercise):
    path = ROOT / "lessons" / "solutions" / f"lesson_{exercise.id[:2]}.py"
    names = {}
    exec(folded.solution(path.read_text("utf-8"), exercise.name), names)
    assert grade(exercise, names[exercise.name]).passed


def test_a_solution_takes_along_what_it_needs_and_no_more():
    module = '"""A module."""\n\nimport math\nimport os\n\nX = 3\nY = os.sep\n\n\n# Why.\n'
    module += "def helper():\n    return X\n\n\ndef answer():\n    return helper() + math.pi\n"
    assert folded.solution(module, "answer") == (
        "import math\n\n\nX = 3\n\n\n# Why.\ndef helper():\n    return X\n\n\n"
        "def answer():\n    return helper() + math.pi"
    )


def test_no_notebook_holds_a_solution():
    for lesson in LESSONS:
        text = "".join("".join(c["source"]) for c in json.loads(lesson.read_text("utf-8"))["cells"])
        for node in ast.parse(solutions_of(lesson)).body:
            if isinstance(node, ast.FunctionDef):
                last = ast.get_source_segment(solutions_of(lesson), node.body[-1])
                assert last not in text, f"{lesson.name} holds {node.name}"


def test_the_built_page_of_a_lesson_has_its_solutions_closed():
    page = SITE / "lessons" / "02_online_softmax.html"
    if not page.is_file():
        reason = "the book is not built: make book"
        if os.environ.get("MLA_REF_REQUIRE_BOOK") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    html = page.read_text("utf-8")
    folds = re.findall(
        r'<details class="admonition">\s*<summary class="admonition-title">A solution</summary>'
        r"(.*?)</details>",
        html,
        flags=re.DOTALL,
    )
    assert len(folds) == 2
    for fold, name in zip(folds, ("my_merge", "add_tile"), strict=True):
        assert f"def {name}(" in unescape(re.sub(r"<[^>]+>", "", fold))

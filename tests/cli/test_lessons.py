"""`mla-ref lessons`: the list is what the notebooks say, and no file of a reader's is lost."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_ref.cli.app import app
from mla_ref.cli.lessons import _quoted
from mla_ref.ladder import lessons as module
from mla_ref.ladder.lessons import copy_lessons, find_lessons, lessons

ROOT = Path(__file__).parents[2]
NAME = "02_online_softmax.ipynb"


def run(*words):
    return CliRunner().invoke(app, ["lessons", *map(str, words)], env={"COLUMNS": "80"})


def test_every_notebook_is_a_lesson_with_all_that_its_opening_says():
    found = lessons()
    assert [lesson.path for lesson in found] == sorted((ROOT / "lessons").glob("[0-9]*.ipynb"))
    assert [lesson.number for lesson in found] == [f"{n:02}" for n in range(len(found))]
    for lesson in found:
        assert lesson.question.endswith("?")
        assert 30 <= lesson.minutes <= 120 and 20 <= lesson.exercise_minutes <= 60
        for text in (lesson.title, lesson.question, lesson.needs, lesson.rungs):
            assert text and not re.search(r"[$`\n]|\*\*", text)


def test_the_table_of_the_lessons_readme_says_the_same():
    text = (ROOT / "lessons" / "README.md").read_text("utf-8")
    rows = [re.split(r" \| ", line[2:-2]) for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(lessons())
    for row, lesson in zip(rows, lessons(), strict=True):
        minutes = f"{lesson.minutes} min", f"{lesson.exercise_minutes} min"
        assert (row[0].strip("`"), *row[3:]) == (lesson.path.stem, *minutes)
        assert re.sub(r"[$`]", "", row[1]) == lesson.question


def test_without_arguments_all_are_listed():
    result = run()
    assert result.exit_code == 0
    assert "02  Online softmax, LSE and merge (75 + 45 min)\n" in result.output
    assert "    Can attention be done in pieces?\n" in result.output
    assert "You need" not in result.output
    assert result.output.count(" min)\n") == len(lessons())
    assert f"\n{len(lessons())} lessons: " in result.output


def test_some_are_shown_with_what_they_need():
    result = run("7", "02")
    assert [line[:2] for line in result.output.splitlines() if line[0] != " "] == ["07", "02"]
    assert "    You need: lesson 06.\n" in result.output


def test_json_holds_the_same():
    data = json.loads(run("02", "--json").output)
    (lesson,) = find_lessons(["02"])
    assert data["copies"] == []
    assert data["lessons"][0]["question"] == lesson.question
    assert data["lessons"][0]["path"] == str(lesson.path)


def test_copies_are_the_notebooks_and_are_named(tmp_path):
    result = run("--copy", "02", "07", "--to", tmp_path / "new" / "folder")
    assert result.exit_code == 0, result.output
    copies = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in copies] == [NAME, "07_mla_absorbed.ipynb"]
    for path in copies:
        assert f"copied {path}\n" in result.output
        assert path.read_bytes() == (ROOT / "lessons" / path.name).read_bytes()


def test_the_commands_after_copying_can_be_pasted_into_a_shell(tmp_path):
    """cmd.exe knows double quotes alone; `pip install 'a[b]'` fails there."""
    folder = tmp_path / "my course"
    output = run("--copy", "02", "--to", folder).output
    assert f"\nOpen them: jupyter lab {_quoted(folder)}\n" in output
    assert _quoted(folder, "linux") == f"'{folder}'"
    assert 'pip install "mla-ref[lessons,model]"; ' in output
    assert _quoted(Path("C:/my course"), "win32") == '"C:/my course"'
    assert _quoted(Path("course"), "win32") == _quoted(Path("course"), "linux") == "course"


def test_a_reader_s_file_is_not_overwritten_and_nothing_else_is_copied(tmp_path):
    (tmp_path / NAME).write_text("mine")
    result = run("--copy", "01", "02", "--to", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path / NAME} would be overwritten, and nothing was copied" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_text() == "mine"
    assert run("--copy", "01", "02", "--to", tmp_path, "--force").exit_code == 0
    assert (tmp_path / NAME).read_bytes() == (ROOT / "lessons" / NAME).read_bytes()


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    result = run("--copy", "02", "--to", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"mla-ref: error: File exists: {file}\n"
    assert file.read_text() == "mine"


def test_a_copy_that_was_not_touched_may_be_made_again(tmp_path):
    for _ in range(2):
        assert run("--copy", "02", "--to", tmp_path).exit_code == 0


def test_copying_the_lessons_onto_themselves_leaves_them_as_they_are():
    chosen = find_lessons(["02"])
    before = chosen[0].path.read_bytes()
    assert copy_lessons(chosen, chosen[0].path.parent) == [chosen[0].path]
    assert chosen[0].path.read_bytes() == before


@pytest.mark.parametrize(
    "words, message",
    [
        (("17",), "lesson must be one of 00, 01, 02,"),
        (("02", "--to", "somewhere"), "--to and --force belong to --copy"),
        (("02", "--force"), "--to and --force belong to --copy"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_installed_package_reads_its_own_notebooks(tmp_path, monkeypatch):
    copy_lessons(find_lessons(["02"]), tmp_path / "lessons")
    monkeypatch.setattr(module, "_FOLDERS", (tmp_path / "lessons", ROOT / "lessons"))
    assert [lesson.path for lesson in lessons()] == [tmp_path / "lessons" / NAME]
    monkeypatch.setattr(module, "_FOLDERS", (tmp_path / "nowhere",))
    with pytest.raises(FileNotFoundError, match="no lessons in "):
        lessons()


def test_a_notebook_that_opens_otherwise_is_an_error(tmp_path, monkeypatch):
    (tmp_path / NAME).write_text(json.dumps({"cells": [{"source": ["# A title"]}]}))
    monkeypatch.setattr(module, "_FOLDERS", (tmp_path,))
    with pytest.raises(ValueError, match="02_online_softmax.ipynb must open with its title"):
        lessons()

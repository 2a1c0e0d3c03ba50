"""The shape that all lessons share, word for word: headings, opening, and what each part holds.

`test_lessons.py` runs the lessons; this file only reads them.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from mla_ref.teaching.planted import PLANTED

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parents[2] / "lessons"
NAMES = [path.stem for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))]

HEADINGS = (
    r"1\. The question",
    r"2\. Naive code, with its bytes",
    r"3\. The figure",
    r"4\. The idea: [a-zA-Z].+",  # in a few words, which one
    r"5\. The library's function",
    r"6\. A public bug, planted",
    r"7\. Exercises",
    r"8\. On paper",
    r"9\. What the next lesson breaks",
)
OPENING = re.compile(
    r"# Lesson (?P<number>\d\d): [^\n]+\n\n"
    r"\*\*(?P<question>[^\n]+\?)\*\*\n\n"
    r"- \*\*You need:\*\* .+?\n"
    r"- \*\*Time:\*\* (?P<read>\d+) minutes to read and run, "
    r"(?P<more>\d+) more for the exercises?\.\n"
    r"- \*\*Rungs:\*\* .+?\n"
    r"- \*\*Runs alone,\*\* from top to bottom in under a minute.+?\n\n"
    r"You will leave ",
    re.DOTALL,
)
# What only some systems have, or what a notebook must not do there.
NOT_EVERYWHERE = re.compile(
    r"os\.fork|\bfcntl\b|\bresource\b\.|signal\.SIG|/proc/|/dev/|/tmp/|\bgloo\b|\bnccl\b"
    r"|^[!%]|multiprocessing",
    re.MULTILINE,
)
# A report that is only named: `vllm#936` with no link around it and none defined for it.
REPORT = re.compile(r"(?<![\w/.-])(?:[\w.-]+/)?[A-Za-z][\w.-]*#\d+")


@cache
def cells(name):
    """Each cell as (its part, its type, its source); the opening is part 0."""
    part, found = 0, []
    for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
        pieces = [cell.source]
        if cell.cell_type == "markdown":
            pieces = re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)
        for piece in filter(None, pieces):
            part += piece.startswith("## ")
            found.append((part, cell.cell_type, piece))
    return found


def texts(name, part, kind):
    return "\n\n".join(source for of, what, source in cells(name) if (of, what) == (part, kind))


def prose(name, part):
    return texts(name, part, "markdown")


def code(name, part):
    return texts(name, part, "code")


@cache
def rows_of_readme():
    """Name of a lesson to its row of the table: question, rungs, minutes, minutes."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\d\d_\w+)` \| (.+) \|$", text, flags=re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_headings_are_the_same_words_in_the_same_order(name):
    found = [prose(name, part).splitlines()[0] for part in range(1, len(HEADINGS) + 1)]
    for heading, expected in zip(found, HEADINGS, strict=True):
        assert re.fullmatch(f"## {expected}", heading), heading
    assert max(part for part, _, _ in cells(name)) == len(HEADINGS)


@pytest.mark.parametrize("name", NAMES)
def test_the_opening_is_of_one_form_and_agrees_with_the_readme(name):
    found = OPENING.match(prose(name, 0))
    assert found, prose(name, 0)
    assert found["number"] == name[:2]
    question, _, read, more = rows_of_readme()[name]
    assert found["question"].replace("$", "") == question
    assert (read, more) == (f"{found['read']} min", f"{found['more']} min")


def test_the_readme_lists_all_lessons_in_order():
    assert list(rows_of_readme()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_is_asked_before_being_told(name):
    assert "Before you read on" in " ".join(prose(name, 1).split())


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_code_counts_and_the_figure_is_drawn(name):
    assert re.search(r"bytes|[kMG]B\b", code(name, 2) + prose(name, 2))
    assert re.search(r"^figures\.", code(name, 3), flags=re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_the_library_is_shown_and_compared(name):
    assert re.search(r"^(source = )?show(_cuda)?\(", code(name, 5), flags=re.MULTILINE)
    assert re.search(r"compare\(|torch\.equal\(|compare_times|overlap\(|== plain", code(name, 5))


@pytest.mark.parametrize("name", NAMES)
def test_a_bug_has_a_planted_form_a_number_a_link_and_a_cure(name):
    text, planted = prose(name, 6), re.findall(r"planted\.(\w+)", code(name, 6))
    assert planted
    for bug in PLANTED:
        if bug.function.__name__ in planted:
            assert bug.id in text
            links = (f"https://github.com/{r.replace('#', '/issues/')}" for r in bug.reports)
            assert any(link in text for link in links), bug.reports
    assert "**The cure" in text


def test_every_planted_bug_stands_in_one_lesson():
    for bug in PLANTED:
        call = re.compile(rf"planted\.{bug.function.__name__}\b")
        assert sum(bool(call.search(code(name, 6))) for name in NAMES) == 1, bug.function


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_a_link(name):
    for _, kind, source in cells(name):
        if kind == "markdown":
            text = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|^\[.+?\]: .+$", "", source, flags=re.M)
            defined = set(re.findall(r"^\[(.+?)\]: https://", source, flags=re.M))
            for report in REPORT.findall(text):
                assert report in defined, report
                assert f"[{report}]" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_exercises_say_where_the_answers_are(name):
    assert "raise NotImplementedError  # your code here" in code(name, 7)
    assert f"Answers are in `lessons/solutions/lesson_{name[:2]}.py`." in prose(name, 7)


@pytest.mark.parametrize("name", NAMES)
def test_the_end_leads_to_the_next_lesson(name):
    following = f"{int(name[:2]) + 1:02}"
    last = name == NAMES[-1]
    expected = "there is no next lesson" if last else rf"lesson {following}|the next lesson"
    below_the_heading = prose(name, 9).split("\n", 1)[1]
    assert re.search(expected, " ".join(below_the_heading.split()), flags=re.IGNORECASE)


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_needs_one_system(name):
    for _, kind, source in cells(name):
        if kind == "code":
            assert not NOT_EVERYWHERE.search(source), source

"""The lessons as data, read from the notebooks themselves, and copies of them for a reader.

An installed package carries the notebooks in its folder `lessons`; in a checkout they lie at the
top of the repository, beside `src`.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "lessons", _PACKAGE.parents[1] / "lessons")
# What a notebook opens with, all of it on lines of its own but for the wrapped items.
_OPENING = re.compile(
    r"# Lesson (?P<number>\d\d): (?P<title>.+)\n\n\*\*(?P<question>.+)\*\*\n\n"
    r"- \*\*You need:\*\* (?P<needs>(?:.|\n)+?)\n"
    r"- \*\*Time:\*\* (?P<minutes>\d+) minutes to read and run, (?P<more>\d+) more .+\n"
    r"- \*\*Rungs:\*\* (?P<rungs>(?:.|\n)+?)\n- "
)


@dataclass(frozen=True)
class Lesson:
    """One lesson.

    Attributes:
        number: Two digits.
        title: A few words.
        question: What it answers.
        needs: What a reader should know.
        minutes: To read and run it.
        exercise_minutes: For its exercises, on top of that.
        rungs: The rungs of the ladder that it is about, in words.
        path: The notebook.
    """

    number: str
    title: str
    question: str
    needs: str
    minutes: int
    exercise_minutes: int
    rungs: str
    path: Path


def lessons() -> tuple[Lesson, ...]:
    """All lessons, in order.

    Raises:
        FileNotFoundError: There are no notebooks, neither in the package nor beside its source.
        ValueError: A notebook does not open as lessons do.
    """
    for folder in _FOLDERS:
        if paths := sorted(folder.glob("[0-9][0-9]_*.ipynb")):
            return tuple(_read(path) for path in paths)
    raise FileNotFoundError(f"no lessons in {' or '.join(map(str, _FOLDERS))}")


def find_lessons(numbers: Sequence[str]) -> tuple[Lesson, ...]:
    """The lessons with these numbers, or all if none is given.

    Raises:
        ValueError: There is no lesson of a number; the message lists those there are.
    """
    known = {lesson.number: lesson for lesson in lessons()}
    wanted = [number.zfill(2) for number in numbers] or list(known)
    for number in wanted:
        if number not in known:
            raise ValueError(f"lesson must be one of {', '.join(known)}, got {number}")
    return tuple(known[number] for number in dict.fromkeys(wanted))


def copy_lessons(chosen: Sequence[Lesson], folder: Path, *, force: bool = False) -> list[Path]:
    """Copy notebooks into a folder, which is made if it is not there.

    Args:
        chosen: Which lessons.
        folder: Where to.
        force: Write over what a reader has changed.

    Returns:
        The copies, in order.

    Raises:
        ValueError: A file is there already and differs, and `force` is False. Nothing is copied.
    """
    pairs = [(lesson.path, folder / lesson.path.name) for lesson in chosen]
    changed = [
        copy for path, copy in pairs if copy.exists() and copy.read_bytes() != path.read_bytes()
    ]
    if changed and not force:
        raise ValueError(
            f"{', '.join(map(str, changed))} would be overwritten, and nothing was copied: choose "
            "another folder, or --force"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, copy in pairs:
        if path.resolve() != copy.resolve():
            shutil.copyfile(path, copy)
    return [copy for _, copy in pairs]


def _read(path: Path) -> Lesson:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    found = _OPENING.match("".join(cells[0]["source"]))
    if not found:
        raise ValueError(f"{path.name} must open with its title, question, needs, time and rungs")
    words = {name: _plain(text) for name, text in found.groupdict().items()}
    return Lesson(
        words["number"],
        words["title"],
        words["question"],
        words["needs"],
        int(words["minutes"]),
        int(words["more"]),
        words["rungs"],
        path,
    )


def _plain(markdown: str) -> str:
    """One line for a terminal: no dollar signs and backticks, no line breaks."""
    return " ".join(re.sub(r"[$`]", "", markdown).split())

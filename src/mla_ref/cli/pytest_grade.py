"""A pytest plugin: `pytest --pyargs mla_ref.teaching.exercises --lesson 02 --answer student.py`.

pytest loads it in every run in an environment that has this package, since a conftest inside a
package is read too late to add options. So it does nothing, and imports nothing, unless the
exercises are what pytest was asked for.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "mla_ref.teaching.exercises"
FOLDER = Path(__file__).resolve().parents[1] / "teaching" / "exercises"
LESSONS = tuple(sorted(p.stem[-2:] for p in FOLDER.glob("lesson_[0-9][0-9].py")))
USAGE = f"type: pytest --pyargs {PACKAGE} --lesson 02 --answer student.py [--junitxml out.xml]"


def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: Sequence[str]
) -> None:
    """Add the options where the exercises are named, before pytest reads them all."""
    if not any(word.split("::")[0] == PACKAGE for word in args):
        return
    group = parser.getgroup("mla_ref", "grade a file with the answers to a lesson's exercises")
    group.addoption("--lesson", metavar="NN", help=f"one of {', '.join(LESSONS)}")
    group.addoption("--answer", metavar="FILE", help="a Python file or a notebook")
    group.addoption(
        "--seconds", type=float, default=60.0, help="the longest that one exercise may take"
    )
    early_config.pluginmanager.register(Grading(), "mla_ref-grading")


class Grading:
    """What is in force where the exercises were named."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Say what to type where it was not typed."""
        lesson, answer = config.getoption("--lesson"), config.getoption("--answer")
        if config.option.help or config.option.version:
            return
        if lesson is None or answer is None:
            missing = "--lesson" if lesson is None else "--answer"
            raise pytest.UsageError(f"{missing} is missing; {USAGE}")
        if str(lesson).zfill(2) not in LESSONS:
            raise pytest.UsageError(f"--lesson must be one of {', '.join(LESSONS)}, got {lesson}")
        if not Path(answer).is_file():
            raise pytest.UsageError(f"--answer must be a file, got {answer}")
        if config.option.seconds <= 0:
            raise pytest.UsageError(f"--seconds must be above 0, got {config.option.seconds:g}")

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> Any:
        """Take the lesson's file as a file of tests."""
        lesson = str(parent.config.getoption("--lesson")).zfill(2)
        if file_path.parent == FOLDER and file_path.name == f"lesson_{lesson}.py":
            return LessonFile.from_parent(parent, path=file_path)
        return None


class LessonFile(pytest.File):  # type: ignore[misc]
    """One test for each exercise of a lesson."""

    def collect(self) -> Iterator[pytest.Item]:
        """Name each test by the exercise's title, as in "02: Merge two partial results"."""
        from mla_ref.teaching.exercises import EXERCISES

        for exercise in EXERCISES.values():
            if exercise.id[:2] == self.path.stem[-2:]:
                name = f"{exercise.id[:2]}: {exercise.title[0].lower()}{exercise.title[1:]}"
                yield ExerciseItem.from_parent(self, name=name, exercise=exercise)


class ExerciseItem(pytest.Item):  # type: ignore[misc]
    """One exercise in the file that was handed in."""

    def __init__(self, *, exercise: Any, **rest: Any) -> None:
        super().__init__(**rest)
        self.exercise = exercise

    def runtest(self) -> None:
        """Grade it; a failure shows the grade's own words and no traceback."""
        from mla_ref.teaching.answer_file import grade_file

        path = Path(self.config.getoption("--answer")).resolve()
        verdict = grade_file(path, self.exercise, limit_s=self.config.getoption("--seconds"))
        if not verdict.passed:
            pytest.fail(verdict.text, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the task stands, and its name."""
        return self.path, None, self.name

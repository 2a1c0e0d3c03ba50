"""pytest as a grader: a test for each exercise of a lesson, and a word for each wrong command."""

import pytest

from mla_ref.cli import pytest_grade
from mla_ref.teaching import EXERCISES, answer_file
from mla_ref.teaching.answer_file import Verdict

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.thorough


@pytest.fixture
def graded(pytester, monkeypatch):
    """Run the command; every answer is right, but for those of the second exercises."""

    def grade_file(path, exercise, *, limit_s):
        first = next(e for e in EXERCISES.values() if e.id[:2] == exercise.id[:2])
        return Verdict(exercise is first, f"{path.name} within {limit_s:g} s")

    monkeypatch.setattr(answer_file, "grade_file", grade_file)
    (pytester.path / "student.py").touch()

    def run(*words):
        plugin = ("-p", "mla_ref.cli.pytest_grade", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(
            *plugin, "--pyargs", pytest_grade.PACKAGE, *words, syspathinsert=False
        )

    return run


def test_both_exercises_of_a_lesson_are_tests_named_by_their_titles(graded, pytester):
    result = graded("-v", "--lesson", "02", "--answer", "student.py", "--junitxml", "out.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*::02: merge two partial results PASSED*", "*::02: one more tile FAILED*"]
    )
    xml = (pytester.path / "out.xml").read_text("utf-8")
    assert 'name="02: merge two partial results"' in xml
    assert "student.py within 60 s" in xml


def test_a_failure_is_the_grade_s_words_and_no_traceback(graded):
    result = graded("--lesson", "13", "--answer", "student.py", "--seconds", "5")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["student.py within 5 s"])
    assert "grade_file" not in result.stdout.str()
    assert "pytest_grade.py" not in result.stdout.str()


def test_a_lesson_may_be_one_digit(graded):
    graded("--lesson", "0", "--answer", "student.py").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "--lesson is missing; type: pytest --pyargs mla_ref.teaching.exercises --lesson 02"),
        (("--lesson", "02"), "--answer is missing; type: pytest"),
        (
            ("--lesson", "17", "--answer", "student.py"),
            "--lesson must be one of 00, 01, 02, *, 16, got 17",
        ),
        (("--lesson", "02", "--answer", "no.py"), "--answer must be a file, got no.py"),
        (
            ("--lesson", "02", "--answer", "student.py", "--seconds", "0"),
            "--seconds must be above 0, got 0",
        ),
    ],
)
def test_a_command_that_lacks_something_says_what_to_type(graded, words, message):
    result = graded(*words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}*"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_every_lesson_with_exercises_can_be_named():
    assert set(pytest_grade.LESSONS) == {exercise.id[:2] for exercise in EXERCISES.values()}


def test_another_run_of_pytest_has_no_such_options(pytester):
    pytester.makepyfile(
        "def test_it(pytestconfig): assert not hasattr(pytestconfig.option, 'lesson')"
    )
    plugin = ("-p", "mla_ref.cli.pytest_grade", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*plugin).assert_outcomes(passed=1)
    assert pytester.runpytest_inprocess(*plugin, "--lesson", "02").ret == 4

"""The index of known bugs and the tests named after them: each names the other, both ways."""

import ast
import re
from pathlib import Path

import pytest

from mla_ref.testing.bugs import BUGS, KINDS, load_bugs

TESTS = Path(__file__).parents[1]
IDS = re.compile(r"B\d{3}(?=_|$)")
ONE_ENTRY = """
[[bug]]
id = "B001"
title = "t"
symptom = "s"
cause = "c"
link = ["a/b#1", "c.d/e-f#22"]
kind = "padding"
tests = ["tests/a/test_b.py::test_B001_c"]
"""


def scan() -> dict[str, set[str]]:
    """Test ids by the bugs in their names, from the source text: nothing is imported."""
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_B"):
                # test_B121_B122_x belongs to both.
                head = re.match(r"test_((?:B\d{3}_?)+)", node.name)
                for bug in IDS.findall(head[1]) if head else ():
                    test = f"tests/{path.relative_to(TESTS).as_posix()}::{node.name}"
                    found.setdefault(bug, set()).add(test)
    return found


def listed() -> dict[str, set[str]]:
    return {bug.id: set(bug.tests) for bug in BUGS}


def test_every_test_named_after_a_bug_is_in_the_index() -> None:
    index = listed()
    missing = {
        bug: sorted(tests - index.get(bug, set()))
        for bug, tests in scan().items()
        if tests - index.get(bug, set())
    }
    assert not missing, f"add to src/mla_ref/testing/bugs.toml: {missing}"


def test_every_test_of_the_index_exists() -> None:
    found = scan()
    gone = {
        bug: sorted(tests - found.get(bug, set()))
        for bug, tests in listed().items()
        if tests - found.get(bug, set())
    }
    assert not gone, f"remove from src/mla_ref/testing/bugs.toml, or rename: {gone}"


def test_the_scan_finds_names_and_not_mentions() -> None:
    found = scan()
    assert len(found) >= 40
    here = "tests/testing/test_bugs_index.py"
    assert not any(test.startswith(here) for tests in found.values() for test in tests)
    both = [test for test in found["B121"] if "test_B121_B122_" in test]
    assert both and set(both) <= found["B122"]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_an_entry_reads_well(bug) -> None:
    """It goes onto a page as it is: a short title, whole sentences, no user of GitHub named."""
    assert len(bug.title) <= 80 and not bug.title.endswith(".")
    for text in (bug.symptom, bug.cause):
        assert not text[0].islower() and not text[0].isspace()
        assert text.rstrip().endswith((".", "?"))
        assert "@" not in text and "\n" not in text
    assert len(bug.cause) > 60
    assert list(bug.tests) == sorted(set(bug.tests))


def test_every_kind_is_used() -> None:
    assert {bug.kind for bug in BUGS} == set(KINDS)


def test_links_become_addresses() -> None:
    (bug,) = load_bugs(ONE_ENTRY)
    assert bug.urls == (
        "https://github.com/a/b/issues/1",
        "https://github.com/c.d/e-f/issues/22",
    )
    assert bug.link == bug.urls[0]
    assert load_bugs(ONE_ENTRY.replace('["a/b#1", "c.d/e-f#22"]', '"a/b#1"'))[0].links == ("a/b#1",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"B001"', '"B1"', "id must be B and three digits"),
        ('"t"', '" "', "B001: title must not be empty"),
        ('"s"', '""', "B001: symptom must not be empty"),
        ('"padding"', '"bad luck"', "B001: kind must be one of"),
        ('"a/b#1"', '"b#1"', "B001: link must match"),
        ('"a/b#1"', '"https://github.com/a/b/issues/1"', "B001: link must match"),
        ("test_b.py", "test_b", "B001: tests must match"),
        ('["tests/a/test_b.py::test_B001_c"]', "[]", "B001: tests must match"),
        ('cause = "c"', "", r"B001 must have the keys .*'cause'"),
        ('cause = "c"', 'cause = "c"\nfix = "f"', r"B001 must have the keys .*'fix'"),
    ],
)
def test_a_broken_entry_is_named(old: str, new: str, message: str) -> None:
    assert old in ONE_ENTRY
    with pytest.raises(ValueError, match=message):
        load_bugs(ONE_ENTRY.replace(old, new))


def test_ids_rise_without_repetition() -> None:
    with pytest.raises(ValueError, match="ids must rise"):
        load_bugs(ONE_ENTRY + ONE_ENTRY)
    with pytest.raises(ValueError, match="ids must rise"):
        load_bugs(ONE_ENTRY.replace("B001", "B002") + ONE_ENTRY)

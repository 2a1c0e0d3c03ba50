"""The table of rungs names only what exists."""

import ast
from pathlib import Path

import pytest

from mla_ref.ladder import RUNGS, where
from mla_ref.ladder.rung_runs import RUNNERS

ROOT = Path(__file__).parents[2]


def test_numbers_run_from_one_without_a_gap():
    assert [rung.number for rung in RUNGS] == list(range(1, 16))


def test_every_rung_climbs():
    assert [r.number for r in RUNGS] == list(RUNNERS)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_every_named_file_exists(rung):
    for path in (rung.file, rung.test, rung.lesson):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_where_finds_the_module_that_is_imported(rung):
    found = where(rung)
    assert found is not None
    assert found.read_text(encoding="utf-8") == (ROOT / rung.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_the_file_says_which_rung_it_is(rung):
    first_line = ast.get_docstring(ast.parse((ROOT / rung.file).read_text(encoding="utf-8")))
    assert first_line.startswith(f"Rung {rung.number}:")

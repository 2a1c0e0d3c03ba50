"""The table of rungs names only what exists."""

import ast
from pathlib import Path

import pytest

from mla_ref.ladder import RUNGS, where
from mla_ref.ladder.rung_runs import RUNNERS

ROOT = Path(__file__).parents[2]
BUILT = [rung for rung in RUNGS if rung.built]


def test_numbers_run_from_one_without_a_gap():
    assert [rung.number for rung in RUNGS] == list(range(1, 16))


def test_what_climbs_is_what_is_built():
    assert [r.number for r in RUNGS if r.built] == list(RUNNERS)


@pytest.mark.parametrize("rung", BUILT, ids=lambda r: r.name)
def test_every_named_file_exists(rung):
    for path in (rung.file, rung.test, rung.lesson):
        assert path is None or (ROOT / path).is_file(), path


@pytest.mark.parametrize("rung", BUILT, ids=lambda r: r.name)
def test_where_finds_the_module_that_is_imported(rung):
    found = where(rung)
    assert found is not None
    assert found.read_text(encoding="utf-8") == (ROOT / rung.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("rung", BUILT, ids=lambda r: r.name)
def test_the_file_says_which_rung_it_is(rung):
    first_line = ast.get_docstring(ast.parse((ROOT / rung.file).read_text(encoding="utf-8")))
    assert first_line.startswith(f"Rung {rung.number}:")


def test_a_rung_that_is_not_built_has_no_place():
    assert where(RUNGS[-1]) is None or RUNGS[-1].built

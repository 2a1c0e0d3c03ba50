"""The files behind the book's page: whole, as the code would write them, and true to their rows."""

import json
from math import fsum, isclose
from pathlib import Path

import pytest

from mla_ref.bench.speculative_gate import Difference
from mla_ref.validation import PAIRS, full_axes
from mla_ref.validation.modes_texts import Departure, Texts
from mla_ref.validation.ranks import RanksFinding
from mla_ref.validation.recipe import RECIPES
from mla_ref.validation.verdict import FACTOR, SENSITIVITY

DATA = Path(__file__).parents[2] / "book" / "data"
ROWS = ("rows", "rows-triton", "rows-cupy")


def read(name):
    return json.loads((DATA / f"validation-{name}.json").read_text("utf-8"))


def mean(pair):
    return fsum(pair["kl_of_rows"]) / len(pair["kl_of_rows"])


@pytest.mark.parametrize("name", [*ROWS, "modes", "modes-triton", "modes-cupy", "recipe"])
def test_a_file_names_its_command_and_versions_and_its_verdict(name):
    found = read(name)
    # On the one GPU of that file no cache was shared: of ranks it proves nothing.
    assert found["passed"] is (name != "modes-cupy")
    assert found["command"].startswith(f"mla-ref validate {name.partition('-')[0]} ")
    assert "--full" in found["command"] or name.startswith("modes-")
    assert {"mla_ref", "torch", "python"} <= set(found["versions"])


@pytest.mark.parametrize("name", ROWS)
def test_there_are_thousands_of_rows_over_all_axes(name):
    found = read(name)
    assert sum(f["rows"] for f in found["findings"]) == found["rows"] >= 2000
    axes = [(a.dtype, a.cache, a.sparse, a.shards) for a in full_axes()]
    assert axes == [
        tuple(f["configuration"][key] for key in ("dtype", "cache", "sparse", "shards"))
        for f in found["findings"]
    ]


@pytest.mark.parametrize("name", ROWS)
def test_the_verdicts_follow_from_the_rows(name):
    for finding in read(name)["findings"]:
        pairs = {f"{p['reference']} || {p['tested']}": p for p in finding["pairs"]}
        assert list(pairs) == list(PAIRS)
        for pair in pairs.values():
            assert len(pair["kl_of_rows"]) == len(finding["places"]) == finding["rows"]
            assert not pair["not_finite"] and min(pair["kl_of_rows"]) >= 0
            # A row's KL is kept to 4 digits.
            assert isclose(mean(pair), pair["kl"]["mean"], rel_tol=1e-3)
        null, positive = mean(pairs["decode || null"]), mean(pairs["decode || positive"])
        assert finding["verdict"]["status"] == "holds"
        assert mean(pairs["extend || decode"]) <= 1.01 * FACTOR * null
        assert positive >= SENSITIVITY * null
        assert all(change["tie"] for change in finding["verdict"]["top1_changes"])


@pytest.mark.parametrize("name", ["modes", "modes-triton", "modes-cupy"])
def test_the_verdict_on_ranks_follows_from_their_texts(name):
    found = read(name)["ranks"]
    departures = []
    for one in found["departures"]:
        places = (one[key] for key in ("place", "plain_id", "other_id", "top2_gap", "gap"))
        departures.append(
            Departure(one["way"], one["prompt"], Difference(*places), noise=one["noise"])
        )
    again = RanksFinding(
        one_process=Texts.from_json(found["one_process"]),
        worlds={int(world): Texts.from_json(texts) for world, texts in found["worlds"].items()},
        at_odds=tuple(found["ranks_at_odds"]),
        departures=tuple(departures),
    )
    assert (again.status, again.headline) == (found["status"], found["headline"])


def test_modes_and_ranks_are_all_there():
    found = read("modes")
    assert [mode["name"] for mode in found["modes"]["modes"]] == ["auto", "0", "1"]
    assert set(found["ranks"]["worlds"]) == {"1", "2", "4", "8"}


def test_every_recipe_is_there():
    assert [row["name"] for row in read("recipe")["recipes"]] == [r.name for r in RECIPES]

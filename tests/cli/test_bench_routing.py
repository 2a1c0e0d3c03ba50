"""`mla-ref bench routing`: what it prints, its JSON, and a wrong result."""

import json
from functools import partial

import pytest
import torch
from tests.cli.verbs import run_verb, words

from mla_ref.bench import routing
from mla_ref.bench.routing_step import RoutedStep
from mla_ref.cli import bench_routing
from mla_ref.cli.bench import bench
from mla_ref.numerics import AttentionResult

pytestmark = pytest.mark.thorough

SMALL = ("routing", "--lengths", "5,20", "--requests", "2", "--heads", "2", "--repeats", "1")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_routing, "TOPK", 70)
    monkeypatch.setattr(bench_routing, "CONTEXT", 80)


run = partial(run_verb, bench)


def test_the_first_line_says_what_was_measured_on_what() -> None:
    result = run(*SMALL, width=400)
    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[0]
    for part in ("2 verifier requests of 4 rows", "heads: 2", "top-k 70", "80 tokens cached"):
        assert part in first
    assert torch.__version__ in first and first.endswith("threads: 1.")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_whole_and_says_what_was_lost(width: int) -> None:
    result = run(*SMALL, width=width)
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    shown = words(result.stdout)
    assert "5 batch-wide extend 13 13 1 70" in shown
    assert "by itself decode 8 16 1 35" in shown and "extend 5 5 1 70" in shown
    assert "20 batch-wide extend 28 28 1 70" in shown
    for chunk in (5, 20):
        told = f"Chunk of {chunk}: the batch-wide rule ran in 1 pair of runs, too few to tell what"
        assert told in shown and "(5 are needed)" in shown
    assert "nothing" not in shown
    assert "the 8 verifier rows are 8 blocks of 70 keys in extend, and 16 of 35 in" in shown
    assert "these times cannot show" in shown and "both ways gave the same rows" in shown


def test_json_is_the_only_thing_on_stdout() -> None:
    read = json.loads(run(*SMALL, "--json").stdout)
    assert [(row["chunk"], row["num_verifiers"]) for row in read["rows"]] == [(5, 2), (20, 2)]
    assert read["rows"][0]["in_words"].startswith("Chunk of 5:")
    assert read["rows"][0]["by_itself"][0]["blocks"] == 16
    assert read["machine"]["device"] == "cpu" and "188 SMs" in read["counted"]


def test_a_wrong_result_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RoutedStep.__call__

    def off(self: RoutedStep) -> AttentionResult:
        result = right(self)
        return result._replace(out=result.out + (self.way.kind == "mixed"))

    monkeypatch.setattr(RoutedStep, "__call__", off)
    result = run(*SMALL)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("mla-ref: error: by itself: no time is reported. The result")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--lengths", "5,x"), "--lengths"),
        (("--lengths", "0"), "--lengths must be numbers of 1 or more"),
        (("--requests", "0"), "num_verifiers must be at least 1"),
        (("--heads", "0"), "heads must be at least 1"),
        (("--repeats", "0"), "repeats must be at least 1"),
        (("--head-dim", "8"), "--head-dim is not for routing"),
        (("--peer-length", "8"), "--peer-length is not for routing"),
        (("--plot", "routing.png"), "--plot is not for routing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    args: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing.MixedBatch, "random", lambda *a, **k: pytest.fail("measured"))
    result = run(*SMALL, *args)
    assert isinstance(result.exception, ValueError), result.output
    assert says in str(result.exception)


@pytest.mark.parametrize("what", ["context", "sparse"])
def test_requests_are_for_routing_alone(what: str) -> None:
    result = run(what, "--requests", "2")
    assert isinstance(result.exception, ValueError)
    assert "--requests is for routing" in str(result.exception)

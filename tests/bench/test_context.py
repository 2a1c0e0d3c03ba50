"""Memory against context length: what each rung holds, and the gate in front of each time."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_ref.attention import online_attention, vectorised_attention
from mla_ref.bench import (
    GateError,
    TensorMemory,
    context,
    growth,
    measure_context,
    plot,
)
from mla_ref.bench.context import ContextRow
from mla_ref.numerics import AttentionResult

pytestmark = pytest.mark.thorough

HEADS, PAGE_SIZE = 2, 16
FAST = {"heads": HEADS, "head_dim": 8, "page_size": PAGE_SIZE, "warmup": 0, "repeats": 1}


@pytest.fixture(scope="module")
def rows() -> list[ContextRow]:
    return list(measure_context([64, 128], **FAST))


def _row(rows: list[ContextRow], name: str, length: int) -> ContextRow:
    return next(row for row in rows if (row.name, row.length) == (name, length))


def test_one_row_for_each_length_and_rung_in_order(rows: list[ContextRow]) -> None:
    found = [(row.length, row.rung, row.name) for row in rows]
    rungs = [(2, "vectorised"), (3, "online"), (4, "paged")]
    assert found == [(n, *rung) for n in (64, 128) for rung in rungs]


@pytest.mark.parametrize("length", [64, 128])
def test_rung_2_holds_the_score_matrix(rows: list[ContextRow], length: int) -> None:
    row = _row(rows, "vectorised", length)
    assert row.largest_tensor.numel == length * length * HEADS
    assert row.peak_bytes > 2 * row.largest_tensor.nbytes  # scores, and scores with the mask


@pytest.mark.parametrize("name", ["online", "paged"])
@pytest.mark.parametrize("length", [64, 128])
def test_rungs_3_and_4_hold_one_tile_of_it(rows: list[ContextRow], name: str, length: int) -> None:
    row = _row(rows, name, length)
    assert row.largest_tensor.numel == length * PAGE_SIZE * HEADS
    assert row.largest_tensor.numel < length * length * HEADS


def test_the_peak_grows_with_n_squared_on_rung_2_and_with_n_above(rows: list[ContextRow]) -> None:
    powers = growth(rows)
    assert powers["vectorised"] > 1.8
    assert powers["online"] == pytest.approx(1.0, abs=0.02)
    assert powers["paged"] == pytest.approx(1.0, abs=0.02)


def test_a_longer_tile_holds_more() -> None:
    (n,) = lengths = [64]
    largest = [
        _row(list(measure_context(lengths, **{**FAST, "page_size": size})), "online", n)
        for size in (16, 32)
    ]
    assert [row.largest_tensor.numel for row in largest] == [n * 16 * HEADS, n * 32 * HEADS]


def test_decode_holds_no_row_of_scores_longer_than_a_tile() -> None:
    """One new token over a long context: rung 2 makes s_kv scores a head, rung 3 a tile of them."""
    q, k, v = torch.randn(1, 4, 8), torch.randn(512, 4, 8), torch.randn(512, 4, 8)
    held = {}
    for name, run in {
        "vectorised": lambda: vectorised_attention(q[None], k[None], v[None], softmax_scale=0.3),
        "online": lambda: online_attention(q, k, v, softmax_scale=0.3, block_size=32),
    }.items():
        with TensorMemory() as memory:
            run()
        held[name] = memory.peak_bytes
    assert held["online"] < held["vectorised"] / 4


def test_counting_twice_gives_the_same_bytes(rows: list[ContextRow]) -> None:
    again = list(measure_context([64, 128], **FAST))
    assert [row.peak_bytes for row in again] == [row.peak_bytes for row in rows]


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_any_length_passes_the_gate(length: int) -> None:
    """The unused tail of the last page holds NaN, so a rung 4 that reads it fails here."""
    rows = list(measure_context([length], **FAST))
    assert [len(row.timing.samples_s) for row in rows] == [1, 1, 1]
    assert all(verdict.passed for row in rows for verdict in row.timing.verdicts)


# ---- the gate


def test_a_rung_that_sees_one_key_too_few_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(q, k, v, *, softmax_scale, block_size):
        lens = torch.arange(len(q)).clamp(min=1)
        return online_attention(
            q, k, v, softmax_scale=softmax_scale, block_size=block_size, visible_lens=lens
        )

    monkeypatch.setattr(context, "online_attention", blind)
    measured = measure_context([32], **FAST)
    assert next(measured).name == "vectorised"
    with pytest.raises(GateError, match=r"rung 3 \(online\), 32 tokens.*before the timed runs"):
        next(measured)


@pytest.mark.parametrize("part", ["out", "lse"])
@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_a_wrong_number_in_any_part_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, part: str, error: float
) -> None:
    def wrong(*args, **kwargs) -> AttentionResult:
        result = vectorised_attention(*args, **kwargs)
        getattr(result, part)[0, -1] += error
        return result

    monkeypatch.setattr(context, "vectorised_attention", wrong)
    with pytest.raises(GateError, match=rf"rung 2 \(vectorised\), 32 tokens.*{part}"):
        next(measure_context([32], **FAST))


def test_a_rung_that_remembers_its_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[AttentionResult] = []

    def remembering(*args, **kwargs) -> AttentionResult:
        kept.append(kept[0] if kept else vectorised_attention(*args, **kwargs))
        return kept[0]

    monkeypatch.setattr(context, "vectorised_attention", remembering)
    with pytest.raises(GateError, match="last timed run"):
        next(measure_context([32], **FAST))


# ---- input, data and figure


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"lengths": []}, ValueError),
        ({"lengths": [64, 0]}, ValueError),
        ({"lengths": [64.0]}, TypeError),
        ({"heads": 0}, ValueError),
        ({"head_dim": -1}, ValueError),
        ({"page_size": 0}, ValueError),
        ({"repeats": 0}, ValueError),
        ({"warmup": -1}, ValueError),
        ({"warmup": 1.5}, TypeError),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    change: dict[str, object], error: type[Exception]
) -> None:
    arguments = {"lengths": [64], **FAST, **change}
    with pytest.raises(error, match=next(iter(change))):
        measure_context(**arguments)  # no row was asked for


def test_growth_is_taken_between_the_two_longest(rows: list[ContextRow]) -> None:
    template = _row(rows, "online", 64)
    peaks = {100: 5, 400: 16 * 7, 200: 2 * 7}
    made = [replace(template, length=n, peak_bytes=peak) for n, peak in peaks.items()]
    assert growth(made) == {"online": pytest.approx(3.0)}
    with pytest.raises(ValueError, match="two context lengths of online"):
        growth(made[:1])


def test_rows_are_strict_json(rows: list[ContextRow]) -> None:
    read = json.loads(json.dumps([row.to_json() for row in rows], allow_nan=False))
    assert [row["peak_bytes"] for row in read] == [row.peak_bytes for row in rows]
    assert read[0]["largest_tensor"]["shape"] == list(rows[0].largest_tensor.shape)
    assert read[0]["timing"]["samples_s"] == list(rows[0].timing.samples_s)


def test_the_figure_shows_both_growths(rows: list[ContextRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "context.svg"
    with pytest.MonkeyPatch.context() as patch:
        import matplotlib

        patch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
        plot(rows, path, title="on this machine")
    drawn = path.read_text()
    for words in ("rung 3, online: grows as n^1.0", "rung 2, vectorised", "128", "on this machine"):
        assert words in drawn


def test_a_figure_needs_two_lengths(rows: list[ContextRow], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two context lengths"):
        plot([row for row in rows if row.length == 64], tmp_path / "context.png")


def test_without_matplotlib_the_error_says_what_to_install(
    rows: list[ContextRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"matplotlib.*mla-ref\[lessons\]"):
        plot(rows, tmp_path / "context.png")

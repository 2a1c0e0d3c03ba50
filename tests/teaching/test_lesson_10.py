"""What lesson 10 says of sparse attention, and the bugs that it plants."""

import pytest
import torch

from mla_ref.attention import plan_splits, sparse_decode, sparse_extend
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted

BEFORE_THE_CACHE = planted.sparse_extend_reading_before_the_cache
SINK_A_SPLIT = planted.sparse_decode_with_a_sink_a_split
SCALE = {"softmax_scale": 0.3, "kv_lora_rank": 8}


def problem(rows=4, slots=24):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 3, 12, generator=generator)
    cache = torch.randn(slots // 4, 4, 12, generator=generator)
    indices = torch.stack([torch.randperm(slots, generator=generator) for _ in range(rows)])
    return q, cache, indices[:, :10].int()


def test_the_error_is_the_missing_weight_times_the_difference():
    """Part 4: o - o_S = eps (o_R - o_S)."""
    q, cache, _ = problem()
    every = torch.arange(24).expand(4, -1).int()
    dense, kept, rest = (
        sparse_extend(q, cache, part, **SCALE) for part in (every, every[:, :10], every[:, 10:])
    )
    missing = (1 - torch.exp(kept.lse - dense.lse))[..., None]
    expected = missing * (rest.out - kept.out)
    assert compare(dense.out - kept.out, expected).agrees(max_abs=1e-5)


@pytest.mark.parametrize("fill", [0.0, 1e30])
def test_B065_what_stands_before_the_cache_hides_while_it_is_finite(fill):
    q, cache, indices = problem()
    indices = torch.where(indices == 23, 0, indices)
    indices[:3, 4] = -1
    cache[-1, -1] = fill
    wrong = BEFORE_THE_CACHE(q, cache, indices, **SCALE)
    right = sparse_extend(q, cache, indices, **SCALE)
    assert compare(wrong.out, right.out).agrees(max_abs=1e-5)
    assert compare(wrong.lse, right.lse).agrees(max_abs=1e-5)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_B065_what_stands_before_the_cache_spoils_the_rows_with_none(fill):
    q, cache, indices = problem()
    indices = torch.where(indices == 23, 0, indices)
    indices[:3, 4] = -1
    cache[-1, -1] = fill
    wrong = BEFORE_THE_CACHE(q, cache, indices, **SCALE).out
    assert wrong.isnan().flatten(1).any(dim=1).tolist() == [True, True, True, False]
    assert sparse_extend(q, cache, indices, **SCALE).out.isfinite().all()


def test_B075_a_sink_a_split_is_right_with_one_split_and_shrinks_with_more():
    q, cache, indices = problem()
    sink = sparse_extend(q, cache, indices, **SCALE).lse.mean(dim=0)
    lengths = []
    for num_splits in (1, 2, 5, 10):
        wrong, right = (
            function(q, cache, indices, **SCALE, num_splits=num_splits, sink=sink)
            for function in (SINK_A_SPLIT, sparse_decode)
        )
        assert compare(wrong.lse, right.lse).agrees(max_abs=1e-5)
        lengths.append(float(wrong.out.norm() / right.out.norm()))
    assert lengths[0] == pytest.approx(1.0, abs=1e-6)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.8


def test_the_numbers_of_splits_that_the_lesson_names():
    found = [plan_splits(rows, heads=128, k=2048, multiprocessors=188) for rows in (1, 4, 16, 64)]
    assert found == [24, 6, 2, 1]


@pytest.mark.thorough
def test_sparse_cliff_draws_the_errors_and_the_dense_line():
    pytest.importorskip("matplotlib")
    rows = [
        {"text": "t", "choice": "dense", "topk": None, "perplexity": 30.0},
        {"text": "t", "choice": "indexer", "topk": 8, "perplexity": 33.0},
    ]
    left, right = figures.sparse_cliff({2: torch.tensor([0.0, 0.0, 0.5])}, rows, "t").axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([1e-8, 1e-8, 0.5])
    drawn = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert drawn["dense"] == [30.0, 30.0]
    assert drawn["indexer"] == [33.0]


@pytest.mark.thorough
def test_list_splits_counts_the_empty_ones():
    pytest.importorskip("matplotlib")
    entries = torch.tensor([7, 3, -1, 12, -1])
    axes = figures.list_splits(entries, [1, 2, 5, 9]).axes[0]
    shown = [t.get_text() for t in axes.texts]
    # In fives, the two -1 are splits of their own; of nine splits, four are beyond the end, too.
    assert [text for text in shown if "empty" in text] == [
        "none empty", "none empty", "2 empty", "6 empty",
    ]  # fmt: skip
    assert len(axes.lines) == 1 + 2 + 5 + 5  # a line below each split that has entries


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="indices and splits must not be empty"):
        figures.list_splits(torch.tensor([1]), [])
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        figures.list_splits(torch.tensor([1]), [0])
    with pytest.raises(ValueError, match=r"text must be one of \[\], got t"):
        figures.sparse_cliff({}, [], "t")

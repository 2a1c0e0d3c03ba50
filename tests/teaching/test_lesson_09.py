"""What lesson 09 says of index scores and top-k, and the bugs that it plants."""

import math

import pytest
import torch

from mla_ref.cache import quantise_index_keys
from mla_ref.indexer import index_scores, select_topk
from mla_ref.numerics import compare, hadamard
from mla_ref.numerics.float8 import from_e4m3
from mla_ref.teaching import figures, planted

WITHOUT_RELU = planted.index_scores_without_relu
UNCHECKED = planted.select_topk_unchecked
NAN = math.nan


def drawn(rows=50, heads=4, s_kv=60):
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, heads, 128), (s_kv, 128), (rows, heads)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def test_B026_without_the_relu_the_other_key_wins():
    q, k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1.0, -10.0], [0.5, 0.2]])
    weights = torch.tensor([[1.0, 0.5]])
    assert int(index_scores(q, k, weights).argmax()) == 0
    assert int(WITHOUT_RELU(q, k, weights).argmax()) == 1


def test_B026_the_order_of_random_scores_depends_on_the_relu():
    q, k, weights = drawn()
    lens = torch.full((50,), 60)
    lists = [
        select_topk(function(q, k, weights), lens, 8).sort(dim=1).values
        for function in (index_scores, WITHOUT_RELU)
    ]
    assert int((lists[0] != lists[1]).any(dim=1).sum()) >= 45


def test_B026_where_no_product_is_negative_nothing_shows():
    q, k, weights = drawn()
    right = index_scores(q.abs(), k.abs(), weights)
    assert compare(WITHOUT_RELU(q.abs(), k.abs(), weights), right).agrees(rel_l2=1e-5)


def test_B026_without_the_relu_all_heads_are_one():
    """Part 8 a."""
    q, k, weights = drawn()
    one = torch.einsum("rh,rhd->rd", weights, q) @ k.T
    assert compare(WITHOUT_RELU(q, k, weights), one).agrees(rel_l2=1e-5)


def test_B034_unchecked_nan_comes_first():
    scores, lens = torch.tensor([[NAN, 1.0, NAN, 2.0]]), torch.tensor([4])
    assert set(UNCHECKED(scores, lens, 3)[0, :2].tolist()) == {0, 2}
    assert select_topk(scores, lens, 3).tolist() == [[3, 1, -1]]


def test_B034_unchecked_a_short_row_is_given_keys_of_the_future():
    scores, lens = torch.tensor([[5.0, 7.0, 8.0, 9.0]]), torch.tensor([2])
    wrong = UNCHECKED(scores, lens, 3)[0].tolist()
    assert wrong[:2] == [1, 0]
    assert wrong[2] in (2, 3)


def test_B034_unchecked_long_rows_of_different_scores_are_right():
    scores, lens = torch.randn(5, 40), torch.arange(36, 41)
    assert torch.equal(UNCHECKED(scores, lens, 8), select_topk(scores, lens, 8))


@pytest.mark.parametrize(("constant", "helps"), [(False, True), (True, False)])
def test_a_hadamard_matrix_helps_with_one_kind_of_outlier_only(constant, helps):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(64, 4, 128, generator=generator)
    k = torch.randn(400, 128, generator=generator)
    weights = torch.rand(64, 4, generator=generator)
    for side in (q, k):
        side[..., 5] = 30 if constant else 30 * side[..., 5]
    exact, lens = index_scores(q, k, weights), torch.full((64,), 400)
    best = select_topk(exact, lens, 32)
    recall = []
    for turn in (torch.eye(128), hadamard(128).float()):
        turned = [side @ turn for side in (q, k)]
        assert compare(index_scores(*turned, weights), exact).agrees(rel_l2=1e-5)
        rounded = [
            from_e4m3(data) * scale[..., None]
            for data, scale in (quantise_index_keys(side, "pow2-floor") for side in turned)
        ]
        found = select_topk(index_scores(*rounded, weights), lens, 32)
        recall.append(float((found[:, :, None] == best[:, None]).any(dim=1).float().mean()))
    assert (recall[1] > recall[0] + 0.02) if helps else (recall[1] < recall[0] - 0.1)


@pytest.mark.thorough
def test_score_maps_shows_hits_misses_and_needless_keys():
    pytest.importorskip("matplotlib")
    chosen = torch.zeros(2, 3, 3, dtype=torch.bool)
    chosen[0, 2, :2] = True  # the guess takes keys 0 and 1
    chosen[1, 2, 1:] = True  # the truth takes keys 1 and 2
    figure = figures.score_maps(torch.rand(3, 3), torch.rand(3, 3), chosen)
    shown = figure.axes[2].images[0].get_array()
    assert shown[2].tolist() == [1.0, 3.0, 2.0]
    assert shown.mask[0].tolist() == [False, True, True]


ROWS = [{"text": "t", "choice": "indexer", "topk": 8, "recall": 0.5, "mass": 0.75}]


@pytest.mark.thorough
def test_selection_quality_draws_what_was_measured():
    pytest.importorskip("matplotlib")
    figure = figures.selection_quality(ROWS, "t", {"step": [0, 9], "loss": [3.0, 0.1]})
    lines = [axes.lines for axes in figure.axes]
    (recall,) = (line for line in lines[0] if line.get_label() == "indexer")
    (mass,) = (line for line in lines[1] if line.get_label() == "indexer")
    assert (list(recall.get_ydata()), list(mass.get_ydata())) == ([0.5], [0.75])
    assert list(lines[2][0].get_ydata()) == [3.0, 0.1]


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    one, two = torch.rand(3, 3), torch.zeros(2, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"square and of one size, got \[3, 4\]"):
        figures.score_maps(torch.rand(3, 4), one, two)
    with pytest.raises(ValueError, match=r"text must be one of \['t'\], got u"):
        figures.selection_quality(ROWS, "u", {"step": [0], "loss": [1.0]})
    with pytest.raises(ValueError, match="training must hold one loss a step, 2, got 1"):
        figures.selection_quality(ROWS, "t", {"step": [0, 1], "loss": [1.0]})

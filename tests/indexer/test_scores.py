"""Index scores against the formula, and the two mistakes that ports make."""

import pytest
import torch
from tests.support import raw

from mla_ref.indexer import index_scores, select_topk


def test_scores_are_the_formula() -> None:
    q, k, w = torch.randn(3, 4, 8).double(), torch.randn(5, 8).double(), torch.randn(3, 4).double()
    scores = index_scores(q, k, w)
    for t in range(3):
        for s in range(5):
            expected = sum(float(w[t, j]) * max(float(q[t, j] @ k[s]), 0.0) for j in range(4))
            assert float(scores[t, s]) == pytest.approx(expected, abs=1e-12)


def test_B026_relu_stands_before_the_weighted_sum() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    k = torch.tensor([[1.0, -10.0], [0.5, 0.2]])
    scores = index_scores(q, k, torch.tensor([[1.0, 0.5]]))
    assert scores.tolist() == [[1.0, pytest.approx(0.6)]]
    assert select_topk(scores, torch.tensor([2]), 1).tolist() == [[0]]


def test_B030_a_positive_scale_does_not_change_the_selection() -> None:
    for heads in (32, 64):
        q, k, w = torch.randn(4, heads, 128), torch.randn(300, 128), torch.randn(4, heads)
        scale = heads**-0.5 * 128**-0.5
        lens = torch.tensor([300] * 4)
        plain = select_topk(index_scores(q, k, w), lens, 50).sort(dim=1).values
        scaled = select_topk(index_scores(q, k, w * scale), lens, 50).sort(dim=1).values
        assert torch.equal(plain, scaled)


def test_B029_weights_in_float32_keep_close_keys_apart() -> None:
    q, k = torch.eye(2)[None], torch.eye(2)  # each head knows a key, so a score is a weight
    w = torch.tensor([[1.0, 1.0001]])
    for weights, best in ((w, 1), (w.bfloat16(), 0)):
        scores = index_scores(q, k, weights)
        assert select_topk(scores, torch.tensor([2]), 1).tolist() == [[best]]


def test_input_that_does_not_fit_is_named() -> None:
    q, k, w = torch.zeros(1, 2, 4), torch.zeros(3, 4), torch.zeros(1, 2)
    for name, args in (("k", (q, k[:, :3], w)), ("weights", (q, k, w[:, :1])), ("q", (q[0], k, w))):
        with pytest.raises(ValueError, match=name):
            raw(index_scores)(*args)

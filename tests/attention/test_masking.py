"""Who sees what, and sums that a masked value cannot touch."""

import math

import pytest
import torch

from mla_ref.attention.masking import causal_lens, grouped, visible_mask, weighted_values


@pytest.mark.parametrize(
    ("s_q", "s_kv", "lens"),
    [
        (1, 1, [1]),
        (1, 9, [9]),
        (2, 5, [4, 5]),
        (5, 2, [0, 0, 0, 1, 2]),
        (3, 3, [1, 2, 3]),
        (3, 0, [0, 0, 0]),
        (0, 4, []),
    ],
)
def test_B077_causal_lens(s_q: int, s_kv: int, lens: list[int]) -> None:
    assert causal_lens(s_q, s_kv).tolist() == lens


def test_visible_mask_of_a_tile() -> None:
    """Keys 4 to 6 for rows that see 0, 4, 5, 7 and 9 keys."""
    mask = visible_mask(torch.tensor([0, 4, 5, 7, 9]), 4, 3)
    assert mask.tolist() == [
        [False, False, False],
        [False, False, False],
        [True, False, False],
        [True, True, True],
        [True, True, True],
    ]


def test_B084_neighbouring_heads_share_a_kv_head() -> None:
    """48 heads over 2: head 23 reads KV head 0, head 24 reads KV head 1."""
    heads = torch.arange(48.0)[None, :, None]
    groups = grouped(heads, 2)
    assert groups.shape == (1, 2, 24, 1)
    assert groups[0, 0, :, 0].tolist() == list(range(24))
    assert groups[0, 1, :, 0].tolist() == list(range(24, 48))


def one_sum(weights: list[float], values: list[float], visible: list[bool]) -> float:
    return float(
        weighted_values(
            torch.tensor(weights).reshape(1, 1, 1, -1),
            torch.tensor(values).reshape(-1, 1, 1),
            torch.tensor([visible]),
        )
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_masked_value_is_never_multiplied(bad: float) -> None:
    assert one_sum([0.5, 0.0], [4.0, bad], [True, False]) == 2.0
    assert one_sum([0.0, 0.5], [bad, 4.0], [False, True]) == 2.0


def test_a_value_that_is_seen_counts_whatever_it_is() -> None:
    assert one_sum([0.5, 0.25], [4.0, math.inf], [True, True]) == math.inf
    assert math.isnan(one_sum([0.5, 0.25], [4.0, math.nan], [True, True]))
    # A weight of 0 on a key that is seen: 0 * inf is NaN, as in the plain sum of rung 1.
    assert math.isnan(one_sum([0.5, 0.0], [4.0, math.inf], [True, True]))
    assert math.isnan(one_sum([0.5, 0.5], [math.inf, -math.inf], [True, True]))


def test_a_bad_number_in_one_head_leaves_the_others_exact() -> None:
    weights = torch.rand(2, 3, 2, 4, dtype=torch.float64)
    values = torch.randn(4, 3, 5, dtype=torch.float64)
    visible = torch.ones(2, 4, dtype=torch.bool)
    clean = weighted_values(weights, values, visible)
    values[1, 0, 2] = math.inf
    dirty = weighted_values(weights, values, visible)
    assert (dirty[:, 0, :, 2] == math.inf).all()
    dirty[:, 0, :, 2] = clean[:, 0, :, 2]
    assert torch.allclose(dirty, clean, rtol=0, atol=1e-15)

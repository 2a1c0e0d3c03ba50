"""Planted bugs: each shows its symptom, hides where the lesson says it hides, and is not ours."""

import importlib
import math

import pytest
import torch

from mla_ref.attention import causal_attention, online_attention, vectorised_attention
from mla_ref.numerics import compare, merge
from mla_ref.teaching import planted

SCALE = 8**-0.5


def qkv(s_q, s_kv):
    return (
        torch.randn(s_q, 4, 8), torch.randn(s_kv, 2, 8), torch.randn(s_kv, 2, 8)
    )  # fmt: skip


def test_B077_top_left_mask_returns_the_first_value_in_a_decode_step():
    q, k, v = qkv(1, 7)
    wrong = planted.top_left_causal_attention(q, k, v, softmax_scale=SCALE)
    assert torch.equal(wrong.out[0], v[0].repeat_interleave(2, dim=0))
    right = causal_attention(q, k, v, softmax_scale=SCALE)
    assert not compare(right.out, wrong.out).agrees(rel_l2=0.1)


def test_B077_top_left_mask_hides_in_a_prefill():
    q, k, v = qkv(7, 7)
    wrong = planted.top_left_causal_attention(q, k, v, softmax_scale=SCALE)
    assert torch.equal(wrong.out, causal_attention(q, k, v, softmax_scale=SCALE).out)


def test_B077_the_library_gives_a_decode_step_what_the_prefill_gave_its_row():
    q, k, v = qkv(7, 7)
    prefill = causal_attention(q, k, v, softmax_scale=SCALE)
    for first in range(7):
        step = causal_attention(q[first:], k, v, softmax_scale=SCALE)
        assert torch.equal(step.out, prefill.out[first:])


def test_B064_a_finite_mask_averages_hidden_values():
    q, k, v = qkv(3, 2)
    wrong = planted.finite_mask_attention(q, k, v, softmax_scale=SCALE)
    mean = v.mean(dim=0).repeat_interleave(2, dim=0)
    assert compare(wrong.out[0], mean).agrees(max_abs=1e-6)
    assert compare(wrong.lse[0], torch.full((4,), -1e6)).agrees(max_abs=1.0)
    for attention in (causal_attention, online_attention):
        right = attention(q, k, v, softmax_scale=SCALE)
        assert torch.equal(right.out[0], torch.zeros(4, 8))
        assert torch.equal(right.lse[0], torch.full((4,), -torch.inf))
        assert compare(wrong.out[1:], right.out[1:]).agrees(max_abs=1e-5)


def parts(order):
    q, k, v = qkv(6, 6)
    results = []
    for first in (0, 2, 4):
        lens = (torch.arange(1, 7) - first).clamp(0, 2)
        keys = slice(first, first + 2)
        results.append(
            causal_attention(q, k[keys], v[keys], softmax_scale=SCALE, visible_lens=lens)
        )
    whole = causal_attention(q, k, v, softmax_scale=SCALE)
    return [results[i] for i in order], whole


@pytest.mark.parametrize(
    "order, nan_rows", [((0, 1, 2), 0), ((1, 0, 2), 0), ((1, 2, 0), 2), ((2, 1, 0), 2)]
)
def test_B066_an_unguarded_merge_is_nan_only_where_two_empty_parts_meet(order, nan_rows):
    (a, b, c), whole = parts(order)
    unguarded = planted.merge_without_guard
    wrong = unguarded(*unguarded(*a, *b), *c)
    assert int(wrong.out.isnan().flatten(1).any(dim=1).sum()) == nan_rows
    right = merge(*merge(*a, *b), *c)
    assert compare(right.out, whole.out).agrees(max_abs=1e-5)
    assert compare(right.lse, whole.lse).agrees(max_abs=1e-5)
    seen = ~wrong.out.isnan().flatten(1).any(dim=1)
    assert compare(wrong.out[seen], whole.out[seen]).agrees(max_abs=1e-5)


def test_B110_natural_lse_read_as_base_2():
    light = torch.tensor([[0.0]]), torch.tensor([2.0]).log()
    heavy = torch.tensor([[10.0]]), torch.tensor([8.0]).log()
    assert planted.merge_in_base_2(*light, *heavy).out.item() == pytest.approx(7.2330317)
    assert merge(*light, *heavy).out.item() == pytest.approx(8.0)
    # Equal weights and empty parts hide it.
    empty = torch.zeros(1, 1), torch.tensor([-math.inf])
    assert planted.merge_in_base_2(*heavy, *empty).out.item() == pytest.approx(10.0)


def test_B063_tiles_from_the_back_without_a_guard():
    q, k, v = qkv(12, 12)
    wrong = planted.backward_tiles_without_guard(q, k, v, softmax_scale=SCALE, block_size=4)
    right = online_attention(q, k, v, softmax_scale=SCALE, block_size=4)
    nan_rows = wrong.out.isnan().flatten(1).any(dim=1)
    assert nan_rows.tolist() == [True] * 8 + [False] * 4
    assert compare(wrong.out[8:], right.out[8:]).agrees(max_abs=1e-5)
    rung_2 = vectorised_attention(q[None], k[None], v[None], softmax_scale=SCALE)
    assert compare(right.out, rung_2.out[0]).agrees(max_abs=1e-5)


@pytest.mark.parametrize("bug", planted.PLANTED, ids=lambda bug: bug.function.__name__)
def test_the_table_names_what_exists(bug):
    module, name = bug.instead_of.rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))
    assert bug.function.__name__ in planted.__all__
    assert bug.function.__doc__.startswith("BUG: ")
    assert bug.cure
    for report in bug.reports:
        repository, number = report.split("#")
        assert repository.count("/") == 1
        assert number.isdigit()

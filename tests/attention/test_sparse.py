"""Rungs 9 and 10: sparse extend and decode against the oracle, dense attention and each other."""

import math

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.attention import latent_attention, plan_splits, sparse_decode, sparse_extend
from mla_ref.attention.selected import validate_inputs
from mla_ref.batching import Step
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import apply_sink, compare, oracle_attention

D_C, D_ROW, PAGES, PAGE = 16, 24, 4, 16
CAPACITY = PAGES * PAGE
SMALL = {"softmax_scale": 0.3, "kv_lora_rank": D_C}
FORMS = [
    pytest.param(sparse_extend, id="extend"),
    *(
        pytest.param(lambda *a, n=n, **k: sparse_decode(*a, num_splits=n, **k), id=f"decode-{n}")
        for n in (1, 3, 16, 64)
    ),
]


def problem(rows: int = 5, heads: int = 3, k: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache, and lists of different slots with -1 strewn in; float64."""
    q = torch.randn(rows, heads, D_ROW, dtype=torch.float64)
    cache = torch.randn(PAGES, PAGE, D_ROW, dtype=torch.float64)
    lists = torch.stack([torch.randperm(CAPACITY)[:k] for _ in range(rows)])
    lists[torch.rand(rows, k) < 0.2] = -1
    return q, cache, lists


def oracle(q: Tensor, cache: Tensor, lists: Tensor, counts: Tensor | None = None):
    """Each row by itself over the slots of its list, one after the other, repeats included."""
    flat = cache.flatten(0, 1)
    outs, lses = [], []
    for row in range(q.shape[0]):
        entries = lists[row].tolist()[: None if counts is None else int(counts[row])]
        keys = flat[[s for s in entries if 0 <= s < len(flat)]][:, None]
        visible = torch.ones(1, len(keys), dtype=torch.bool)
        result = oracle_attention(
            q[row : row + 1], keys, keys[..., :D_C], visible, softmax_scale=0.3
        )
        outs.append(result.out)
        lses.append(result.lse)
    return torch.cat(outs), torch.cat(lses)


def agree(result, expected, limit: float = 1e-12) -> None:
    for actual, wanted in zip(result, expected, strict=True):
        found = compare(actual, wanted)
        assert found.agrees(rel_l2=limit), found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [1, 3, 8, 17])
def test_equals_the_oracle(form, heads: int) -> None:
    q, cache, lists = problem(heads=heads)
    agree(form(q, cache, lists, **SMALL), oracle(q, cache, lists))


@pytest.mark.parametrize("form", FORMS)
def test_counts_cut_a_list_and_what_lies_behind_is_never_read(form) -> None:
    q, cache, lists = problem()
    counts = torch.tensor([0, 1, 7, 19, 20])
    expected = oracle(q, cache, lists, counts)
    behind = torch.arange(20) >= counts[:, None]
    agree(form(q, cache, lists.masked_fill(behind, 2**40), counts, **SMALL), expected)
    agree(form(q, cache, lists.int(), counts.int(), **SMALL), expected)


@pytest.mark.parametrize("form", FORMS)
def test_all_slots_is_dense_attention(form) -> None:
    """Rung 6: one request whose pages lie in order, each row with its causal list."""
    n = 50
    q, cache, _ = problem(rows=n)
    step = Step.one_request(0, n, PAGE)
    dense = latent_attention(
        q,
        cache,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        **SMALL,
    )
    lists = torch.arange(n).expand(n, n).tril() - torch.ones(n, n, dtype=torch.int64).triu(1)
    agree(form(q, cache, lists, **SMALL), dense)


@pytest.mark.parametrize("form", FORMS)
def test_B147_gathering_equals_masking(form) -> None:
    q, cache, lists = problem()
    rows = cache.flatten(0, 1)[:, None]
    visible = torch.zeros(5, CAPACITY + 1, dtype=torch.bool)
    visible[torch.arange(5)[:, None], torch.where(lists < 0, CAPACITY, lists)] = True
    masked = oracle_attention(q, rows, rows[..., :D_C], visible[:, :CAPACITY], softmax_scale=0.3)
    agree(form(q, cache, lists, **SMALL), masked)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lead", [16, 32])
def test_B063_a_list_that_begins_with_none(form, lead: int) -> None:
    q, cache, _ = problem(rows=1)
    for tail in ([3, 5], [3], [-1, 3, -1, 5]):
        lists = torch.tensor([[-1] * lead + tail])
        agree(form(q, cache, lists, **SMALL), oracle(q, cache, lists))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_B064_a_row_without_a_valid_entry(form, dtype: torch.dtype) -> None:
    q, cache, lists = problem()
    lists[2] = -1
    out, lse = form(q.to(dtype), cache.to(dtype), lists, **SMALL)
    assert out[2].eq(0).all()
    assert not out[2].signbit().any()
    assert lse[2].eq(-math.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_B065_what_minus_one_might_alias_is_never_read(form, poison: float) -> None:
    q, cache, lists = problem()
    lists[(lists == 0) | (lists == CAPACITY - 1)] = -1
    expected = oracle(q, cache, lists)
    cache[0, 0], cache[-1, -1] = poison, poison
    unused = torch.ones(CAPACITY, dtype=torch.bool)
    unused[lists[lists >= 0]] = False
    cache.view(CAPACITY, D_ROW)[unused] = poison
    agree(form(q, cache, lists, **SMALL), expected)


@pytest.mark.parametrize("form", FORMS)
def test_B040_a_slot_outside_the_cache_is_none(form) -> None:
    q, cache, lists = problem()
    wrong = lists.clone()
    for value in (CAPACITY, 2**31 - 1, -(2**31), -123456):
        wrong[lists < 0] = value
        agree(form(q, cache, wrong, **SMALL), oracle(q, cache, lists))
        with pytest.raises(ValueError, match=rf"indices holds slot {value}"):
            validate_inputs(cache, wrong)
    validate_inputs(cache, lists)


@pytest.mark.parametrize("form", FORMS)
def test_B140_a_slot_listed_twice_counts_twice(form) -> None:
    cache = torch.zeros(1, 2, D_ROW, dtype=torch.float64)
    cache[0, 1, 0], cache[0, 1, -1] = 3.0, math.log(2.0)
    q = torch.zeros(1, 1, D_ROW, dtype=torch.float64)
    q[..., -1] = 1.0
    for lists, expected in (([0, 1], 2.0), ([0, 1, 1], 2.4)):
        out, _ = form(q, cache, torch.tensor([lists]), softmax_scale=1.0, kv_lora_rank=D_C)
        assert float(out[0, 0, 0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_B075_the_sink_takes_weight_once_and_stays_out_of_the_lse(form) -> None:
    q, cache, lists = problem(heads=5)
    lists[1] = -1
    plain = form(q, cache, lists, **SMALL)
    sink = torch.tensor([1e5, -1e5, 0.3, -math.inf, 2.0])
    out, lse = form(q, cache, lists, sink=sink, **SMALL)
    assert torch.equal(lse, plain.lse)
    agree((out,), (apply_sink(plain, sink),))
    assert out[:, 0].eq(0).all()
    assert torch.equal(out[:, 1], plain.out[:, 1])
    assert out[1].eq(0).all()


@pytest.mark.parametrize("form", FORMS)
def test_B144_fp8_rows_equal_their_dequantised_numbers(form) -> None:
    rows = torch.randn(CAPACITY, 576)
    packed = pack_fp8_rows(rows).view(PAGES, PAGE, 656)
    numbers = unpack_fp8_rows(packed)
    q, lists = (
        torch.randn(4, 8, 576),
        torch.stack([torch.randperm(CAPACITY)[:40] for _ in range(4)]),
    )
    for q_dtype in (torch.float32, torch.bfloat16):
        got = form(q.to(q_dtype), packed, lists, softmax_scale=0.05)
        wanted = form(q.to(q_dtype), numbers, lists, softmax_scale=0.05)
        assert torch.equal(got.out, wanted.out)
        assert torch.equal(got.lse, wanted.lse)


def test_B072_B149_any_number_of_splits() -> None:
    q, cache, lists = problem(k=5)
    lists[3] = -1
    whole = sparse_extend(q, cache, lists, **SMALL)
    for splits in (1, 2, 3, 5, 6, 16, 64):
        agree(sparse_decode(q, cache, lists, num_splits=splits, **SMALL), whole)


def test_B074_the_same_split_count_gives_the_same_bits() -> None:
    q, cache, lists = (x.float() if x.is_floating_point() else x for x in problem())
    for splits in (1, 2, 3, 8, 16, 32):
        first = sparse_decode(q, cache, lists, num_splits=splits, **SMALL)
        for _ in range(10):
            again = sparse_decode(q, cache, lists, num_splits=splits, **SMALL)
            assert torch.equal(again.out, first.out)
            assert torch.equal(again.lse, first.lse)


@pytest.mark.parametrize("form", FORMS)
def test_B019_pages_with_other_layers_between_them(form) -> None:
    q, cache, lists = problem()
    layers = torch.full((PAGES, 3, PAGE, D_ROW), math.nan, dtype=torch.float64)
    layers[:, 1] = cache
    agree(form(q, layers[:, 1], lists, **SMALL), oracle(q, cache, lists))


@pytest.mark.parametrize("form", FORMS)
def test_B088_strided_queries_and_lists(form) -> None:
    q, cache, lists = problem(rows=6, heads=6)
    expected = oracle(q.transpose(0, 1), cache, lists.T.contiguous().T)
    agree(form(q.transpose(0, 1), cache, lists.T.contiguous().T, **SMALL), expected)


@pytest.mark.parametrize("form", FORMS)
def test_B044_a_list_of_any_width(form) -> None:
    for k in (0, 1, 37):
        q, cache, lists = problem(k=k)
        agree(form(q, cache, lists, **SMALL), oracle(q, cache, lists))


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_and_no_pages(form) -> None:
    q, cache, lists = problem()
    assert form(q[:0], cache, lists[:0], **SMALL).out.shape == (0, 3, D_C)
    out, lse = form(q, cache[:0], lists, **SMALL)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_rows_at_once_changes_nothing() -> None:
    q, cache, lists = problem()
    whole = sparse_extend(q, cache, lists, **SMALL)
    for rows in (1, 2, 3, 100):
        agree(sparse_extend(q, cache, lists, rows_at_once=rows, **SMALL), whole)


def test_splits_fill_the_multiprocessors_and_no_more() -> None:
    assert plan_splits(rows=4, heads=8, k=2048, multiprocessors=188) == 32
    assert plan_splits(rows=4, heads=64, k=2048, multiprocessors=188) == 12
    assert plan_splits(rows=256, heads=8, k=2048, multiprocessors=188) == 1
    assert plan_splits(rows=1, heads=1, k=64, multiprocessors=188) == 1
    assert plan_splits(rows=0, heads=8, k=0, multiprocessors=1) == 1


@pytest.mark.parametrize("function", [sparse_extend, sparse_decode])
def test_input_that_does_not_fit_is_named(function) -> None:
    q, cache, lists = problem()
    call = raw(function)
    for name, args, kwargs in (
        ("q", (q[0], cache, lists), {}),
        ("q", (q.long(), cache, lists), {}),
        ("indices", (q, cache, lists[:4]), {}),
        ("indices", (q, cache, lists.double()), {}),
        ("counts", (q, cache, lists, torch.ones(4, dtype=torch.int64)), {}),
        ("counts", (q, cache, lists, torch.ones(5)), {}),
        ("kv_cache", (q, cache[0], lists), {}),
        ("kv_cache", (q, cache[..., :20], lists), {}),
        ("kv_cache", (q, torch.zeros(1, 2, 600, dtype=torch.uint8), lists), {}),
        ("q must .* 16 bits", (q.to(torch.float8_e4m3fn), cache, lists), {}),
        ("kv_cache must .* 16 bits", (q, cache.to(torch.float8_e4m3fn), lists), {}),
        ("kv_cache must .* 16 bits", (q, cache.to(torch.float8_e5m2), lists), {}),
        ("softmax_scale", (q, cache, lists), {"softmax_scale": math.nan}),
        ("softmax_scale", (q, cache, lists), {"softmax_scale": 0.0}),
        ("kv_lora_rank", (q, cache, lists), {"kv_lora_rank": 25}),
        ("kv_lora_rank", (q, cache, lists), {"kv_lora_rank": 0}),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call(*args, **(SMALL | kwargs))
    with pytest.raises(ValueError, match="num_splits"):
        raw(sparse_decode)(q, cache, lists, num_splits=0, **SMALL)
    with pytest.raises(ValueError, match="counts"):
        validate_inputs(cache, lists, torch.tensor([0, 1, 2, 3, 21]))

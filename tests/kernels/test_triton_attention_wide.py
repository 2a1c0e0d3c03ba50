"""The kernel for more than 16 heads, in the interpreter: what a warp a group must not change."""

import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.test_triton_attention import (
    SCALE,
    assert_close,
    oracle,
    plan_for,
    problem,
    rescaled,
)
from tests.support import assert_same_bits

from mla_kernels.triton_kernels.attention_wide import sparse_attention_wide_kernel
from mla_kernels.triton_kernels.backend import TritonBackend
from mla_kernels.triton_kernels.configs import choose, kernel_of
from mla_ref.backends import AttnSpec
from mla_ref.numerics import AttentionResult
from mla_ref.testing import cases

HEADS = 20


def decode(q, cache, lists, **kwargs):
    """In two splits."""
    given = {"softmax_scale": SCALE} | kwargs
    return plan_for(q, cache, lists, splits=2).decode(q, cache, lists, **given)


WIDE = [
    c for k in ("decode", "extend") for c in cases(k) if c.cache_format == "fp8" and c.heads > 16
]


@pytest.mark.parametrize("case", [c for c in WIDE if c.heads < 64], ids=str)
def test_conformance(case):
    case.check(TritonBackend())


@pytest.mark.parametrize(("heads", "wide"), [(8, False), (16, False), (17, True), (128, True)])
def test_it_serves_fp8_rows_of_more_than_16_heads(heads, wide):
    for rows in (4, 256):
        fp8 = kernel_of(choose(AttnSpec(heads), rows))
        assert (fp8 is sparse_attention_wide_kernel) == wide
        bf16 = kernel_of(choose(AttnSpec(heads, cache_format="bf16"), rows))
        assert bf16 is not sparse_attention_wide_kernel


def test_scales_of_all_sizes_in_one_list():
    q, cache, lists = problem(heads=HEADS, k=64)
    exponents = torch.randint(-30, 30, (*cache.shape[:2], 4))
    q = q * 1e-33
    cache = rescaled(cache, 10.0 ** exponents.double())
    assert_close(decode(q, cache, lists), oracle(q, cache, lists))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_beyond_the_range_of_float16(size):
    q, cache, lists = problem(heads=HEADS)
    q[..., 512:] = 0.0
    cache = rescaled(cache, torch.tensor(1.0))
    q, scale = q * size, SCALE / size / 100
    found = decode(q, cache, lists, softmax_scale=scale)
    assert_close(found, oracle(q, cache, lists, softmax_scale=scale))


def test_what_is_not_listed_is_not_read():
    q, cache, lists = problem(heads=HEADS, k=40)
    lists[lists == 0] = -1
    lists[1] = -1
    spoiled = cache.clone()
    spoiled[0, 0] = 0xFF
    found = decode(q, spoiled, lists)
    assert_same_bits(found, decode(q, cache, lists))
    assert (found.out[1] == 0).all() and (found.lse[1] == -math.inf).all()


def test_entries_at_and_beyond_a_row_s_count_are_as_if_they_were_not_there():
    q, cache, lists = problem(heads=HEADS, k=40)
    counts = torch.tensor([34, 3, 0])[: len(q)]
    short = lists.masked_fill(torch.arange(40) >= counts[:, None], -1)
    assert not torch.equal(short, lists)
    assert_same_bits(decode(q, cache, lists, counts=counts), decode(q, cache, short))


def test_pages_apart_give_what_pages_in_a_row_give():
    q, cache, lists = problem(heads=HEADS, k=20)
    pages, page_size, row = cache.shape
    buffer = torch.full((pages, page_size * row + row), 0x7F, dtype=torch.uint8)
    buffer[:, : page_size * row] = cache.flatten(1)
    apart = buffer.as_strided(cache.shape, (buffer.stride(0), row, 1))
    assert_same_bits(decode(q, apart, lists), decode(q, cache, lists))


def test_a_row_has_the_same_bits_in_any_order():
    q, cache, lists = problem(rows=3, heads=HEADS)
    counts = torch.tensor([34, 3, 0])
    plan = plan_for(q, cache, lists, splits=2)
    whole = plan.decode(q, cache, lists, counts, softmax_scale=SCALE)
    turned = plan.decode(
        q[[2, 0, 1]], cache, lists[[2, 0, 1]], counts[[2, 0, 1]], softmax_scale=SCALE
    )
    assert_same_bits(turned, AttentionResult(*(x[[2, 0, 1]] for x in whole)))

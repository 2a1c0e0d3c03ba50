"""Rung 7: attention over 656-byte rows against rung 6 on the numbers that they hold."""

from collections.abc import Callable

import pytest
import torch
from tests.support import bits, raw
from torch import Tensor

from mla_ref.attention import fp8_latent_attention, latent_attention, sparse_extend
from mla_ref.batching import Step
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows, write_fp8_rows
from mla_ref.numerics import compare
from mla_ref.numerics.float8 import SCALE_READERS, SCALE_RULES

LENS, NEW = [70, 1, 0, 33], [4, 1, 0, 33]
PAGE, PAGES = 16, 12


def problem(dtype: torch.dtype, scale_rule: str = "fp32") -> tuple[Step, Tensor, Tensor]:
    """A ragged batch whose rows lie in shuffled pages; every other byte is 0xFF, which is NaN."""
    table = torch.randperm(PAGES)[: 5 + 1 + 3].tolist()
    rows = [table[:5], table[5:6], [], table[6:]]
    block_table = torch.tensor([row + [10**6] * (5 - len(row)) for row in rows])
    cache = torch.full((PAGES, PAGE, 656), 0xFF, dtype=torch.uint8)
    filled = Step.build([0] * 4, LENS, block_table, PAGE)
    # Groups of very different size, so that a scale of the wrong group shows.
    sizes = torch.tensor([0.01, 1.0, 30.0, 1e-3]).repeat_interleave(128)
    kv = torch.randn(sum(LENS), 576)
    kv[:, :512] *= sizes
    write_fp8_rows(cache, kv, filled.slot_mapping, scale_rule=scale_rule)
    computed = [length - new for length, new in zip(LENS, NEW, strict=True)]
    step = Step.build(computed, NEW, block_table, PAGE)
    return step, cache, torch.randn(sum(NEW), 5, 576, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("reader", SCALE_READERS)
def test_equals_rung_6_on_the_dequantised_rows(dtype, rule, reader) -> None:
    step, cache, q = problem(dtype, rule)
    actual = fp8_latent_attention(q, cache, **step.batch, softmax_scale=0.1, scale_reader=reader)
    numbers = unpack_fp8_rows(cache, scale_reader=reader).to(dtype)
    expected = latent_attention(q, numbers, **step.batch, softmax_scale=0.1, kv_lora_rank=512)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(bits(a), bits(b))
    assert not actual.out.isnan().any()


def test_the_reader_matters_where_a_scale_is_no_power_of_two() -> None:
    step, cache, q = problem(torch.float32, "fp32")
    stored, truncated = (
        fp8_latent_attention(q, cache, **step.batch, softmax_scale=0.1, scale_reader=reader).out
        for reader in SCALE_READERS
    )
    assert compare(truncated, stored).rel_l2 > 0.1


def test_B144_dense_and_sparse_with_plain_and_fp8_rows() -> None:
    """Dense over FP8 rows is the combination that is easily left out."""
    n = 40
    step = Step.one_request(0, n, PAGE)
    kv, q = torch.randn(3 * PAGE, 576), torch.randn(n, 3, 576)
    cache = pack_fp8_rows(kv).view(3, PAGE, 656)
    numbers = unpack_fp8_rows(cache)
    lists = torch.arange(n).expand(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -1)
    scale = {"softmax_scale": 0.1}
    results = [
        fp8_latent_attention(q, cache, **step.batch, **scale),
        latent_attention(q, numbers, **step.batch, **scale, kv_lora_rank=512),
        sparse_extend(q, cache, lists, **scale),
        sparse_extend(q, numbers, lists, **scale),
    ]
    for result in results[1:]:
        assert compare(result.out, results[0].out).agrees(rel_l2=1e-6)
        assert compare(result.lse, results[0].lse).agrees(rel_l2=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, c: (q[..., :575], c), ValueError, "q must have size 576"),
        (lambda q, c: (q.long(), c), TypeError, "q must hold floating-point"),
        (lambda q, c: (q, c[..., :576]), ValueError, r"kv_cache must have .* 656\]"),
        (lambda q, c: (q, c[0]), ValueError, "kv_cache must have the shape"),
        (lambda q, c: (q, c[:, :0]), ValueError, "kv_cache must have pages of one row"),
        (lambda q, c: (q, c.float()), TypeError, "kv_cache must hold uint8 bytes"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[..., tuple[Tensor, Tensor]], error: type[Exception], message: str
) -> None:
    step, cache, q = problem(torch.float32)
    with pytest.raises(error, match=message):
        raw(fp8_latent_attention)(*change(q, cache), **step.batch, softmax_scale=0.1)


def test_what_does_not_fit_is_named_though_there_is_nothing_to_read() -> None:
    """With every length 0 no row is unpacked, and what unpacks it does not look at anything."""
    nothing = {
        "query_start_loc": torch.tensor([0, 0]),
        "seq_lens": torch.tensor([0]),
        "block_table": torch.zeros(1, 0, dtype=torch.int64),
        "softmax_scale": 0.1,
    }
    q, cache = torch.zeros(0, 3, 576), torch.zeros(1, 4, 656, dtype=torch.uint8)
    assert fp8_latent_attention(q, cache, **nothing).out.shape == (0, 3, 512)
    with pytest.raises(TypeError, match="kv_cache must hold uint8 bytes"):
        raw(fp8_latent_attention)(q, cache.float(), **nothing)
    with pytest.raises(ValueError, match="scale_reader must be one of stored, truncated"):
        raw(fp8_latent_attention)(q, cache, **nothing, scale_reader="rounded")

"""The index-score kernels: plain keys by the precision rule, pages within each row's bound."""

import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack, bits

from mla_kernels.triton_kernels import index_scores as kernels
from mla_kernels.triton_kernels.index_scores import index_scores, paged_index_scores
from mla_ref.cache import quantise_index_keys, read_index_keys, write_index_keys
from mla_ref.indexer import index_scores as twin
from mla_ref.numerics import compare
from mla_ref.numerics.float8 import from_e4m3
from mla_ref.testing import cases

LENS = (70, 33)
PAGE = 16


@pytest.mark.parametrize("case", cases("index_scores"), ids=str)
def test_conformance(case):
    case.check(index_scores)


def test_B026_the_relu_stands_before_the_sum():
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    k = torch.tensor([[1.0, -10.0], [0.5, 0.2]])
    assert index_scores(q, k, torch.tensor([[1.0, 0.5]])).tolist() == [[1.0, pytest.approx(0.6)]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, in the interpreter
def test_nan_and_infinity_are_the_twins():
    """A NaN key scores NaN, which no top-k selects; padded heads add none to an infinite key."""
    q, k, weights = torch.randn(2, 5, 128), torch.randn(7, 128), torch.randn(2, 5)
    k[2, 3], k[4, 5], k[5, 5] = math.nan, math.inf, -math.inf
    compared = compare(index_scores(q, k, weights), twin(q, k, weights))
    assert compared.agrees(rel_l2=1e-5), compared


def test_views_with_steps_and_mixed_dtypes():
    q = torch.randn(3, 20, 256).transpose(0, 1)[:4, :, ::2]
    k, weights = torch.randn(128, 40).T.bfloat16(), torch.randn(4, 6)[:, ::2]
    compared = compare(index_scores(q, k, weights), twin(q, k, weights))
    assert compared.agrees(rel_l2=1e-5), compared


def paged_batch(heads=20):
    """Two requests in pages with gaps between them; all that no token occupies is NaN."""
    memory = torch.full((12, PAGE * 132 + 7), 0xFF, dtype=torch.uint8)
    cache = memory[:, : PAGE * 132]
    block_table = torch.randperm(12)[:10].view(2, 5).to(torch.int32)
    for table, seq_len in zip(block_table, LENS, strict=True):
        position = torch.arange(seq_len)
        slots = table.long()[position // PAGE] * PAGE + position % PAGE
        write_index_keys(cache, torch.randn(seq_len, 128), slots)
    q, scale = quantise_index_keys(torch.randn(4, heads, 128))
    weights = torch.randn(4, heads) * heads**-0.5
    return {
        "q": q,
        "weights": weights * scale,
        "index_cache": cache,
        "block_table": block_table,
        "request_of_row": torch.tensor([0, 1, 1, 0]),
        "visible_lens": torch.tensor([70, 33, 17, 0]),
        "s_kv": 130,
    }


def right(batch):
    """By the twin, from the dequantised keys of each row."""
    scores = torch.full((len(batch["q"]), batch["s_kv"]), -math.inf)
    pairs = zip(batch["request_of_row"].tolist(), batch["visible_lens"].tolist(), strict=True)
    for row, (request, visible) in enumerate(pairs):
        keys = read_index_keys(batch["index_cache"], batch["block_table"][request], 0, visible)
        q = from_e4m3(batch["q"][row : row + 1])
        scores[row, :visible] = twin(q, keys, batch["weights"][row : row + 1])[0]
    return scores


@pytest.mark.parametrize("heads", [1, 20, 64])
def test_paged_scores_are_the_twins_within_each_bound(heads):
    """Nothing at or beyond a bound is read: it would be NaN."""
    batch = paged_batch(heads)
    compared = compare(paged_index_scores(**batch), right(batch))
    assert compared.agrees(rel_l2=1e-6), compared


def test_the_scale_of_a_key_is_applied_once_and_after_the_sum():
    """Twice the scale is twice the score, bit for bit."""
    batch = paged_batch()
    before = paged_index_scores(**batch)
    scales = batch["index_cache"][:, PAGE * 128 :].reshape(-1).view(torch.float32)
    batch["index_cache"][:, PAGE * 128 :] = (2 * scales).view(torch.uint8).view(12, -1)
    assert torch.equal(paged_index_scores(**batch), 2 * before)


def test_B015_a_request_or_page_that_is_not_there_scores_nothing():
    batch = paged_batch()
    expected = right(batch)
    batch["request_of_row"] = torch.tensor([0, 2, -1, 0])
    batch["block_table"][0, 1], batch["block_table"][0, 2] = -1, 12
    expected[1:3] = -math.inf
    expected[0, PAGE : 3 * PAGE] = -math.inf
    compared = compare(paged_index_scores(**batch), expected)
    assert compared.agrees(rel_l2=1e-6), compared


def test_a_length_beyond_the_block_table_is_not_read():
    batch = paged_batch()
    batch["visible_lens"] = torch.tensor([130, 33, 17, 0])
    assert paged_index_scores(**batch)[0, 5 * PAGE :].isinf().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, in the interpreter
def test_a_key_of_nan_scores_nan():
    batch = paged_batch()
    batch["index_cache"][batch["block_table"][0, 0], 5 * 128] = 0x7F
    assert paged_index_scores(**batch)[0, :10].isnan().nonzero().flatten().tolist() == [5]


def test_the_same_bits_in_any_order_of_rows():
    batch = paged_batch()
    order = torch.tensor([2, 0, 3, 1])
    mixed = {
        name: batch[name][order] for name in ("q", "weights", "request_of_row", "visible_lens")
    }
    assert torch.equal(
        bits(paged_index_scores(**batch | mixed)), bits(paged_index_scores(**batch)[order])
    )


def test_results_go_where_they_are_asked_to_and_nothing_is_read_back():
    batch = paged_batch()
    out = torch.full((4, 130), math.nan)
    with NothingReadBack():
        assert paged_index_scores(**batch, out=out) is out
    assert not out.isnan().any()
    with pytest.raises(ValueError, match=r"out must be contiguous, of shape \[4, 130\]"):
        paged_index_scores(**batch, out=out[:, :129])


@pytest.mark.parametrize("rows, heads, s_kv", [(0, 4, 5), (2, 4, 0), (2, 0, 5)])
def test_nothing_to_score(rows, heads, s_kv):
    q, k, w = torch.zeros(rows, heads, 128), torch.zeros(s_kv, 128), torch.zeros(rows, heads)
    assert torch.equal(index_scores(q, k, w), twin(q, k, w))


GOOD = {"q": torch.zeros(2, 4, 128), "k": torch.zeros(5, 128), "weights": torch.zeros(2, 4)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"q": torch.zeros(2, 4)},
        {"q": torch.zeros(2, 4, 128, dtype=torch.uint8)},
        {"k": torch.zeros(5, 64)},
        {"weights": torch.zeros(2, 5)},
        {"weights": torch.zeros(3, 4)},
        {"weights": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_what_the_twin_refuses(wrong):
    refuses_alike(index_scores, twin, GOOD | wrong)


def test_refuses_float64():
    with pytest.raises(TypeError, match="k must be bfloat16, float16 or float32, got a float64"):
        index_scores(**GOOD | {"k": torch.zeros(5, 128, dtype=torch.float64)})


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("q", torch.zeros(4, 20, 128), "q must hold E4M3 numbers as uint8"),
        ("q", torch.zeros(4, 20, 64, dtype=torch.uint8), "q must have size 128"),
        ("weights", torch.zeros(4, 19), "weights must have size 20"),
        ("index_cache", torch.zeros(3, 16, 128), "index_cache must have the shape"),
        ("index_cache", torch.zeros(3, 131, dtype=torch.uint8), "a multiple of 132 bytes"),
        ("visible_lens", torch.zeros(5, dtype=torch.int32), "visible_lens must have size 4"),
        ("request_of_row", torch.zeros(4), "request_of_row must hold int32 or int64"),
    ],
)
def test_paged_refuses(name, value, words):
    with pytest.raises((TypeError, ValueError), match=words):
        paged_index_scores(**paged_batch() | {name: value})


def test_signatures_name_every_parameter():
    for made in kernels.signatures():
        assert {*made.signature, *made.constexprs} == set(made.fn.arg_names), made.name

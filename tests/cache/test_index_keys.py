"""Index keys: planar pages, 132 bytes a token."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.cache.index_keys import (
    KEY_BYTES,
    index_keys_of_pages,
    index_planes,
    new_index_cache,
    page_size_of,
    quantise_index_keys,
    read_index_keys,
    write_index_keys,
)
from mla_ref.numerics.float8 import SCALE_READERS, SCALE_RULES, from_e4m3


def test_a_page_of_64_has_all_keys_first_and_then_all_scales() -> None:
    cache = new_index_cache(3)
    assert cache.shape == (3, 8448)
    keys = torch.randn(2, 128)
    write_index_keys(cache, keys, torch.tensor([64 + 5, 2 * 64 + 63]))
    data, scales = quantise_index_keys(keys)
    assert torch.equal(cache[1, 5 * 128 : 6 * 128], data[0])
    assert torch.equal(cache[2, 63 * 128 : 8192], data[1])
    assert float(cache[1, 8192 + 4 * 5 : 8192 + 4 * 6].view(torch.float32)) == float(scales[0])
    assert float(cache[2, 8444:].view(torch.float32)) == float(scales[1])
    assert cache[0].eq(0).all()
    assert KEY_BYTES == 132


@pytest.mark.parametrize("page_size", [1, 2, 53, 64])
def test_what_is_written_is_read_through_any_table(page_size: int) -> None:
    keys = torch.randn(60, 128)
    pages = -(-60 // page_size)
    table = torch.randperm(pages + 2)[:pages]
    positions = torch.arange(60)
    slots = table[positions // page_size] * page_size + positions % page_size
    cache = new_index_cache(pages + 2, page_size).fill_(0xFF)
    write_index_keys(cache, keys, slots)
    data, scale = quantise_index_keys(keys)
    expected = from_e4m3(data) * scale[:, None]
    assert torch.equal(read_index_keys(cache, table, 0, 60), expected)
    assert torch.equal(read_index_keys(cache, table, 17, 30), expected[17:47])
    assert read_index_keys(cache, table, 3, 0).shape == (0, 128)


def test_scales_are_powers_of_two_by_default_and_named_otherwise() -> None:
    keys = torch.randn(100, 128)
    for rule, power in (("pow2-floor", True), ("fp32-floor", False)):
        _, scale = quantise_index_keys(keys, rule)
        assert bool((torch.frexp(scale).mantissa == 0.5).all()) is power


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_key_with_a_number_that_is_none_reads_as_nan(rule: str, bad: float) -> None:
    keys = 1e4 * torch.randn(3, 128)
    clean, _ = quantise_index_keys(keys, rule)
    keys[1, 7] = bad
    data, scale = quantise_index_keys(keys, rule)
    assert scale.isfinite().tolist() == [True, False, True]
    assert torch.equal(data[::2], clean[::2])
    cache = new_index_cache(1, 4)
    write_index_keys(cache, keys, torch.arange(3), scale_rule=rule)
    for reader in SCALE_READERS:
        read = read_index_keys(cache, torch.tensor([0]), 0, 3, scale_reader=reader)
        assert read[1].isnan().all() and read[::2].isfinite().all()


def test_slot_minus_one_is_not_written() -> None:
    cache = new_index_cache(2).fill_(7)
    write_index_keys(cache, torch.randn(2, 128), torch.tensor([-1, -1]))
    assert cache.eq(7).all()


def test_planes_are_views_of_a_strided_cache_too() -> None:
    layers = torch.zeros(3, 2, 8448, dtype=torch.uint8)
    keys, scales = index_planes(layers[:, 1])
    keys.fill_(1)
    scales.fill_(2)
    assert layers[:, 0].eq(0).all()
    assert layers[:, 1, :8192].eq(1).all()
    assert layers[:, 1, 8192:].eq(2).all()


def test_input_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="132"):
        raw(index_planes)(torch.zeros(2, 100, dtype=torch.uint8))
    with pytest.raises(TypeError, match="cache"):
        raw(index_planes)(torch.zeros(2, 132))
    cache = new_index_cache(1)
    with pytest.raises(ValueError, match="keys"):
        raw(write_index_keys)(cache, torch.zeros(1, 64), torch.tensor([0]))
    with pytest.raises(ValueError, match="slots"):
        raw(write_index_keys)(cache, torch.zeros(1, 128), torch.tensor([64]))
    plain = new_index_cache(1, dtype=torch.float32, head_dim=24)
    for into, width in ((cache, 128), (plain, 24)):
        good = (into, torch.zeros(2, width), torch.tensor([0, 1]))
        for name, wrong in (
            ("cache must", (None, *good[1:])),
            ("cache must", (into[0], *good[1:])),
            ("keys must have size", (into, torch.zeros(2, width + 1), good[2])),
            ("keys must", (into, good[1].long(), good[2])),
            ("slots must have size 2", (*good[:2], torch.tensor([0, 1, 2]))),
            ("slots must", (*good[:2], torch.tensor([0.0, 1.0]))),
            ("slots must", (*good[:2], [0, 1])),
        ):
            with pytest.raises((TypeError, ValueError), match=f"^{name}"):
                raw(write_index_keys)(*wrong)
        with pytest.raises(ValueError, match="^scale_rule"):
            raw(write_index_keys)(*good, scale_rule="pow3")
        assert into.eq(0).all()


# --- a cache of plain numbers


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_float_cache_gives_back_what_was_written(page_size: int, dtype: torch.dtype) -> None:
    pages = -(-23 // page_size)
    table = torch.randperm(pages + 2)[:pages]
    positions = torch.arange(23)
    cache = new_index_cache(pages + 2, page_size, dtype=dtype, head_dim=24)
    assert cache.shape == (pages + 2, page_size, 24) and cache.dtype == dtype
    assert cache.eq(0).all()
    cache.fill_(torch.nan)
    keys = torch.randn(23, 24, dtype=torch.float64).to(dtype)
    slots = table[positions // page_size] * page_size + positions % page_size
    slots[7] = -1
    write_index_keys(cache, keys, slots)
    read = read_index_keys(cache, table, 0, 23)
    assert read.dtype == dtype
    written = positions != 7
    assert torch.equal(read[written], keys[written])
    assert read[7].isnan().all()
    assert torch.equal(read_index_keys(cache, table, 9, 11), keys[9:20])


def test_page_size_of_either_kind() -> None:
    for page_size in (1, 3, 64):
        assert page_size_of(new_index_cache(2, page_size)) == page_size
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert page_size_of(new_index_cache(2, page_size, dtype=dtype, head_dim=7)) == page_size
        assert page_size_of(new_index_cache(0, page_size)) == page_size


def test_the_truncated_reader_halves_a_scale_at_worst() -> None:
    cache, keys = new_index_cache(1, 8), torch.randn(8, 128)
    table = torch.tensor([0])
    write_index_keys(cache, keys, torch.arange(8), scale_rule="fp32")
    stored = read_index_keys(cache, table, 0, 8)
    truncated = read_index_keys(cache, table, 0, 8, scale_reader="truncated")
    _, scale = quantise_index_keys(keys, "fp32")
    factor = torch.exp2(scale.log2().floor()) / scale
    assert (factor < 1).any() and (factor >= 0.5).all()
    assert torch.allclose(truncated, stored * factor[:, None], rtol=1e-6, atol=0)


def test_a_page_outside_the_cache_is_refused_and_not_counted_from_the_end() -> None:
    for cache in (new_index_cache(3, 2), new_index_cache(3, 2, dtype=torch.float32, head_dim=4)):
        for page in (-1, 3, 10**6):
            table = torch.tensor([1, page, 2])
            with pytest.raises(ValueError, match=f"page {page}, but the cache has pages 0 to 2"):
                read_index_keys(cache, table, 1, 2)
            # Pages that the positions do not touch may hold anything.
            assert len(read_index_keys(cache, table, 0, 2)) == 2
            assert len(read_index_keys(cache, table, 4, 2)) == 2
        with pytest.raises(ValueError, match="block_table_row has 1 pages of 2, too few"):
            read_index_keys(cache, torch.tensor([0]), 1, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_pages_of_an_empty_cache_are_zeros(dtype: torch.dtype) -> None:
    """A captured step reads all pages of a table, -1 where there is none, and masks what it got."""
    cache = new_index_cache(0, 3, dtype=dtype)
    for table in (torch.tensor([-1, -1]), torch.tensor([0, 7])):
        keys = index_keys_of_pages(cache, table)
        assert keys.dtype == torch.float32 and torch.equal(keys, torch.zeros(6, 128))
    assert index_keys_of_pages(cache, torch.zeros(0, dtype=torch.int64)).shape == (0, 128)


def test_bad_input_of_the_readers_is_named() -> None:
    good = {"cache": new_index_cache(2, 2), "block_table_row": torch.tensor([0, 1])}
    good |= {"first": 0, "count": 3}
    for name, wrong in (
        ("cache", torch.zeros(2, 2)),
        ("cache", torch.zeros(2, 0, 4)),
        ("cache", None),
        ("block_table_row", torch.tensor([[0, 1]])),
        ("block_table_row", torch.tensor([0.0, 1.0])),
        ("first", -1),
        ("first", None),
        ("count", -1),
        ("count", 2.0),
        ("scale_reader", "rounded"),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(read_index_keys)(**(good | {name: wrong}))
    for name, wrong in (
        ("num_pages", -1),
        ("page_size", 0),
        ("head_dim", 64),
        ("dtype", torch.int8),
        ("dtype", "uint8"),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(new_index_cache)(**({"num_pages": 1} | {name: wrong}))
    for name, args in (
        ("keys", (torch.zeros(2, 64),)),
        ("keys", (torch.zeros(2, 128, dtype=torch.int64),)),
        ("scale_rule", (torch.zeros(2, 128), "pow3")),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(quantise_index_keys)(*args)


@pytest.mark.parametrize("page_size", [1, 53, 64])
def test_B061_the_cache_is_132_bytes_a_token_to_the_byte(page_size: int) -> None:
    """vllm#55222: a workspace that was counted in one unit and allocated in another."""
    cache = new_index_cache(7, page_size)
    assert cache.dtype == torch.uint8
    assert cache.nbytes == 7 * page_size * 132 == 7 * page_size_of(cache) * 132

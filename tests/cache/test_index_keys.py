"""Index keys: planar pages, 132 bytes a token."""

import pytest
import torch
from tests.support import raw

from mla_ref.cache.index_keys import (
    KEY_BYTES,
    index_planes,
    new_index_cache,
    quantise_index_keys,
    read_index_keys,
    write_index_keys,
)
from mla_ref.numerics.float8 import from_e4m3


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

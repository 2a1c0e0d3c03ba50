"""Rows into slots: only what is meant to change changes."""

import sys

import pytest
import torch
from tests.support import NothingReadBack, bits, raw

from mla_ref.attention import latent_attention
from mla_ref.cache import gather_rows, slot_mapping, write_rows

NAN = float("nan")


def counting(num_tokens: int, *row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that differ everywhere: 1, 2, 3, ..."""
    count = num_tokens * int(torch.tensor(row).prod())
    return (torch.arange(count) % 200 + 1).reshape(num_tokens, *row).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("validate", [True, False])
def test_rows_land_in_their_slots(dtype: torch.dtype, validate: bool) -> None:
    cache = torch.zeros(3, 4, 2, 5).to(dtype)
    rows = counting(4, 2, 5, dtype=torch.float32).clamp(max=16).to(dtype)
    write_rows(cache, rows, torch.tensor([0, 5, 11, 2]), validate=validate)
    flat = cache.flatten(0, 1)
    assert torch.equal(bits(flat[[0, 5, 11, 2]]), bits(rows))
    others = [s for s in range(12) if s not in (0, 5, 11, 2)]
    assert (flat.float()[others] == 0).all()


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 2, 53, 64])
def test_write_then_read(page_size: int, slots_dtype: torch.dtype) -> None:
    table = torch.randperm(140 // page_size + 3)[None]
    rows = counting(130, 7)
    cache = torch.full((table.shape[1], page_size, 7), NAN)
    slots = slot_mapping(table, torch.tensor([0, 130]), torch.tensor([130]), page_size)
    write_rows(cache, rows, slots.to(slots_dtype))
    assert torch.equal(gather_rows(cache, table[0], 130), rows)
    assert int(cache.isnan().all(-1).sum()) == table.shape[1] * page_size - 130


def test_B022_page_size_one() -> None:
    """The same tokens in pages of 1 and of 64 give the same attention."""
    rows = torch.randn(70, 12)
    q = torch.randn(3, 2, 12)
    results = []
    for page_size in (1, 64):
        table = torch.randperm(80)[None]
        cache = torch.full((80, page_size, 12), NAN)
        starts, lens = torch.tensor([0, 70]), torch.tensor([70])
        write_rows(cache, rows, slot_mapping(table, starts, lens, page_size))
        results.append(
            latent_attention(
                q,
                cache,
                query_start_loc=torch.tensor([0, 3]),
                seq_lens=lens,
                block_table=table,
                softmax_scale=0.3,
                kv_lora_rank=8,
            )
        )
    assert torch.allclose(results[0].out, results[1].out, rtol=0, atol=1e-6)
    assert torch.allclose(results[0].lse, results[1].lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("validate", [True, False])
def test_B057_slot_minus_one_means_do_not_write(validate: bool) -> None:
    """Slots -1, 5, -1 change row 5 alone, the memory around the cache included."""
    memory = torch.full((5, 4, 6), -7.0)
    cache = memory[1:4]  # a page before it and one behind it stand guard
    write_rows(cache, counting(3, 6), torch.tensor([-1, 5, -1]), validate=validate)
    expected = torch.full((5, 4, 6), -7.0)
    expected[2, 1] = counting(3, 6)[1]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("slots", [[-1], [-1, -1, -1], []])
def test_B056_padding_rows_leave_slot_0_alone(slots: list[int], validate: bool) -> None:
    """Rows of NaN for nobody: slot 0 is a normal slot and keeps its bits."""
    cache = torch.randn(2, 4, 3)
    cache[0, 0] = torch.tensor([NAN, -0.0, 1.5])
    before = bits(cache).clone()
    rows = torch.full((len(slots), 3), NAN)
    write_rows(cache, rows, torch.tensor(slots, dtype=torch.int64), validate=validate)
    assert torch.equal(bits(cache), before)


def test_slot_0_can_be_written() -> None:
    cache = torch.zeros(2, 4, 3)
    write_rows(cache, counting(2, 3), torch.tensor([-1, 0]))
    assert torch.equal(cache[0, 0], torch.tensor([4.0, 5.0, 6.0]))
    assert (cache.flatten(0, 1)[1:] == 0).all()


def test_padding_between_rows() -> None:
    """-1 in any place, beside valid rows before and after it; NaN in a skipped row stays out."""
    for slots in ([-1, -1, 3, 1], [3, -1, 1, -1], [3, 1, -1, -1]):
        rows = counting(4, 2)
        skipped = torch.tensor(slots) < 0
        rows[skipped] = NAN
        cache = torch.zeros(1, 4, 2)
        write_rows(cache, rows, torch.tensor(slots))
        assert torch.equal(cache[0, [3, 1]], rows[~skipped])
        assert (cache[0, [0, 2]] == 0).all()


@pytest.mark.parametrize("slot", [12, 13, 2**31 - 1, 2**31, 2**40 + 17, -2, -12, -(2**40)])
def test_B058_bounds_before_narrowing(slot: int) -> None:
    """A slot beyond the cache is an error, or skipped where nothing is read back. Never 17."""
    cache = torch.zeros(3, 4, 2)
    rows, slots = counting(2, 2), torch.tensor([slot, 11])
    with pytest.raises(ValueError, match=rf"slots holds {slot}.*0 to 11"):
        write_rows(cache, rows, slots)
    assert (cache == 0).all()  # nothing is half written
    write_rows(cache, rows, slots, validate=False)
    assert torch.equal(cache[2, 3], rows[1])
    assert (cache.flatten(0, 1)[:11] == 0).all()


@pytest.mark.parametrize("slot", [4 * 64, 2**31 - 1])
def test_B040_positive_slots_out_of_range(slot: int) -> None:
    cache = torch.zeros(4, 64, 1)
    with pytest.raises(ValueError, match="slots"):
        write_rows(cache, torch.ones(1, 1), torch.tensor([slot]))
    write_rows(cache, torch.ones(1, 1), torch.tensor([slot]), validate=False)
    assert (cache == 0).all()


def test_B019_pages_with_other_layers_between_them() -> None:
    """Layer 1 of a cache [pages, layers, 64, 656]: page * page_size is no address here."""
    both = torch.randint(0, 255, (5, 2, 64, 656), dtype=torch.uint8)
    other = both[:, 0].clone()
    cache = both[:, 1]
    assert not cache.is_contiguous()
    packed = cache.clone()
    rows = torch.randint(0, 255, (4, 656), dtype=torch.uint8)
    slots = torch.tensor([0, 63, 64, 200])
    write_rows(cache, rows, slots)
    write_rows(packed, rows, slots)
    assert torch.equal(both[:, 0], other)
    assert torch.equal(cache, packed)
    assert torch.equal(cache[3, 200 - 192], rows[3])
    assert torch.equal(gather_rows(cache, torch.tensor([3, 0]), 128)[8], rows[3])


@pytest.mark.parametrize("slots", [[-1, 5, -1], [-1, -1, -1], [0, 3, 99]])
def test_without_validation_nothing_is_read_back(slots: list[int]) -> None:
    """A step in a CUDA graph: no number may go to the host on the way."""
    cache, rows, where = torch.zeros(3, 4, 2), counting(3, 2), torch.tensor(slots)
    with NothingReadBack():
        write_rows(cache, rows, where, validate=False)
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < 12:
            assert torch.equal(cache.flatten(0, 1)[slot], row)
    assert int((cache != 0).any(-1).sum()) == sum(0 <= slot < 12 for slot in slots)


def test_B020_padding_never_takes_a_block_of_someone() -> None:
    """A table 4 wide over 16 blocks: padding rows must not fall into block 4."""
    cache = torch.arange(16 * 2, dtype=torch.float32).reshape(16, 2, 1)
    before = cache.clone()
    table = torch.tensor([[9, 4, 0, 15]])
    slots = slot_mapping(table, torch.tensor([0, 1]), torch.tensor([1]), 2)
    padded = torch.cat([slots, torch.full((3,), -1)])
    write_rows(cache, torch.full((4, 1), -5.0), padded)
    before[9, 0] = -5.0
    assert torch.equal(cache, before)


def test_two_rows_for_one_slot() -> None:
    cache = torch.zeros(2, 4, 1)
    with pytest.raises(ValueError, match="slots must not list a slot twice"):
        write_rows(cache, torch.ones(3, 1), torch.tensor([5, 1, 5]))
    assert (cache == 0).all()


def test_rows_are_cast_to_the_dtype_of_the_cache() -> None:
    cache = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    rows = torch.randn(2, 3, dtype=torch.float64)
    write_rows(cache, rows, torch.tensor([1, 0]))
    assert torch.equal(cache[0, [1, 0]], rows.bfloat16())


@pytest.mark.parametrize(
    ("cached", "given"),
    [
        (torch.uint8, torch.float32),
        (torch.uint8, torch.int64),
        (torch.uint8, torch.float8_e4m3fn),
        (torch.float32, torch.int64),
        (torch.float32, torch.uint8),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_B053_values_are_never_cast_to_bytes(cached: torch.dtype, given: torch.dtype) -> None:
    """1.5 in e4m3 is the byte 0x3C. Cast as a number it would be 1, without a word."""
    cache = torch.zeros(1, 2, 3, dtype=cached)
    with pytest.raises(TypeError, match=f"rows must hold {cached} as cache does"):
        write_rows(cache, torch.full((1, 3), 1.5).to(given), torch.tensor([0]))
    assert not cache.any()
    e4m3 = torch.full((1, 3), 1.5).to(torch.float8_e4m3fn)
    packed = torch.zeros(1, 2, 3, dtype=torch.uint8)
    write_rows(packed, e4m3.view(torch.uint8), torch.tensor([0]))
    assert packed[0, 0].tolist() == [0x3C] * 3


def test_a_row_may_have_any_shape() -> None:
    for row in ((), (3,), (2, 3), (2, 1, 3), (0,)):
        cache = torch.zeros(2, 2, *row)
        rows = torch.ones(1, *row)
        write_rows(cache, rows, torch.tensor([2]))
        assert torch.equal(cache[1, 0], rows[0])
        assert (cache[0] == 0).all()


def test_a_cache_without_pages() -> None:
    cache = torch.zeros(0, 4, 3)
    write_rows(cache, torch.ones(2, 3), torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match="slots holds 0"):
        write_rows(cache, torch.ones(1, 3), torch.tensor([0]))


def test_rows_and_slots_stay_as_they_are() -> None:
    rows, slots = counting(3, 2), torch.tensor([4, -1, 0])
    rows0, slots0 = rows.clone(), slots.clone()
    write_rows(torch.zeros(2, 3, 2), rows, slots)
    assert torch.equal(rows, rows0) and torch.equal(slots, slots0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows commits memory when it is asked for")
def test_B059_a_slot_beyond_two_gigabytes() -> None:
    """Slot 4,000,000 of 656 bytes lies at byte 2.6e9. Untouched pages of memory cost nothing."""
    cache = torch.empty(62_501, 64, 656, dtype=torch.uint8)
    assert cache.numel() > 2**31
    cache[0].zero_()
    cache[62_500].zero_()
    rows = torch.arange(2 * 656).reshape(2, 656).to(torch.uint8)
    slots = torch.tensor([4_000_000, 1])
    write_rows(cache, rows, slots.int())
    # What an address in 32 bits would have hit: 4,000,000 * 656 - 2^32 is negative, so below 0.
    assert torch.equal(cache[62_500, 0], rows[0])
    assert torch.equal(cache[0, 1], rows[1])
    assert int(cache[0].count_nonzero()) == int(rows[1].count_nonzero())
    table = torch.tensor([62_500, 0], dtype=torch.int32)
    assert torch.equal(gather_rows(cache, table, 66)[[0, 65]], rows)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"cache": None}, "cache"),
        ({"cache": torch.zeros(4)}, "cache"),
        ({"rows": None}, "rows"),
        ({"rows": torch.zeros(2, 3)}, "rows"),
        ({"rows": torch.zeros(3, 4)}, "rows"),
        ({"rows": torch.zeros(3, 1)}, "rows"),
        ({"rows": torch.zeros(3)}, "rows"),
        ({"slots": [0, 1, 2]}, "slots"),
        ({"slots": torch.zeros(3)}, "slots"),
        ({"slots": torch.zeros(3, 1, dtype=torch.int64)}, "slots"),
        ({"slots": torch.zeros(3, dtype=torch.bool)}, "slots"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    good = {
        "cache": torch.zeros(2, 4, 3),
        "rows": torch.zeros(3, 3),
        "slots": torch.tensor([0, 1, 2]),
    }
    with pytest.raises((TypeError, ValueError), match=name):
        raw(write_rows)(**(good | changed))

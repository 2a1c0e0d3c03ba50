"""Positions to slots, and what a request's rows are when read back."""

import pytest
import torch
from tests.support import GARBAGE, raw, scatter_pages

from mla_ref.cache import gather_rows, pages_needed, slot_mapping


def mapping(block_table, query_lens, seq_lens, page_size, dtype=torch.int64):
    return slot_mapping(
        torch.tensor(block_table, dtype=dtype),
        torch.tensor([0, *query_lens], dtype=dtype).cumsum(0).to(dtype),
        torch.tensor(seq_lens, dtype=dtype),
        page_size,
    )


def test_numbers_by_hand() -> None:
    """Pages of 4. Request 0 adds positions 3, 4, 5 in pages 7 and 2; request 1 position 0 in 5."""
    slots = mapping([[7, 2], [5, GARBAGE]], [3, 1], [6, 1], 4)
    assert slots.tolist() == [7 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 5 * 4 + 0]
    assert slots.dtype == torch.int64


def test_requests_without_new_tokens_or_tokens_at_all() -> None:
    slots = mapping([[3, 1], [GARBAGE] * 2, [0, 2], [GARBAGE] * 2], [2, 0, 0, 0], [5, 0, 8, 0], 4)
    assert slots.tolist() == [15, 4]
    assert mapping([[1]], [0], [0], 4).tolist() == []
    assert slot_mapping(
        torch.empty(0, 3, dtype=torch.int32), torch.tensor([0]), torch.tensor([], dtype=int), 4
    ).tolist() == []  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 2, 53, 61, 64])
def test_the_slots_of_a_whole_request(page_size: int) -> None:
    pages = torch.randperm(130)
    slots = slot_mapping(pages[None], torch.tensor([0, 130]), torch.tensor([130]), page_size)
    assert slots.tolist() == [
        int(pages[p // page_size]) * page_size + p % page_size for p in range(130)
    ]


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_new_tokens_are_the_last_ones(page_size: int) -> None:
    """Any chunk's slots are a piece of the slots of the whole."""
    table = torch.randperm(100)[None]
    whole = slot_mapping(table, torch.tensor([0, 90]), torch.tensor([90]), page_size)
    for done, new in ((0, 7), (7, 50), (57, 32), (89, 1)):
        chunk = slot_mapping(table, torch.tensor([0, new]), torch.tensor([done + new]), page_size)
        assert torch.equal(chunk, whole[done : done + new])


def test_B059_slots_pass_the_range_of_int32() -> None:
    """Byte addresses pass 2^31 from these slots on; slots themselves from page 33,554,432."""
    for first_slot, row_bytes in ((3_728_271, 576), (3_273_604, 656), (16_268_816, 132)):
        assert first_slot * row_bytes >= 2**31 > (first_slot - 1) * row_bytes
    slots = mapping([[51_151]], [1], [1], 64, dtype=torch.int32)
    assert slots.dtype == torch.int64
    assert int(slots[0] * 656) == 51_151 * 64 * 656 > 2**31
    far = mapping([[40_000_000]], [64], [64], 64, dtype=torch.int32)
    assert far[0] == 2_560_000_000 and far[-1] == 2_560_000_063


@pytest.mark.parametrize("page", [-1, -2, -(2**31)])
def test_B038_a_negative_page_is_no_page(page: int) -> None:
    """Page -1 at its last offset would be slot -1, and the token would silently not be written."""
    for seq_len in (1, 4):
        with pytest.raises(ValueError, match=rf"block_table\[0\] names page {page}"):
            mapping([[page]], [1], [seq_len], 4, dtype=torch.int32)
    # Past the request's new tokens the entry is never looked at.
    assert mapping([[3, page]], [1], [4], 4, dtype=torch.int32).tolist() == [15]


def test_B015_a_position_beyond_the_table() -> None:
    """A 2 x 3 table of pages of 64 holds 192 tokens a request; in memory more lies behind it."""
    memory = torch.arange(16).reshape(2, 8)
    view = memory[:, :3]
    assert view.stride(0) == 8
    slots = slot_mapping(view, torch.tensor([0, 1, 2]), torch.tensor([192, 10]), 64)
    assert slots.tolist() == [2 * 64 + 63, 8 * 64 + 9]
    with pytest.raises(ValueError, match=r"block_table has 3 pages of 64 .* seq_lens\[1\] = 193"):
        slot_mapping(view, torch.tensor([0, 1, 2]), torch.tensor([192, 193]), 64)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seq_lens": [-1, 3]}, "seq_lens"),
        ({"seq_lens": [1, 3]}, "seq_lens"),  # fewer than its new tokens
        ({"seq_lens": [2, 9]}, "block_table"),
        ({"query_start_loc": [1, 2, 3]}, "query_start_loc"),
        ({"query_start_loc": [0, 2, 1]}, "query_start_loc"),
        ({"query_start_loc": [0, 2]}, "query_start_loc"),
        ({"query_start_loc": []}, "query_start_loc"),
        ({"query_start_loc": [[0, 2, 3]]}, "query_start_loc"),
        ({"query_start_loc": [0.0, 2.0, 3.0]}, "query_start_loc"),
        ({"block_table": [[0, 1]]}, "block_table"),
        ({"block_table": [0, 1]}, "block_table"),
        ({"block_table": [[0.0], [1.0]]}, "block_table"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -4}, "page_size"),
        ({"page_size": 4.0}, "page_size"),
        ({"page_size": True}, "page_size"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    good = {"block_table": [[0, 1], [2, 3]], "query_start_loc": [0, 2, 3], "seq_lens": [2, 3]}
    arguments = {k: torch.tensor(v) for k, v in (good | changed).items() if k != "page_size"}
    arguments["page_size"] = changed.get("page_size", 4)
    with pytest.raises((TypeError, ValueError), match=name):
        raw(slot_mapping)(**arguments)


def test_pages_needed() -> None:
    assert [pages_needed(n, 64) for n in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]
    assert [pages_needed(n, 1) for n in (0, 1, 5)] == [0, 1, 5]
    for tokens, size, name in ((-1, 4, "num_tokens"), (1, 0, "page_size"), (1.0, 4, "num_tokens")):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(pages_needed)(tokens, size)


@pytest.mark.parametrize("page_size", [1, 2, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gather_reads_the_rows_in_order(page_size: int, dtype: torch.dtype) -> None:
    rows = [torch.randint(0, 100, (n, 2, 3)).to(dtype) for n in (11, 0, 64)]
    poison = 255 if dtype == torch.uint8 else float("nan")
    cache, table = scatter_pages(rows, page_size, poison=poison)
    for request, expected in enumerate(rows):
        assert torch.equal(gather_rows(cache, table[request], len(expected)), expected)
    prefix = gather_rows(cache, table[2], 37)
    assert torch.equal(prefix, rows[2][:37])
    prefix.zero_()  # a copy: the cache keeps its rows
    assert torch.equal(gather_rows(cache, table[2], 64), rows[2])


def test_gather_names_bad_input() -> None:
    cache = torch.zeros(5, 4, 3)
    table = torch.tensor([1, 4, 0])
    for arguments, name in [
        ((None, table, 3), "cache"),
        ((torch.zeros(4), table, 3), "cache"),
        ((cache, [1, 4], 3), "block_table_row"),
        ((cache, table[None], 3), "block_table_row"),
        ((cache, table.double(), 3), "block_table_row"),
        ((cache, table, -1), "seq_len"),
        ((cache, table, 2.0), "seq_len"),
        ((cache, table, 13), "seq_len 13"),
        ((cache, torch.tensor([1, 5]), 5), "page 5"),
        ((cache, torch.tensor([1, -1]), 5), "page -1"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(gather_rows)(*arguments)
    # A page that is not needed may be anything.
    assert gather_rows(cache, torch.tensor([1, -1]), 4).shape == (4, 3)

"""Positions to slots, and the share of one rank."""

import pytest
import torch
from tests.support import raw

from mla_ref.indexer import own_positions, positions_to_slots


def test_slot_is_page_times_size_plus_offset() -> None:
    table = torch.tensor([[7, 2], [3, 9]], dtype=torch.int32)
    positions = torch.tensor([[0, 5, 4, -1], [7, 3, -1, 0]], dtype=torch.int32)
    slots = positions_to_slots(positions, torch.tensor([0, 1]), table, 4)
    assert slots.tolist() == [[28, 9, 8, -1], [39, 15, -1, 12]]
    assert slots.dtype == torch.int32
    assert positions_to_slots(positions, torch.tensor([0, 1]), table.long(), 4).dtype == torch.int64


def test_B015_outside_the_table_is_none() -> None:
    wide = torch.arange(100, 116, dtype=torch.int32).view(2, 8)
    for table in (wide[:, :3], wide[:, :3].contiguous()):
        requests = torch.tensor([0, 1, 2, -1])
        slots = positions_to_slots(torch.full((4, 1), 10), requests, table, 64)
        assert slots.flatten().tolist() == [6410, 108 * 64 + 10, -1, -1]
        assert positions_to_slots(torch.tensor([[192]]), torch.tensor([0]), table, 64).tolist() == [
            [-1]
        ]


def test_B038_none_is_minus_one_and_not_slot_zero() -> None:
    table = torch.tensor([[0, -1]], dtype=torch.int32)
    slots = positions_to_slots(torch.tensor([[-1, 3, 5]]), torch.tensor([0]), table, 4)
    assert slots.tolist() == [[-1, 3, -1]]


def test_B059_slots_beyond_32_bits() -> None:
    table = torch.tensor([[2**26]], dtype=torch.int64)
    slots = positions_to_slots(torch.tensor([[63]]), torch.tensor([0]), table, 64)
    assert slots.tolist() == [[2**32 + 63]]


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_B112_ranks_share_every_position_once(world: int, interleave: int) -> None:
    positions = torch.randperm(100)[None]
    seen = []
    for rank in range(world):
        local, count = own_positions(positions, rank=rank, world=world, interleave=interleave)
        own = local[0, : int(count)]
        assert local[0, int(count) :].eq(-1).all()
        block, offset = own // interleave, own % interleave
        seen += (block * world * interleave + rank * interleave + offset).tolist()
        expected = 100 // (world * interleave) * interleave + min(
            max(100 % (world * interleave) - rank * interleave, 0), interleave
        )
        assert int(count) == expected
        # Compact and in the order of the list.
        mine = [p for p in positions[0].tolist() if p // interleave % world == rank]
        assert len(mine) == len(own)
    assert sorted(seen) == list(range(100))


def test_B041_valid_entries_move_to_the_front_in_order() -> None:
    local, count = own_positions(torch.tensor([[-1, 7, -1, 3]]), rank=0, world=1)
    assert local.tolist() == [[7, 3, -1, -1]]
    assert count.tolist() == [2]


def test_no_rows_no_table_and_bad_input() -> None:
    empty = torch.empty(0, 4, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    assert positions_to_slots(empty, none, torch.zeros(1, 1, dtype=torch.int32), 4).shape == (0, 4)
    table = torch.zeros(0, 0, dtype=torch.int32)
    assert positions_to_slots(torch.tensor([[1]]), torch.tensor([0]), table, 4).tolist() == [[-1]]
    with pytest.raises(ValueError, match="rank"):
        raw(own_positions)(torch.tensor([[1]]), rank=2, world=2)
    with pytest.raises(ValueError, match="request_of_row"):
        raw(positions_to_slots)(torch.tensor([[1]]), torch.tensor([0, 0]), table, 4)
    with pytest.raises(ValueError, match="page_size"):
        raw(positions_to_slots)(torch.tensor([[1]]), torch.tensor([0]), table, 0)

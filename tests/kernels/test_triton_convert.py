"""The conversion kernels: the twin's slots, alone and with a rank's share moved to the front."""

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack

from mla_kernels.triton_kernels import convert
from mla_kernels.triton_kernels.convert import own_slots, positions_to_slots
from mla_ref.indexer import own_positions
from mla_ref.indexer import positions_to_slots as twin
from mla_ref.testing import cases


@pytest.mark.parametrize("case", cases("convert"), ids=str)
def test_conformance(case):
    case.check(positions_to_slots)


def hostile(dtype=torch.int32, k=1100):
    """Negative and huge positions, requests outside the table, pages of -1 and of 2^31 slots."""
    positions = torch.randint(-9, 800, (5, k)).to(dtype)
    positions[0, :2] = torch.iinfo(dtype).max
    request_of_row = torch.tensor([0, 2, -1, 3, 1])
    block_table = torch.randint(-1, 90, (3, 11), dtype=torch.int64)
    block_table[0, 3] = torch.iinfo(dtype).max // 64 + 1  # its slots do not fit
    return positions, request_of_row, block_table.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_are_the_twins(dtype):
    arguments = hostile(dtype)
    made, expected = positions_to_slots(*arguments, 64), twin(*arguments, 64)
    assert made.dtype == expected.dtype == dtype
    assert torch.equal(made, expected)


def test_views_with_steps():
    positions, request_of_row, block_table = hostile(k=64)
    wide = torch.full((3, 22), 7, dtype=torch.int32)
    wide[:, ::2] = block_table
    steps = (positions.T.contiguous().T, request_of_row.repeat_interleave(2)[::2], wide[:, ::2])
    expected = twin(positions, request_of_row, block_table, 64)
    assert torch.equal(positions_to_slots(*steps, 64), expected)


@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 1), (3, 4), (8, 64)])
def test_own_slots_are_own_positions_converted(world, interleave):
    positions, request_of_row, block_table = hostile()
    seen = torch.zeros(len(positions), dtype=torch.int32)
    for rank in range(world):
        share = {"rank": rank, "world": world, "interleave": interleave}
        local, expected_counts = own_positions(positions, **share)
        slots, counts = own_slots(positions, request_of_row, block_table, 64, **share)
        assert torch.equal(slots, twin(local, request_of_row, block_table, 64))
        assert counts.dtype == torch.int32 and torch.equal(counts, expected_counts)
        seen += counts
    assert torch.equal(seen, (positions >= 0).sum(dim=1).int())


def test_B038_none_is_never_slot_0():
    """Position -1, and an unmapped page, next to page 0, which is real data."""
    positions = torch.tensor([[-1, 0, 64, 65]], dtype=torch.int32)
    block_table = torch.tensor([[0, -1]], dtype=torch.int32)
    row = torch.tensor([0])
    assert positions_to_slots(positions, row, block_table, 64).tolist() == [[-1, 0, -1, -1]]
    slots, counts = own_slots(positions, row, block_table, 64, rank=0, world=1)
    assert slots.tolist() == [[0, -1, -1, -1]] and counts.tolist() == [3]


def test_B116_a_rank_that_owns_nothing():
    positions = torch.tensor([[0, 1, 4, -1]], dtype=torch.int32)
    table, row = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0])
    slots, counts = own_slots(positions, row, table, 64, rank=3, world=4)
    assert slots.tolist() == [[-1] * 4] and counts.tolist() == [0]


def test_results_go_where_they_are_asked_to_and_nothing_is_read_back():
    arguments = hostile(k=64)
    out = torch.full((5, 64), 5, dtype=torch.int32)
    counts = torch.full((5,), 5, dtype=torch.int32)
    with NothingReadBack():
        assert positions_to_slots(*arguments, 64, out=out) is out
        first = out.clone()
        own_slots(*arguments, 64, rank=0, world=2, out=out, counts=counts)
    assert torch.equal(first, twin(*arguments, 64))
    assert (out >= 0).sum() <= counts.sum() and counts.max() <= 64
    with pytest.raises(TypeError, match=r"out must be a torch\.int32 tensor"):
        positions_to_slots(*arguments, 64, out=out.long())
    with pytest.raises(ValueError, match=r"out must be contiguous, of shape \[5, 64\]"):
        positions_to_slots(*arguments, 64, out=out[:4])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_nothing_to_convert(shape):
    positions = torch.zeros(shape, dtype=torch.int32)
    row = torch.zeros(shape[0], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert positions_to_slots(positions, row, table, 64).shape == shape
    slots, counts = own_slots(positions, row, table, 64, rank=0, world=2)
    assert slots.shape == shape and counts.tolist() == [0] * shape[0]


@pytest.mark.parametrize("table", [(0, 3), (3, 0)], ids=str)
def test_a_table_without_pages_gives_none(table):
    positions = torch.zeros(2, 4, dtype=torch.int32)
    empty, rows = torch.zeros(table, dtype=torch.int32), torch.tensor([0, 1])
    assert (positions_to_slots(positions, rows, empty, 64) == -1).all()


GOOD = {
    "positions": torch.zeros(2, 4, dtype=torch.int32),
    "request_of_row": torch.tensor([0, 0]),
    "block_table": torch.zeros(1, 3, dtype=torch.int32),
    "page_size": 64,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": torch.zeros(2, 4)},
        {"positions": torch.zeros(8, dtype=torch.int32)},
        {"request_of_row": torch.tensor([0, 0, 0])},
        {"request_of_row": torch.tensor([0.0, 0.0])},
        {"block_table": torch.zeros(3, dtype=torch.int32)},
        {"page_size": 0},
        {"page_size": 64.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_what_the_twin_refuses(wrong):
    refuses_alike(positions_to_slots, twin, GOOD | wrong)


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"world": 0}, {"interleave": 0}])
def test_refuses_a_rank_that_is_not_there(wrong):
    share = {"rank": 0, "world": 2, "interleave": 1} | wrong

    def kernel(positions, **share):
        return own_slots(**GOOD | {"positions": positions}, **share)

    refuses_alike(kernel, own_positions, {"positions": GOOD["positions"]} | share)


def test_signatures_name_every_parameter():
    for made in convert.signatures():
        assert {*made.signature, *made.constexprs} == set(made.fn.arg_names), made.name

"""Who holds which token, and how many: arithmetic on global positions and lengths."""

import math

import pytest
import torch
from tests.support import NothingReadBack, raw

from mla_ref.indexer import own_positions
from mla_ref.parallel import global_positions, local_lens, local_positions, owner_of


def lens_on_all_ranks(length: int, world: int, interleave: int) -> list[int]:
    lens = torch.tensor([length])
    return [
        int(local_lens(lens, rank=rank, world=world, interleave=interleave))
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("length", "world", "interleave", "expected"),
    [
        (7, 4, 2, [2, 2, 2, 1]),
        (9, 4, 2, [3, 2, 2, 2]),
        (17, 4, 2, [5, 4, 4, 4]),
        (1, 4, 2, [1, 0, 0, 0]),
        (10, 4, 1, [3, 3, 2, 2]),
        (10, 2, 4, [6, 4]),
        (0, 3, 1, [0, 0, 0]),
        (5, 1, 16, [5]),
    ],
)
def test_B112_how_many_tokens_are_mine(
    length: int, world: int, interleave: int, expected: list[int]
) -> None:
    assert lens_on_all_ranks(length, world, interleave) == expected


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_B112_equal_to_counting(world: int, interleave: int) -> None:
    """Over all lengths at once; the shares of a length add up to it."""
    lengths = torch.arange(150)
    owners = [p // interleave % world for p in range(150)]
    total = torch.zeros_like(lengths)
    for rank in range(world):
        got = local_lens(lengths, rank=rank, world=world, interleave=interleave)
        assert got.tolist() == [owners[:length].count(rank) for length in range(150)]
        total += got
    assert torch.equal(total, lengths)


def test_B112_after_a_rejection_from_the_global_length() -> None:
    """14 tokens, 3 of them rejected drafts: subtracting 3 from a share is wrong on all ranks."""
    before, after = lens_on_all_ranks(14, 4, 1), lens_on_all_ranks(11, 4, 1)
    assert before == [4, 4, 3, 3] and after == [3, 3, 3, 2]
    assert all(b - 3 != a for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_B114_positions_and_places_are_a_bijection(world: int, interleave: int) -> None:
    positions = torch.arange(64, dtype=torch.int32)
    owner = owner_of(positions, world=world, interleave=interleave)
    local = local_positions(positions, world=world, interleave=interleave)
    assert owner.dtype == local.dtype == torch.int32
    assert len(set(zip(owner.tolist(), local.tolist(), strict=True))) == 64
    for rank in range(world):
        share = {"rank": rank, "world": world, "interleave": interleave}
        mine = positions[owner == rank]
        # A share has no holes, in the order of the positions.
        assert local[owner == rank].tolist() == list(range(len(mine)))
        assert torch.equal(global_positions(local[owner == rank], **share), mine)
        # The indexer's conversion speaks of the same places.
        own, count = own_positions(positions[None], **share)
        assert own[0, : int(count)].tolist() == local[owner == rank].tolist()


def test_none_stays_none() -> None:
    """-1 // 4 is -1 and -1 % 4 is 3: by arithmetic alone "none" would belong to the last rank."""
    none = torch.tensor([-1, -7])
    for interleave in (1, 4):
        assert owner_of(none, world=4, interleave=interleave).tolist() == [-1, -1]
        assert local_positions(none, world=4, interleave=interleave).tolist() == [-1, -1]
        for rank in (0, 3):
            share = {"rank": rank, "world": 4, "interleave": interleave}
            assert global_positions(none, **share).tolist() == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_a_place_whose_position_does_not_fit_is_none(dtype: torch.dtype, interleave: int) -> None:
    """2^62 times 4 is 0 in int64: asked after the product, it would be position 0."""
    top, share = torch.iinfo(dtype).max, {"world": 4, "interleave": interleave}
    assert global_positions(torch.tensor([2**62]), rank=0, world=4).tolist() == [-1]
    for rank in (0, 3):
        # The last positions that fit and are this rank's, then the places behind the last one.
        fits = [p for p in range(top - 200, top + 1) if p // interleave % 4 == rank]
        local = [p // (4 * interleave) * interleave + p % interleave for p in fits]
        places = torch.tensor([*local, *range(local[-1] + 1, local[-1] + 40), top], dtype=dtype)
        found = global_positions(places, rank=rank, **share)
        assert found.dtype == dtype and found.tolist() == fits + [-1] * 40


@pytest.mark.parametrize(
    "function",
    [
        owner_of,
        local_positions,
        lambda p, **share: global_positions(p, rank=0, **share),
        lambda p, **share: local_lens(p, rank=0, **share),
        lambda p, **share: own_positions(p[None], rank=0, **share),
    ],
)
def test_a_round_of_ranks_that_int32_cannot_hold_is_refused(function) -> None:
    """As a divisor of int32 positions 2^32 + 4 would come round to 4."""
    positions = torch.tensor([5], dtype=torch.int32)
    for world, interleave in ((2, 2**32 + 4), (2**16, 2**15), (2**31, 1)):
        with pytest.raises(ValueError, match=r"world \* interleave must be below 2\*\*31, got"):
            function(positions, world=world, interleave=interleave)
    function(positions, world=1, interleave=2**31 - 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_B115_the_causal_bound_of_a_share(world: int) -> None:
    """With interleave 1 it is ceil((causal length - rank) / world), and 0 if that is negative."""
    lengths = torch.arange(100)
    for rank in range(world):
        expected = [max(math.ceil((length - rank) / world), 0) for length in range(100)]
        assert local_lens(lengths, rank=rank, world=world).tolist() == expected


def test_B115_verifier_rows_have_a_bound_each() -> None:
    """Lengths 9 to 12 of one request: each further row makes the share of one rank longer."""
    rows = torch.tensor([[9, 10, 11, 12]])
    found = torch.cat([local_lens(rows, rank=rank, world=4) for rank in range(4)])
    assert found.tolist() == [[3, 3, 3, 3], [2, 3, 3, 3], [2, 2, 3, 3], [2, 2, 2, 3]]
    assert found.diff(dim=1).sum(dim=0).tolist() == [1, 1, 1]
    # The bug: every rank takes its length for the last row and counts down.
    shifted = found[:, -1:] - torch.arange(3, -1, -1)
    assert (found - shifted).amax() == 3


def test_B115_a_rank_must_be_one_of_the_world() -> None:
    lens = torch.tensor([5])
    for function in (local_lens, global_positions):
        for rank in (-1, 4, 5):
            with pytest.raises(ValueError, match="rank must"):
                raw(function)(lens, rank=rank, world=4)
        with pytest.raises(TypeError, match="rank must be an int"):
            raw(function)(lens, rank=torch.tensor(1), world=4)


@pytest.mark.parametrize("function", [owner_of, local_positions])
def test_bad_input_is_named(function) -> None:
    good = torch.tensor([5])
    for world, interleave, name in ((0, 1, "world"), (2, 0, "interleave"), (2.0, 1, "world")):
        with pytest.raises((ValueError, TypeError), match=name):
            raw(function)(good, world=world, interleave=interleave)
    for wrong in ([5], None, torch.tensor([5.0])):
        with pytest.raises(TypeError, match="positions must be a tensor of int32 or int64"):
            raw(function)(wrong, world=2)


def test_nothing_is_read_back() -> None:
    lens = torch.tensor([5, 9])
    with NothingReadBack():
        local_lens(lens, rank=1, world=2)
        owner_of(lens, world=2)
        global_positions(local_positions(lens, world=2), rank=1, world=2)

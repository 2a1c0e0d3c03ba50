"""Where a rank keeps its tokens, and which caches are written through which slots."""

import dataclasses

import pytest
import torch
from tests.support import bits, raw

from mla_ref.batching import Step
from mla_ref.cache import new_index_cache, write_index_keys, write_rows
from mla_ref.parallel import share_of_rows, slot_mapping_on_rank, slots_on_rank


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_B114_slots_are_a_bijection(interleave: int) -> None:
    """Pages of 4, 2 ranks, 64 positions in 8 virtual blocks of 8."""
    table = torch.tensor([[5, 0, 7, 2, 6, 1, 4, 3]], dtype=torch.int32)
    positions, first = torch.arange(64)[None], torch.tensor([0])
    found = set()
    for rank in range(2):
        share = {"rank": rank, "world": 2, "interleave": interleave}
        slots = slots_on_rank(positions, first, table, 4, **share)[0]
        assert slots.dtype == torch.int32
        for position, slot in enumerate(slots.tolist()):
            if position // interleave % 2 != rank:
                assert slot == -1
                continue
            offset = position % 8 // (2 * interleave) * interleave + position % interleave
            assert slot == int(table[0, position // 8]) * 4 + offset
            found.add((rank, slot))
    assert found == {(rank, slot) for rank in range(2) for slot in range(32)}


def test_requests_and_none() -> None:
    table = torch.tensor([[3], [1]], dtype=torch.int32)
    positions = torch.tensor([[0, 1, -1], [3, 2, 8], [1, 1, 1]])
    slots = slots_on_rank(positions, torch.tensor([0, 1, -1]), table, 4, rank=1, world=2)
    # 8 lies in the second virtual block, which the table does not have; row 2 belongs to nobody.
    assert slots.tolist() == [[-1, 12, -1], [5, -1, -1], [-1, -1, -1]]


def test_a_page_must_hold_whole_chunks() -> None:
    arguments = (torch.tensor([[0]]), torch.tensor([0]), torch.tensor([[0]]), 4)
    for interleave in (3, 8):
        with pytest.raises(ValueError, match="page_size must be a multiple of interleave"):
            raw(slots_on_rank)(*arguments, rank=0, world=2, interleave=interleave)
        with pytest.raises(ValueError, match="page_size must be a multiple of interleave"):
            raw(share_of_rows)((torch.zeros(5, 3),), 4, rank=0, world=2, interleave=interleave)


def verifier_step() -> Step:
    """A resumed prefill, 4 verifier rows and one decode row, padded."""
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    return Step.build([0, 9, 3], [6, 4, 1], table, 4, num_reqs_padded=5, num_tokens_padded=16)


def bits_of(step: Step) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    return {k: bits(v).clone() for k, v in values.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_B120_replicated_keys_and_sharded_rows_from_one_step(interleave: int) -> None:
    world, step = 2, verifier_step()
    before = bits_of(step)
    names = torch.arange(1.0, 12)[:, None]  # one number a real token
    content = torch.cat([names, torch.zeros(5, 1)])
    local_table = torch.tensor([[2, 0], [1, 3], [5, 4], [-1, -1], [-1, -1]])
    held = []
    for rank in range(world):
        share = {"rank": rank, "world": world, "interleave": interleave}
        index = new_index_cache(12, 4, dtype=torch.float32, head_dim=1)
        latent = torch.zeros(6, 4, 1)
        write_index_keys(index, content, step.slot_mapping)
        slots = slot_mapping_on_rank(step, local_table, **share)
        write_rows(latent, content, slots)
        # The replicated cache holds every key on every rank, the sharded one its owner's rows.
        assert sorted(index[index > 0].tolist()) == names.flatten().tolist()
        mine = (step.positions // interleave % world == rank) & (step.request_of_row >= 0)
        assert sorted(latent[latent > 0].tolist()) == content[mine].flatten().tolist()
        assert torch.equal(slots >= 0, mine)
        held += latent[latent > 0].tolist()
        # The bug: keys through the slots of a share are missing on every rank.
        wrong = new_index_cache(12, 4, dtype=torch.float32, head_dim=1)
        write_index_keys(wrong, content, slots)
        assert (wrong > 0).sum() == mine.sum() < 11
    assert sorted(held) == names.flatten().tolist()
    after = bits_of(step)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_slots_of_a_step_are_where_the_share_is_looked_for() -> None:
    """Written token by token, read as a share: the cache of `share_of_rows`."""
    step = Step.build([0, 0], [13, 6], torch.arange(8).view(2, 4), 4)
    rows = torch.randn(19, 3)
    for rank in range(2):
        share = {"rank": rank, "world": 2, "interleave": 2}
        expected, table = share_of_rows((rows[:13], rows[13:]), 4, **share)
        cache = torch.full_like(expected, torch.nan)
        write_rows(cache, rows, slot_mapping_on_rank(step, table, **share))
        assert torch.equal(bits(cache), bits(expected))


def test_a_token_without_a_page_is_an_error() -> None:
    """A slot of -1 would mean "another rank writes it", and nobody would."""
    step = Step.build([0, 9], [6, 4], torch.arange(8).view(2, 4), 4)
    for table in (torch.tensor([[0], [1]]), torch.tensor([[0, 1], [2, -1]])):
        with pytest.raises(ValueError, match=r"block_table .* position 9 of request 1"):
            raw(slot_mapping_on_rank)(step, table, rank=1, world=2)
    with pytest.raises(TypeError, match="step must be a Step"):
        raw(slot_mapping_on_rank)(None, torch.tensor([[0]]), rank=0, world=2)

"""What lesson 14 says of tiles: the model against the rungs, its memory, and the bug it plants."""

import math

import numpy as np
import pytest
import torch
from tests.support import raw

from mla_ref.attention import sparse_extend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted
from mla_ref.teaching.tile_memory import Memory
from mla_ref.teaching.tile_model import Place, attend_in_tiles, attend_program, row_addresses

IN_32_BITS = planted.row_addresses_in_32_bits
PAGE = 64 * 656
SCALE = 192**-0.5


def problem(rows=3, heads=3, k=50, size=1.0):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, heads, 576, generator=generator).bfloat16()
    numbers = torch.randn(64, 576, generator=generator) * size
    cache = pack_fp8_rows(numbers).unflatten(0, (4, 16))
    lists = torch.stack([torch.randperm(64, generator=generator)[:k] for _ in range(rows)])
    lists[torch.rand(rows, k, generator=generator) < 0.3] = -1
    return q, cache, lists.int()


def assert_is_rung_9(q, cache, lists, **kwargs):
    found = attend_in_tiles(q, cache, lists, softmax_scale=SCALE, **kwargs)
    numbers = unpack_fp8_rows(cache).double()
    expected = sparse_extend(q.double(), numbers, lists, softmax_scale=SCALE)
    assert compare(found.out.double(), expected.out).agrees(rel_l2=1e-3)
    assert compare(found.lse.double(), expected.lse).agrees(rel_l2=1e-6)


@pytest.mark.parametrize("tile", [8, 32, 64])
@pytest.mark.parametrize("num_splits", [1, 2, 9])
def test_the_tile_model_is_rung_9(tile, num_splits):
    assert_is_rung_9(*problem(), tile=tile, num_splits=num_splits)


@pytest.mark.parametrize("size", [2.0**-66, 2.0**-20, 2.0**20, 2.0**66])
def test_scales_that_float16_does_not_hold(size):
    q, cache, lists = problem(size=size)
    assert_is_rung_9(q / size, cache, lists)


def test_B063_a_list_that_begins_with_a_tile_of_none():
    q, cache, lists = problem(k=40)
    lists[:, :16] = -1
    lists[1] = -1
    assert_is_rung_9(q, cache, lists, tile=8)
    found = attend_in_tiles(q, cache, lists, softmax_scale=SCALE, tile=8)
    assert not found.out[1].any()
    assert (found.lse[1] == -math.inf).all()


def test_B065_the_tile_model_touches_no_slot_that_is_not_listed():
    q, cache, lists = problem()
    lists[lists == 0] = -1
    lists[:, -1] = 64  # outside
    expected = attend_in_tiles(q, cache, lists, softmax_scale=SCALE)
    unlisted = [slot for slot in range(64) if slot not in lists.tolist()[0]]
    cache.view(64, 656)[unlisted] = 0xFF
    found = attend_in_tiles(q[:1], cache, lists[:1], softmax_scale=SCALE)
    assert torch.equal(found.out, expected.out[:1])
    assert torch.equal(found.lse, expected.lse[:1])


def far_place():
    return Place(6 << 30, 64, PAGE, 656, 64 * 60_000)


def test_B059_addresses_in_32_bits_are_right_below_two_gigabytes_and_not_beyond():
    slots = np.array([0, 64 * 51_150 - 1, 3_273_603, 3_273_604, 64 * 51_151], dtype=np.int32)
    right = row_addresses(slots, far_place())
    assert right.tolist() == [(6 << 30) + 656 * int(slot) for slot in slots]
    off = IN_32_BITS(slots, far_place()) - right
    assert off.tolist() == [0, 0, 0, -(2**32), -(2**32)]


def test_B059_in_32_bits_another_user_s_row_is_read_without_an_error():
    q, cache, _ = problem()
    mine, other = (half.contiguous().numpy() for half in cache.flatten(0, 1).split(32))
    entries = np.arange(64 * 51_151, 64 * 51_151 + 32, dtype=np.int32)
    memory, start = Memory(), (6 << 30) + 51_151 * PAGE
    memory.place(start, mine)
    call = {"q": q[0].float().numpy(), "place": far_place(), "softmax_scale": SCALE}
    call |= {"memory": memory, "entries": entries}
    with pytest.raises(IndexError, match="illegal memory access at byte 4,295,007,232"):
        attend_program(**call, addresses=IN_32_BITS)
    memory.place(start - 2**32, other)
    wrong, _ = attend_program(**call, addresses=IN_32_BITS)
    there = Place(start - 2**32, 64, PAGE, 656, 64)
    expected, _ = attend_program(**{**call, "place": there, "entries": entries - entries[0]})
    assert np.array_equal(wrong, expected)
    assert not np.array_equal(wrong, attend_program(**call)[0])


def test_memory_refuses_what_overlaps_and_what_is_not_bytes():
    memory = Memory()
    memory.place(10, np.zeros(6, np.uint8))
    memory.place(16, np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="address 5: a piece of 6 bytes is at 10"):
        memory.place(5, np.zeros(6, np.uint8))
    with pytest.raises(TypeError, match="data must be a contiguous uint8 array"):
        memory.place(99, np.zeros(6, np.float32))


def test_memory_reads_each_dtype_and_not_beyond_a_piece():
    memory, one = Memory(), torch.tensor([1.5])
    memory.place(8, one.numpy().view(np.uint8))
    memory.place(20, one.bfloat16().view(torch.uint8).numpy())
    memory.place(30, one.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    everything = np.ones(1, bool)
    for address, dtype in ((8, "float32"), (20, "bfloat16"), (30, "e4m3")):
        assert memory.load(np.array([address]), dtype, everything).tolist() == [1.5]
        assert memory.load(np.array([-999]), dtype, ~everything).tolist() == [0.0]
    with pytest.raises(IndexError, match="illegal memory access at byte 9"):
        memory.load(np.array([9]), "float32", everything)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_splits": 0}, "num_splits must be at least 1"),
        ({"tile": 0}, "tile must be at least 1"),
        ({"kv_cache": torch.zeros(4, 16, 576, dtype=torch.uint8)}, "kv_cache"),
        ({"kv_cache": torch.zeros(4, 32, 656, dtype=torch.uint8)[:, :16]}, "contiguous"),
    ],
)
def test_what_the_tile_model_refuses(change, message):
    q, cache, lists = problem()
    given = {"q": q, "kv_cache": cache, "indices": lists, "softmax_scale": SCALE} | change
    with pytest.raises(ValueError, match=message):
        raw(attend_in_tiles)(**given)


@pytest.mark.thorough
def test_operand_tiles_draws_one_box_an_instruction_at_one_scale():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from mla_ref.teaching import style

    (axes,) = figures.operand_tiles(12, 32, (64, 16)).axes
    boxes = [(p.get_width(), p.get_height()) for p in axes.patches if not p.get_fill()]
    assert boxes == [(8, 16)] * (16 + 4 + 4)
    wanted = [p for p in axes.patches if to_hex(p.get_facecolor()) == style.BLUE]
    assert [(p.get_width(), p.get_height()) for p in wanted] == [(32, 12), (32, 12), (12, 32)]
    shares = [t.get_text().split(", ")[-1] for t in axes.texts if "instructions" in t.get_text()]
    assert shares == ["18.75% wanted", "75% wanted", "75% wanted"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "heads must be at least 1"),
        ((8, 65), "tokens must be at most 64"),
        ((8, 32, (24,)), "paddings must be up to two multiples of 16"),
        ((8, 32, (16, 32, 64)), "paddings must be up to two multiples of 16"),
    ],
)
@pytest.mark.usefixtures("plain_calls")
def test_tiles_that_cannot_be_drawn(arguments, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        figures.operand_tiles(*arguments)

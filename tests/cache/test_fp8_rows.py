"""The 656-byte row: its bytes where the format has them, and what they cost in precision."""

import math
import struct

import pytest
import torch
from tests.support import raw

from mla_ref.cache import write_rows
from mla_ref.cache.fp8_rows import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics.float8 import SCALE_READERS, SCALE_RULES
from mla_ref.testing.definition import E4M3


def by_hand(row: bytes) -> list[float]:
    """Read one row with struct and the definition of E4M3, no code of the library's readers."""
    scales = struct.unpack("<4f", row[512:528])
    table = E4M3.tolist()
    latent = [
        struct.unpack("<f", struct.pack("<f", table[b] * scales[i // 128]))[0]
        for i, b in enumerate(row[:512])
    ]
    rope = [struct.unpack("<f", b"\0\0" + row[i : i + 2])[0] for i in range(528, 656, 2)]
    return latent + rope


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_bytes_stand_where_the_format_has_them(rule: str) -> None:
    rows = torch.randn(3, 576) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    packed = pack_fp8_rows(rows, scale_rule=rule)
    assert packed.shape == (3, 656)
    for row, numbers in zip(packed, unpack_fp8_rows(packed), strict=True):
        assert by_hand(bytes(row.tolist())) == numbers.tolist()


def test_the_rotary_part_is_bfloat16_and_nothing_else() -> None:
    rows = torch.randn(5, 576)
    assert torch.equal(
        unpack_fp8_rows(pack_fp8_rows(rows))[:, 512:], rows[:, 512:].bfloat16().float()
    )


def test_a_known_row() -> None:
    row = torch.zeros(1, 576)
    row[0, 0], row[0, 128], row[0, 512] = 448.0, -1.0, 1.5
    packed = pack_fp8_rows(row, scale_rule="pow2")[0]
    assert packed[0] == 0x7E  # 448 / 1
    assert packed[128] == 0xF8  # -1 / 2^-8 = -256
    assert packed[512:528].view(torch.float32).tolist() == [1.0, 2.0**-8, 2.0**-13, 2.0**-13]
    assert packed[528:530].tolist() == [0xC0, 0x3F]  # bfloat16 1.5, little-endian


def test_B048_a_tile_of_zeros() -> None:
    rows = torch.randn(2, 576)
    rows[0, 128:256] = 0
    for rule in SCALE_RULES:
        packed = pack_fp8_rows(rows, scale_rule=rule)
        assert packed[0, 128:256].eq(0).all()
        assert unpack_fp8_rows(packed)[0, 128:256].eq(0).all()
        assert unpack_fp8_rows(packed).isfinite().all()


def test_B053_divide_then_cast_then_nothing_lost() -> None:
    rows = torch.randn(50, 576) * 20
    back = unpack_fp8_rows(pack_fp8_rows(rows))
    latent, expected = back[:, :512], rows[:, :512]
    # Half a step of a 3-bit mantissa; below the smallest normal number the step is absolute.
    scale = expected.unflatten(1, (4, 128)).abs().amax(dim=-1, keepdim=True) / 448
    floor = (scale * 2.0**-10).expand(-1, -1, 128).flatten(1)
    assert ((latent - expected).abs() <= torch.maximum(expected.abs() * 2.0**-4, floor)).all()


def test_B051_the_rotary_part_has_no_part_in_the_scales() -> None:
    rows = torch.full((1, 576), 0.1)
    rows[:, 512:] = 1.0
    back = unpack_fp8_rows(pack_fp8_rows(rows))
    assert torch.equal(back[:, 512:], rows[:, 512:])
    assert (back[:, :512] - 0.1).abs().max() < 0.1 * 2**-4


def test_B055_a_model_without_rotary_key() -> None:
    rows = torch.randn(4, 512)
    packed = pack_fp8_rows(rows)
    assert packed.shape == (4, 656)
    assert packed[:, 528:].eq(0).all()
    padded = torch.cat([rows, torch.zeros(4, 64)], dim=1)
    assert torch.equal(packed, pack_fp8_rows(padded))


def test_B156_rows_of_another_width_or_kind_are_refused() -> None:
    for width in (576, 584, 655, 657, 0):
        with pytest.raises(ValueError, match="656 bytes"):
            raw(unpack_fp8_rows)(torch.zeros(2, width, dtype=torch.uint8))
    with pytest.raises(TypeError, match="uint8"):
        raw(unpack_fp8_rows)(torch.zeros(2, 656))
    for wrong in (torch.zeros(2, 575), torch.zeros(2, 576, dtype=torch.int32), torch.zeros(576)):
        with pytest.raises((TypeError, ValueError), match="kv_rows"):
            raw(pack_fp8_rows)(wrong)
    with pytest.raises(ValueError, match="rule"):
        raw(pack_fp8_rows)(torch.zeros(2, 576), scale_rule="e8m0")


@pytest.mark.parametrize("reader", SCALE_READERS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_nan_and_inf_stay_in_their_group_and_are_all_of_it(rule: str, reader: str) -> None:
    """With a finite scale the group's other numbers would be cut at 448 of it, unseen."""
    rows = 1e4 * torch.randn(1, 576)
    rows[0, 5], rows[0, 130] = math.nan, -math.inf
    back = unpack_fp8_rows(pack_fp8_rows(rows, scale_rule=rule), scale_reader=reader)[0]
    assert back[:256].isnan().all()
    rows[0, 5] = rows[0, 130] = 0.0
    clean = unpack_fp8_rows(pack_fp8_rows(rows, scale_rule=rule), scale_reader=reader)[0]
    assert torch.equal(back[256:], clean[256:]) and clean.isfinite().all()


def test_no_rows_and_rows_in_pages() -> None:
    assert pack_fp8_rows(torch.zeros(0, 576)).shape == (0, 656)
    rows = torch.randn(3, 576, dtype=torch.float64)
    cache = torch.full((2, 4, 656), 0xFF, dtype=torch.uint8)
    write_rows(cache, pack_fp8_rows(rows), torch.tensor([6, -1, 0]))
    assert torch.equal(unpack_fp8_rows(cache[1, 2]), unpack_fp8_rows(pack_fp8_rows(rows))[0])
    assert torch.equal(unpack_fp8_rows(cache[0, 0]), unpack_fp8_rows(pack_fp8_rows(rows))[2])
    assert cache[0, 1].eq(0xFF).all()


def test_strided_input_gives_the_same_bytes() -> None:
    rows = torch.randn(576, 6).T
    assert torch.equal(pack_fp8_rows(rows), pack_fp8_rows(rows.contiguous()))
    wide = torch.zeros(6, 700, dtype=torch.uint8)
    wide[:, :656] = pack_fp8_rows(rows)
    assert torch.equal(unpack_fp8_rows(wide[:, :656]), unpack_fp8_rows(pack_fp8_rows(rows)))


@pytest.mark.parametrize("offset", range(1, 6))
def test_rows_may_begin_at_any_byte(offset: int) -> None:
    """A single row has no gaps, so `contiguous` would not move its scales to whole words."""
    rows = torch.randn(2, 576)
    packed, expected = pack_fp8_rows(rows), unpack_fp8_rows(pack_fp8_rows(rows))
    memory = torch.zeros(offset + 656, dtype=torch.uint8)
    memory[offset:] = packed[0]
    assert torch.equal(unpack_fp8_rows(memory[offset:]), expected[0])
    together = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed.flatten()])
    assert torch.equal(unpack_fp8_rows(together[offset:].view(2, 656)), expected)
    # And bytes that lie across: the last dimension is not the one without gaps.
    across = packed.T.contiguous().T
    assert torch.equal(unpack_fp8_rows(across), expected)

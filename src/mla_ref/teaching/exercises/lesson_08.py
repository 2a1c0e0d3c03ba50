"""Exercises of lesson 08: a row to its 656 bytes, and back."""

import torch
from torch import Tensor

from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_same_bits, expect_tensor


def _rows(seed: int, n: int) -> Tensor:
    """Random rows whose groups differ in size, with a rotary key larger than the latent."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 576, generator=generator)
    rows[:, 128:256] *= 30
    rows[:, 256:384] /= 100
    rows[:, 512:] *= 1000
    return rows


def _packed(pack: Function, kv_rows: Tensor) -> Tensor:
    return expect_tensor(pack(kv_rows), torch.uint8, (kv_rows.shape[0], 656), "the packed row")


def _floats(rows: Tensor) -> Tensor:
    return rows[:, 512:528].contiguous().view(torch.float32)


def _expect_rows(pack: Function, kv_rows: Tensor) -> None:
    """Scales to one rounding, numbers as near as E4M3 comes, the rotary key to the bit."""
    got, best = _packed(pack, kv_rows), pack_fp8_rows(kv_rows)
    scales, expected = _floats(got), _floats(best)
    expect_close(scales / expected, torch.ones_like(expected), "scale / expected", max_abs=1e-6)
    expect_same_bits(got[:, 528:], best[:, 528:], "the bytes of the rotary key")
    latent = kv_rows[:, :512].float()
    found, nearest = (unpack_fp8_rows(rows)[:, :512] for rows in (got, best))
    if not bool(found.isfinite().all()):
        raise Complaint("a number of the latent came back as NaN")
    size = latent.unflatten(1, (4, 128)).abs().amax(dim=-1).repeat_interleave(128, dim=1)
    excess = (found - latent).abs() - (nearest - latent).abs()
    # A number half-way between two, to rounding, may go either way.
    if bool((excess > 1e-5 * size).any()):
        row, at = divmod(int((excess / size.clamp(min=1e-30)).argmax()), 512)
        raise Complaint(
            f"number {at} of row {row} is {latent[row, at]:.6g} and came back as "
            f"{found[row, at]:.6g}, but E4M3 with this scale holds {nearest[row, at]:.6g}"
        )


def _check_by_hand(pack: Function) -> None:
    row = torch.zeros(1, 576)
    row[0, [0, 128, 256, 384]] = torch.tensor([448.0, -448.0, 448.0, 448.0])
    row[0, 1], row[0, 512] = 1.0, 1.0
    got = _packed(pack, row)
    for first, expected in (
        (0, (0x7E, 0x38, 0)),  # 448 and 1 in E4M3
        (128, (0xFE, 0)),  # -448
        (512, (0, 0, 0x80, 0x3F)),  # 1.0 in float32, the lowest byte first
        (528, (0x80, 0x3F, 0, 0)),  # 1.0 and 0.0 in bfloat16
    ):
        found = got[0, first : first + len(expected)].tolist()
        if found != list(expected):
            raise Complaint(
                f"bytes {first} to {first + len(expected) - 1} are {_hex(found)}, expected "
                f"{_hex(expected)}"
            )


def _hex(values: list[int] | tuple[int, ...]) -> str:
    return " ".join(f"{value:02x}" for value in values)


def _check_zeros(pack: Function) -> None:
    rows = _rows(3, 3)
    rows[1, 128:256] = 0
    rows[2] = 0
    got = _packed(pack, rows)
    if not bool((_floats(got) > 0).all()) or not bool(_floats(got).isfinite().all()):
        raise Complaint(
            f"the scales of a row of zeros are {_floats(got)[2].tolist()}, expected finite "
            "numbers above 0"
        )
    expect_same_bits(
        unpack_fp8_rows(got)[2], torch.zeros(576), "what a row of zeros comes back as,"
    )
    numbers = unpack_fp8_rows(got)[1, 128:256]
    expect_same_bits(numbers, torch.zeros(128), "what a group of zeros comes back as,")


PACK = Exercise(
    id="08-pack",
    title="Pack a row",
    task=(
        "Write `pack(kv_rows)`: rows of 512 latent numbers and 64 of the rotary key, in any float "
        "dtype, as 656 bytes each. A group's scale is its largest magnitude over 448, in float32. "
        "A group of zeros has some finite scale above 0, and comes back as zeros."
    ),
    signature='def pack(kv_rows: Float[Tensor, "n 576"]) -> UInt8[Tensor, "n 656"]:',
    cases=(
        Case(
            "one row, by hand",
            "448 is the largest E4M3 number, 0x7E, so these groups have the scale 1. Numbers of "
            "more than one byte lie with the lowest byte first.",
            _check_by_hand,
        ),
        Case(
            "five rows whose groups differ in size",
            "One scale for the row would leave its small groups a few bits. The rotary key is the "
            "largest part here and must not enter a scale.",
            lambda pack: _expect_rows(pack, _rows(1, 5)),
        ),
        Case(
            "bfloat16 rows",
            "Rows arrive in the dtype of the model. amax / 448 in bfloat16 is off by up to 0.4 %.",
            lambda pack: _expect_rows(pack, _rows(2, 5).bfloat16()),
        ),
        Case(
            "zeros in a group, and in a whole row",
            "Padding and unused parts of a latent are zeros: 0 / 0 is NaN, and NaN stays in the "
            "cache.",
            _check_zeros,
        ),
        Case("no rows", "A step without new tokens.", lambda pack: _expect_rows(pack, _rows(4, 0))),
    ),
)


def _check_unpack_by_hand(unpack: Function) -> None:
    row = torch.zeros(1, 656, dtype=torch.uint8)
    row[0, 0], row[0, 511] = 0x7E, 0xB8  # 448 and -1
    row[0, 512:516] = torch.tensor([0.5]).view(torch.uint8)
    row[0, 524:528] = torch.tensor([4.0]).view(torch.uint8)
    row[0, 654:] = torch.tensor([2.0]).bfloat16().view(torch.uint8)
    expected = torch.zeros(1, 576)
    expected[0, 0], expected[0, 511], expected[0, 575] = 224.0, -4.0, 2.0
    got = expect_tensor(unpack(row), torch.float32, (1, 576), "the row")
    expect_same_bits(got + 0.0, expected, "the row")


def _unpack_case(name: str, why: str, shape: tuple[int, ...]) -> Case:
    def check(unpack: Function) -> None:
        n = int(torch.tensor(shape).prod())
        packed = pack_fp8_rows(_rows(n, n)).unflatten(0, shape)
        got = expect_tensor(unpack(packed), torch.float32, (*shape, 576), "the rows")
        expect_same_bits(got, unpack_fp8_rows(packed), "the rows")

    return Case(name, why, check)


def _refuses(unpack: Function, rows: Tensor) -> None:
    try:
        result = unpack(rows)
    except Complaint as complaint:
        if isinstance(complaint.__cause__, ValueError):
            return
        raise
    what = f"{str(rows.dtype).removeprefix('torch.')} rows of {rows.shape[-1]}"
    raise Complaint(
        f"{what} gave a tensor of shape {list(getattr(result, 'shape', ()))}, expected a ValueError"
    )


def _check_other_widths(unpack: Function) -> None:
    for width in (584, 576, 528, 657):
        _refuses(unpack, torch.zeros(4, width, dtype=torch.uint8))


def _check_other_kinds(unpack: Function) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _refuses(unpack, torch.zeros(4, 656, dtype=dtype))


UNPACK = Exercise(
    id="08-unpack",
    title="Unpack it, or refuse",
    task=(
        "Write `unpack(rows)`: the 576 numbers of each row, in float32, the stored scale as it is. "
        "There may be any number of dimensions before the last. Raise a `ValueError` for anything "
        "but `uint8` rows of 656 bytes."
    ),
    signature='def unpack(rows: UInt8[Tensor, "*shape 656"]) -> Float[Tensor, "*shape 576"]:',
    cases=(
        Case(
            "one row, by hand",
            "The first group's scale is 0.5, the last one's 4, and the last number of the rotary "
            "key is 2.",
            _check_unpack_by_hand,
        ),
        _unpack_case("five rows", "Scales that are no powers of two: take them as they are.", (5,)),
        _unpack_case("pages of rows", "A cache has pages; a gather has rows and entries.", (3, 4)),
        Case(
            "rows of another width",
            "Layouts have no tag. Rows of 584 bytes that are cut at 656 are nonsense, silently.",
            _check_other_widths,
        ),
        Case(
            "numbers in place of bytes",
            "A cache of bfloat16 numbers that somebody took for bytes.",
            _check_other_kinds,
        ),
    ),
)

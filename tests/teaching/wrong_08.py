"""Wrong answers to the exercises of lesson 08, each with the case that must catch it."""

import torch

from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.teaching import planted


def assemble(data, scales, k_pe):
    parts = (data, scales, k_pe.contiguous())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def as_e4m3(numbers):
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)


def bytes_by_value(kv_rows):
    """The cast that makes 1.5 to 1 where its bits were meant."""
    packed = pack_fp8_rows(kv_rows)
    packed[:, :512] = kv_rows[:, :512].clamp(0, 255).to(torch.uint8)
    return packed


def scales_first(kv_rows):
    packed = pack_fp8_rows(kv_rows)
    return torch.cat([packed[:, 512:528], packed[:, :512], packed[:, 528:]], dim=1)


def big_endian(kv_rows):
    packed = pack_fp8_rows(kv_rows)
    scales = packed[:, 512:528].unflatten(1, (4, 4)).flip(2).flatten(1)
    return torch.cat([packed[:, :512], scales, packed[:, 528:]], dim=1)


def one_scale_for_the_row(kv_rows):
    row = kv_rows.clone()
    scale = (row[:, :512].float().abs().amax(dim=1, keepdim=True) / 448).clamp(min=2.0**-126)
    return assemble(as_e4m3(row[:, :512] / scale), scale.expand(-1, 4), row[:, 512:].bfloat16())


def scale_of_latent_and_key(kv_rows):
    scale = (kv_rows.float().abs().amax(dim=1, keepdim=True) / 448).clamp(min=2.0**-126)
    return assemble(
        as_e4m3(kv_rows[:, :512].float() / scale), scale.expand(-1, 4), kv_rows[:, 512:].bfloat16()
    )


def in_the_dtype_of_the_row(kv_rows):
    groups = kv_rows[:, :512].unflatten(1, (4, 128))
    scales = (groups.abs().amax(dim=-1) / 448).float().clamp(min=2.0**-126)
    data = as_e4m3(groups.float() / scales[..., None]).flatten(1)
    return assemble(data, scales, kv_rows[:, 512:].bfloat16())


def cuts_and_does_not_round(kv_rows):
    """Drops bits: the numbers come out too small by up to an eighth."""
    packed = pack_fp8_rows(kv_rows)
    numbers = unpack_fp8_rows(packed)[:, :512]
    too_far = numbers.abs() > kv_rows[:, :512].abs().float()
    packed[:, :512] -= too_far.to(torch.uint8)
    return packed


def scale_0_for_zeros(kv_rows):
    packed = pack_fp8_rows(kv_rows)
    amax = kv_rows[:, :512].float().unflatten(1, (4, 128)).abs().amax(dim=-1)
    packed[:, 512:528] = (amax / 448).view(torch.uint8)
    return packed


def stacks(kv_rows):
    return torch.cat([pack_fp8_rows(row[None]) for row in kv_rows])


def exponent_only(rows):
    if rows.dtype != torch.uint8 or rows.shape[-1] != 656:
        raise ValueError("rows must be uint8 rows of 656")
    return planted.unpack_fp8_rows_by_exponent(rows)


def one_scale_for_all(rows):
    scale = rows[..., 512:516].contiguous().view(torch.float32)
    latent = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float() * scale
    return torch.cat([latent, rows[..., 528:].contiguous().view(torch.bfloat16).float()], dim=-1)


def in_bfloat16(rows):
    return unpack_fp8_rows(rows).bfloat16()


def rows_only(rows):
    return torch.stack([unpack_fp8_rows(row[None])[0] for row in rows.reshape(-1, 656)])


def takes_any_width(rows):
    data, scales = rows[..., :512].contiguous(), rows[..., 512:528].contiguous()
    groups = data.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    latent = (groups * scales.view(torch.float32)[..., None]).flatten(-2)
    k_pe = rows[..., 528:656].contiguous().view(torch.bfloat16).float()
    return torch.cat([latent, k_pe], dim=-1)


def checks_the_width_only(rows):
    if rows.shape[-1] != 656:
        raise ValueError("rows must have 656 bytes")
    return takes_any_width(rows.to(torch.uint8))


WRONG_08 = [
    ("08-pack", bytes_by_value, "one row, by hand", "bytes 0 to 2 are ff 01 00, expected 7e 38"),
    ("08-pack", scales_first, "one row, by hand", "bytes 0 to 2"),
    ("08-pack", big_endian, "one row, by hand", "bytes 512 to 515 are 3f 80 00 00"),
    ("08-pack", one_scale_for_the_row, "five rows whose groups", "scale / expected"),
    ("08-pack", scale_of_latent_and_key, "five rows whose groups", "scale / expected"),
    ("08-pack", cuts_and_does_not_round, "five rows whose groups", "came back as"),
    ("08-pack", in_the_dtype_of_the_row, "bfloat16 rows", "scale / expected"),
    ("08-pack", planted.pack_fp8_rows_without_floor, "zeros in a group", "finite"),
    ("08-pack", scale_0_for_zeros, "zeros in a group", "expected finite"),
    ("08-pack", stacks, "no rows", "it raised"),
    ("08-unpack", one_scale_for_all, "one row, by hand", "is -0.5, expected -4"),
    ("08-unpack", in_bfloat16, "one row, by hand", "bfloat16"),
    ("08-unpack", exponent_only, "five rows", "the rows at"),
    ("08-unpack", takes_any_width, "rows of another width", "expected a ValueError"),
    ("08-unpack", rows_only, "pages of rows", "shape [12, 576]"),
    ("08-unpack", checks_the_width_only, "numbers in place of bytes", "expected a ValueError"),
]

"""Bugs around the 656-byte row, as published libraries had them."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mla_ref.cache import unpack_fp8_rows
from mla_ref.numerics.float8 import to_e4m3


def unpack_fp8_rows_by_exponent(
    rows: UInt8[Tensor, "*shape 656"], *, scale_reader: str = "stored"
) -> Float[Tensor, "*shape 576"]:
    """BUG: keeps the exponent of a scale and drops its mantissa, whatever the writer stored.

    Right for every row whose writer rounds scales to powers of two. Where the writer stores
    amax / 448 as it is, a group comes out too small by a factor between 1 and 2.
    """
    del scale_reader
    return unpack_fp8_rows(rows, scale_reader="truncated")


def pack_fp8_rows_without_floor(
    kv_rows: Float[Tensor, "n 576"], *, scale_rule: str = "fp32"
) -> UInt8[Tensor, "n 656"]:
    """BUG: amax / 448 is 0 for a group of zeros, and 0 / 0 is NaN. Right for all other groups."""
    del scale_rule
    latent = kv_rows[:, :512].to(torch.float32).unflatten(1, (4, 128))
    scales = latent.abs().amax(dim=-1) / 448.0
    data = to_e4m3(latent / scales[..., None]).flatten(1)
    k_pe = kv_rows[:, 512:].to(torch.bfloat16).contiguous()
    return torch.cat([data, scales.view(torch.uint8), k_pe.view(torch.uint8)], dim=1)

"""What a served kernel computes from a list of slots, in torch: rows, queries, weights, one split.

The products are float32 matrix products of numbers that were rounded first, as in a tensor core
with float32 accumulators. The order of the sums is torch's, not the kernel's; it is the only part
of the rounding that is not followed. A kernel that keeps a running maximum quantises each tile
under the maximum so far and this function under that of the split. A common factor on a tile
changes no E4M3 digit, so the two differ only where weights fall below the floor of 1e-10.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.selected import gather_slots, gather_stored
from mla_ref.backends.served.profile import Arithmetic
from mla_ref.cache.fp8_rows import GROUP, GROUPS, LATENT, ROPE
from mla_ref.numerics import AttentionResult
from mla_ref.numerics.float8 import E4M3_MAX, from_e4m3, group_scale, read_scale, to_e4m3

# Keys that share one scale of their FP8 weights, and the unit in which lists are split.
TILE = 64
_LOG2_E = math.log2(math.e)
_WEIGHT_FLOOR = 1e-10


class ServedRows(NamedTuple):
    """Listed rows, as a kernel multiplies them.

    Attributes:
        keys: The factor of the first product.
        values: The factor of the second, in groups of 128.
        scales: What the weights are multiplied with before they are rounded: the scales of the
            groups where values are bare E4M3 numbers, else None.
        valid: Which entries count; the others are zeros.
    """

    keys: Float[Tensor, "rows k 576"]
    values: Float[Tensor, "rows k 4 128"]
    scales: Float[Tensor, "rows k 4"] | None
    valid: Bool[Tensor, "rows k"]


def read_rows(
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None,
    arithmetic: Arithmetic,
) -> ServedRows:
    """Gather the listed rows and round them as the kernel does.

    Args:
        kv_cache: Rows of 656 bytes, or of 576 numbers in a float dtype.
        indices: As in `gather_slots`.
        counts: As in `gather_slots`.
        arithmetic: How scales are read and rows rounded.
    """
    if kv_cache.dtype != torch.uint8:
        numbers, valid = gather_slots(kv_cache, indices, counts, torch.float32)
        return ServedRows(numbers, _in_groups(numbers[..., :LATENT]), None, valid)
    packed, valid = gather_stored(kv_cache, indices, counts)
    data = _in_groups(from_e4m3(packed[..., :LATENT].contiguous()))
    stored, k_pe = packed[..., LATENT:].split((4 * GROUPS, 2 * ROPE), dim=-1)
    scales = read_scale(stored.contiguous().view(torch.float32), arithmetic.scale_reader)
    if arithmetic.rows == "bfloat16":
        # Both factors and the product are bfloat16: up to 2^-8 for the scale and 2^-8 for the
        # product. A power of two is a bfloat16, and E4M3 times it is one too: nothing is lost then.
        values = data.to(torch.bfloat16) * scales.to(torch.bfloat16)[..., None]
    else:
        values = data * scales[..., None]
    keys = torch.cat([values.flatten(-2), k_pe.contiguous().view(torch.bfloat16)], dim=-1)
    if arithmetic.weights.startswith("e4m3"):
        return ServedRows(keys.to(torch.float32), data, scales, valid)
    return ServedRows(keys.to(torch.float32), values.to(torch.float32), None, valid)


def round_queries(q: Float[Tensor, "rows h 576"], arithmetic: Arithmetic) -> Tensor:
    """Queries in float32, after the rounding that the kernel does to them."""
    wide = q.to(torch.float32)
    if arithmetic.queries == "as given":
        return wide
    latent = _in_groups(wide[..., :LATENT])
    scales = group_scale(latent.abs().amax(dim=-1), "pow2-floor")[..., None]
    rounded = (_round_e4m3(latent / scales) * scales).flatten(-2)
    return torch.cat([rounded, wide[..., LATENT:]], dim=-1)


def attend_rows(
    queries: Float[Tensor, "rows h 576"],
    rows: ServedRows,
    *,
    softmax_scale: float,
    weights: str,
    q_dtype: torch.dtype,
) -> AttentionResult:
    """Softmax attention of each row over its entries, `lse` in base 2 and -inf for none.

    Args:
        queries: From `round_queries`.
        rows: From `read_rows`.
        softmax_scale: The un-absorbed scale.
        weights: As in `Arithmetic`.
        q_dtype: What "q dtype" means.
    """
    if rows.valid.shape[1] == 0:
        shape = queries.shape[:2]
        return AttentionResult(
            queries.new_zeros(*shape, LATENT), queries.new_full(shape, -torch.inf)
        )
    scores = queries @ rows.keys.mT * (softmax_scale * _LOG2_E)
    scores = scores.masked_fill(~rows.valid[:, None], -torch.inf)
    highest = scores.amax(dim=-1)
    anchor = torch.where(highest == -torch.inf, 0.0, highest)
    shares = torch.exp2(scores - anchor[..., None])
    total = shares.sum(dim=-1)
    out = _weigh(shares, rows, weights, q_dtype) / torch.where(total == 0, 1.0, total)[..., None]
    return AttentionResult(out, torch.log2(total) + anchor)


def _weigh(shares: Tensor, rows: ServedRows, weights: str, q_dtype: torch.dtype) -> Tensor:
    """The second product, [rows, h, 512]."""
    if rows.scales is None:
        rounded = shares if weights == "float32" else shares.to(q_dtype).to(torch.float32)
        return rounded @ rows.values.flatten(-2)
    groups = [
        _round_weights(shares * rows.scales[:, None, :, group], weights) @ rows.values[:, :, group]
        for group in range(GROUPS)
    ]
    return torch.cat(groups, dim=-1)


def _round_weights(weights: Float[Tensor, "rows h k"], rule: str) -> Float[Tensor, "rows h k"]:
    """E4M3 with one scale for each tile of keys, in one pass or with the residual in a second."""
    k = weights.shape[-1]
    tiles = torch.nn.functional.pad(weights, (0, -k % TILE)).unflatten(-1, (-1, TILE))
    step = tiles.amax(dim=-1, keepdim=True).clamp(min=_WEIGHT_FLOOR) / E4M3_MAX
    scaled = tiles / step
    rounded = _round_e4m3(scaled)
    if rule == "e4m3+residual":
        rounded = rounded + _round_e4m3(scaled - rounded)
    return (rounded * step).flatten(-2)[..., :k]


def _round_e4m3(x: Tensor) -> Tensor:
    return from_e4m3(to_e4m3(x))


def _in_groups(latent: Tensor) -> Tensor:
    return latent.unflatten(-1, (GROUPS, GROUP))

"""Merging attention over disjoint sets of keys: the piece that makes attention divisible.

If two parts saw different keys, with outputs O_a, O_b and log-sum-exps L_a, L_b, then the
attention over all keys is

    L = log(exp(L_a) + exp(L_b)),    O = O_a exp(L_a - L) + O_b exp(L_b - L).

Tiles of one kernel, splits of a long context and ranks of a parallel cache all meet here. The
empty part (0, -inf) is the identity, bit for bit; the order of merging changes rounding only.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import describe, require_same_device
from mla_ref.numerics.lse import require_wide
from mla_ref.numerics.result import AttentionResult


def merge(
    out_a: Float[Tensor, "*rows d"],
    lse_a: Float[Tensor, "*rows"],
    out_b: Float[Tensor, "*rows d"],
    lse_b: Float[Tensor, "*rows"],
    *,
    validate: bool = True,
) -> AttentionResult:
    """Attention over the union of two disjoint key sets.

    Args:
        out_a: Normalised output over the first set.
        lse_a: Its natural log-sum-exp, float32 or float64; -inf where the set is empty, in which
            case the row of `out_a` is not used, whatever it holds.
        out_b: As `out_a`, for the second set.
        lse_b: As `lse_a`, for the second set.
        validate: Check values too. Leave it on unless the tensors are on a GPU in a step that must
            not read back to the host.

    Returns:
        `out` in the dtype of the outputs and `lse` in the dtype of the LSEs.

    Raises:
        TypeError: An LSE is narrower than float32.
        ValueError: Shapes or dtypes of the parts differ, or an LSE is +inf. Some peers mark an
            empty part with +inf: convert it with `to_natural_lse(..., empty="+inf")`.
    """
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            raise TypeError(
                f"{name}_a and {name}_b must be tensors, got {describe(a)} and {describe(b)}"
            )
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{name}_a is {describe(a)} but {name}_b is {describe(b)}")
    require_same_device({"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})
    outs, lses = torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b])
    require_parts(("out_a", "lse_a and lse_b"), outs, lses, validate)
    return _merged(outs, lses)


def merge_many(
    outs: Float[Tensor, "parts *rows d"],
    lses: Float[Tensor, "parts *rows"],
    *,
    validate: bool = True,
) -> AttentionResult:
    """Attention over the union of any number of disjoint key sets, in one pass.

    Args:
        outs: Normalised outputs, one part after the other.
        lses: Their natural log-sum-exps; an empty part has -inf and its output is not used.
        validate: As in `merge`.

    Returns:
        `out` in the dtype of `outs` and `lse` in the dtype of `lses`. Without any part, or where
        all parts are empty: 0 and -inf.
    """
    require_parts(("outs", "lses"), outs, lses, validate)
    if outs.shape[0] == 0:
        return AttentionResult(
            outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -torch.inf)
        )
    return _merged(outs, lses)


def _merged(
    outs: Float[Tensor, "parts *rows d"], lses: Float[Tensor, "parts *rows"]
) -> AttentionResult:
    """What `merge` and `merge_many` do once their input is checked; one part at least."""
    heaviest = lses.amax(dim=0)
    # -inf minus -inf is NaN (vllm#39148, flashinfer#4051): where all parts are empty subtract 0.
    anchor = torch.where(heaviest == -torch.inf, 0.0, heaviest)
    weights = torch.exp(lses - anchor)
    # Part after part: torch.sum is free to choose an order, and from 16 parts on it chooses by the
    # place of a number among its neighbours, so the bits of a row would depend on the other rows.
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    nothing = total == 0
    shares = (weights / torch.where(nothing, 1.0, total))[..., None]
    # An empty part's output may be uninitialised memory, and 0 * NaN is NaN. -0.0 is the number
    # that changes nothing when added, not even the sign of a zero.
    used = torch.where((lses == -torch.inf)[..., None], -0.0, outs)
    out = shares[0] * used[0]
    for share, part in zip(shares[1:], used[1:], strict=True):
        out = out + share * part
    out = torch.where(nothing[..., None], 0.0, out).to(outs.dtype)
    # log(1) is +0.0, and +0.0 + -0.0 would lose the sign of a part that stands alone.
    lse = torch.where(total == 1, anchor, torch.log(total) + anchor)
    return AttentionResult(out, lse)


def require_parts(names: tuple[str, str], outs: Tensor, lses: Tensor, validate: bool) -> None:
    """Raise unless the parts fit together; `names` of outputs and LSEs are for the message."""
    out_name, lse_name = names
    require_wide(lse_name, lses)
    if not isinstance(outs, Tensor) or not outs.is_floating_point():
        raise TypeError(f"{out_name} must be a floating-point tensor, got {describe(outs)}")
    if lses.ndim == 0 or outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"{lse_name} must have the shape of {out_name} without its last dimension, got "
            f"{describe(lses)} beside {describe(outs)}"
        )
    require_same_device({out_name: outs, lse_name: lses})
    if validate and bool((lses == torch.inf).any()):
        raise ValueError(
            f"{lse_name} must not hold +inf: an empty part has -inf here. If a peer marks empty "
            'rows with +inf, convert first: to_natural_lse(lse, base=..., empty="+inf")'
        )

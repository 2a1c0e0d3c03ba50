"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm, computed in float32 or wider."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import describe, require_float, require_same_device, require_scale, require_size
from mla_ref.numerics import compute_dtype


def rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], *, eps: float
) -> Float[Tensor, "*rows d"]:
    """Divide each row by its root mean square and multiply by `weight`.

    The weight is multiplied before the cast back to x's dtype, as DeepSeek's own code does;
    transformers casts first, which differs in the last bfloat16 bit.

    Args:
        x: Rows to normalise.
        weight: One factor for each of the d numbers.
        eps: Added to the mean square. Pass the model's own: GLM-5 says 1e-5 where others say 1e-6,
            and a library default in its place is a known bug (transformers#44261).

    Raises:
        TypeError: A tensor does not hold floating-point numbers.
        ValueError: `weight` does not fit x's rows, or `eps` is not positive: rows of zeros, such
            as padding, would become NaN.
    """
    _require_norm(x, weight, eps)
    wide = x.to(compute_dtype(x))
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * (wide * inverse_rms)).to(x.dtype)


def layer_norm(
    x: Float[Tensor, "*rows d"],
    weight: Float[Tensor, " d"],
    bias: Float[Tensor, " d"],
    *,
    eps: float,
) -> Float[Tensor, "*rows d"]:
    """Subtract each row's mean, divide by its standard deviation, multiply and add.

    The norm of the indexer's keys. It is not an RMSNorm: that one keeps the mean and has no bias,
    and in its place it runs and selects other keys (FastDeploy#7398).

    Args:
        x: Rows to normalise.
        weight: One factor for each of the d numbers.
        bias: One summand for each.
        eps: Added to the variance; 1e-6 in the published indexers, whatever `rms_norm_eps` says.

    Raises:
        TypeError: As `rms_norm`.
        ValueError: As `rms_norm`.
    """
    _require_norm(x, weight, eps)
    require_float("bias", bias, "d")
    require_size("bias", bias, 0, x.shape[-1], "one summand a number of x's rows")
    require_same_device({"x": x, "bias": bias})
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


def _require_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor [..., d], got {describe(x)}")
    if x.ndim == 0:
        raise ValueError(f"x must have the shape [..., d], got {describe(x)}")
    require_float("weight", weight, "d")
    require_size("weight", weight, 0, x.shape[-1], "one factor a number of x's rows")
    require_same_device({"x": x, "weight": weight})
    require_scale("eps", eps)

"""Rotary position embedding (RoFormer, arXiv:2104.09864) and its YaRN stretch (arXiv:2309.00071).

A pair of numbers is turned by an angle that grows with the position. Two layouts say which two
numbers are a pair: *interleaved* (2i, 2i+1), as in DeepSeek's and GLM's attention, and *half-split*
(i, i + d/2), as in the lightning indexer of DeepSeek-V3.2. Both give the same dot products if the
query and the key use the same one; mixed, they give a model that is subtly worse (vllm#28968).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_scale,
    require_size,
)
from mla_ref.numerics import compute_dtype


@dataclass(frozen=True)
class YarnConfig:
    """How far and how YaRN stretches the context.

    Attributes:
        factor: New context length over the original one.
        original_max_position_embeddings: Context length of the pretraining, in tokens.
        beta_fast: Frequencies that turn more often than this within it keep their speed.
        beta_slow: Frequencies that turn less often are slowed down by `factor`.
        mscale: Weight of the logarithmic factor on cos and sin; 0 for none.
        mscale_all_dim: Weight of the logarithmic factor on the softmax scale; 0 for none.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        """Raise on a stretch that is none."""
        require_scale("factor", self.factor)
        require_scale("beta_fast", self.beta_fast)
        require_scale("beta_slow", self.beta_slow)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) != 0:
                require_scale(name, getattr(self, name))
        require_count(
            "original_max_position_embeddings", self.original_max_position_embeddings, at_least=1
        )


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model.

    Attributes:
        dim: How many numbers of a head are turned; even. 0 means no rotary part.
        theta: Base of the frequencies.
        interleaved: True for pairs (2i, 2i+1), False for pairs (i, i + dim/2).
        yarn: The stretch, or None.
    """

    dim: int
    theta: float
    interleaved: bool
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        """Raise on an odd dimension (transformers#48648), a useless base or a wrong kind."""
        require_count("rope dim", self.dim)
        # Any text but "" is true, "no" too, and would choose the other pairs.
        if not isinstance(self.interleaved, bool):
            raise TypeError(f"interleaved must be a bool, got {describe(self.interleaved)}")
        if self.yarn is not None and not isinstance(self.yarn, YarnConfig):
            raise TypeError(f"yarn must be a YarnConfig or None, got {describe(self.yarn)}")
        if self.dim % 2:
            raise ValueError(f"rope dim must be even, since numbers turn in pairs, got {self.dim}")
        if require_scale("theta", self.theta) <= 1:
            raise ValueError(f"theta must be greater than 1, got {self.theta}")


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig) -> Float[Tensor, " half_dim"]:
    """Angle per position of each pair, in radians, float64.

    Without YaRN theta^(-2i/dim). With it, a ramp between "unchanged" for pairs that turn at least
    `beta_fast` times within the original context and "divided by factor" for those that turn at
    most `beta_slow` times.
    """
    if not isinstance(config, RopeConfig):
        raise TypeError(f"config must be a RopeConfig, got {describe(config)}")
    plain = config.theta ** (-torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim)
    if config.yarn is None or config.dim == 0:
        return plain
    yarn, dim = config.yarn, config.dim

    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    # A ramp of width 0 would divide by 0; the reference code widens it by 0.001.
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(
    config: RopeConfig,
    positions: Int[Tensor, " s"],
    *,
    frequencies: Float[Tensor, " half_dim"] | None = None,
) -> tuple[Float[Tensor, "s half_dim"], Float[Tensor, "s half_dim"]]:
    """Cosine and sine of every position's angles, float64.

    Positions go up to a million, and an error of the frequency grows with them: from frequencies
    in bfloat16 (base 1e4) a cosine of position 6143 is off by 1.05, seen in a public MLA reference.
    With YaRN both carry mscale(factor, mscale) / mscale(factor, mscale_all_dim), which is 1 for
    DeepSeek's models.

    Args:
        config: The rotary embedding.
        positions: Of each row.
        frequencies: What `inverse_frequencies` gives, on the device of the positions; None: made
            here and copied there, which a captured step cannot do.
    """
    require_integer("positions", positions, "s")
    if frequencies is None:
        frequencies = inverse_frequencies(config).to(positions.device)
    angles = positions[:, None].double() * frequencies
    stretch = 1.0
    if config.yarn is not None:
        stretch = yarn_mscale(config.yarn.factor, config.yarn.mscale) / yarn_mscale(
            config.yarn.factor, config.yarn.mscale_all_dim
        )
    return angles.cos() * stretch, angles.sin() * stretch


def apply_rope(
    x: Float[Tensor, "s *heads dim"],
    cos: Float[Tensor, "s half_dim"],
    sin: Float[Tensor, "s half_dim"],
    *,
    interleaved: bool,
) -> Float[Tensor, "s *heads dim"]:
    """Turn the pairs of x's last dimension; the output keeps x's layout and dtype.

    Args:
        x: One row a token; any dimensions between the token and the turned numbers.
        cos: From `rope_table`.
        sin: From `rope_table`.
        interleaved: Which numbers are a pair, see the module's text.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor [s, ..., dim], got {describe(x)}")
    if x.ndim < 2:
        raise ValueError(f"x must have the shape [s, ..., dim], got {describe(x)}")
    require_float("cos", cos, "s half_dim")
    require_float("sin", sin, "s half_dim")
    require_same_device({"x": x, "cos": cos, "sin": sin})
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even last dimension, got {x.shape[-1]}")
    for name, table in (("cos", cos), ("sin", sin)):
        require_size(name, table, 0, x.shape[0], "one row a token of x")
        require_size(name, table, 1, x.shape[-1] // 2, "half of x's last dimension")
    wide = x.to(compute_dtype(x))
    row = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1] // 2)
    cos, sin = cos.to(wide.dtype).reshape(row), sin.to(wide.dtype).reshape(row)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    if interleaved:
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(turned, dim=-1).to(x.dtype)

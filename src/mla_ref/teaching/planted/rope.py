"""Bugs in rotary positions, as published libraries had them."""

from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.layers import RopeConfig, apply_rope, inverse_frequencies


def rope_in_halves(
    x: Float[Tensor, "s *heads dim"],
    cos: Float[Tensor, "s half_dim"],
    sin: Float[Tensor, "s half_dim"],
    *,
    interleaved: bool,
) -> Float[Tensor, "s *heads dim"]:
    """BUG: takes `interleaved` and does not read it; the pairs are always (i, i + dim/2).

    Right for a checkpoint in halves. For one in pairs, lengths stay, position 0 stays, and scores
    still depend on the distance alone: no property of RoPE is violated. They are not the scores
    that the model was trained with.
    """
    del interleaved
    return apply_rope(x, cos, sin, interleaved=False)


def rope_table_in_bfloat16(
    config: RopeConfig, positions: Int[Tensor, " s"]
) -> tuple[Float[Tensor, "s half_dim"], Float[Tensor, "s half_dim"]]:
    """BUG: positions and frequencies in the dtype of the model before they are multiplied.

    Right at position 0. bfloat16 has 8 bits, so beyond 256 it skips integers: neighbouring tokens
    get one position, and an angle of many turns is off by a good part of a turn.
    """
    frequencies = inverse_frequencies(config).bfloat16()
    angles = (positions[:, None].bfloat16() * frequencies).double()
    return angles.cos(), angles.sin()

"""Which rank holds which token of a request: ownership by interleaving.

`interleave` neighbouring positions stay together, and such chunks are dealt to the ranks in turn.
With 2 ranks and interleave 4, ten tokens lie as

    position        0  1  2  3  4  5  6  7  8  9
    rank            0  0  0  0  1  1  1  1  0  0
    local position  0  1  2  3  0  1  2  3  4  5

The indexer and `mla_ref.parallel`, which tells lengths and the way back, both stand on it. `rank`,
`world` (number of ranks) and `interleave` mean the same wherever they occur.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.checks import describe, require_count


def owner_of(
    positions: Int[Tensor, "*shape"], *, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """The rank that holds each position: (p // interleave) % world; -1 for a negative position."""
    require_integers("positions", positions)
    require_owner(0, world, interleave)
    return torch.where(positions < 0, -1, positions // interleave % world)


def local_positions(
    positions: Int[Tensor, "*shape"], *, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """Where each position lies in its owner's share; -1 for a negative position.

    (p // (world * interleave)) * interleave + p % interleave.
    """
    require_integers("positions", positions)
    require_owner(0, world, interleave)
    local = positions // (world * interleave) * interleave + positions % interleave
    return torch.where(positions < 0, -1, local)


def require_owner(rank: int, world: int, interleave: int) -> None:
    """Raise unless the three describe a rank's share: 0 <= rank < world, interleave >= 1.

    A round of all ranks must fit int32, in which positions may come: a larger divisor would wrap.
    """
    require_count("world", world, at_least=1)
    require_count("interleave", interleave, at_least=1)
    if world * interleave >= 2**31:
        raise ValueError(
            f"world * interleave must be below 2**31, got {world} * {interleave} = "
            f"{world * interleave}"
        )
    if require_count("rank", rank) >= world:
        raise ValueError(f"rank must lie in 0 .. {world - 1}, got {rank}")


def require_integers(name: str, value: object) -> None:
    """Raise a TypeError unless `value` is a tensor of int32 or int64, of any shape."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {describe(value)}")

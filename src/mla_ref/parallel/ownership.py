"""Which rank holds which token of a request: ownership by interleaving.

`interleave` neighbouring positions stay together, and such chunks are dealt to the ranks in turn.
With 2 ranks and interleave 4, ten tokens lie as

    position        0  1  2  3  4  5  6  7  8  9
    rank            0  0  0  0  1  1  1  1  0  0
    local position  0  1  2  3  0  1  2  3  4  5

Everything here is a function of the *global* position or length. A share is never advanced,
shifted or subtracted from: each further token makes one rank's share longer and leaves the others
as they are (ROCm/ATOM#2118, vllm#50391).

`rank`, `world` (number of ranks) and `interleave` mean the same throughout `mla_ref.parallel`.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.checks import describe, require_count


def owner_of(
    positions: Int[Tensor, "*shape"], *, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """The rank that holds each position: (p // interleave) % world; -1 for a negative position."""
    _require_integers("positions", positions)
    require_share(0, world, interleave)
    return torch.where(positions < 0, -1, positions // interleave % world)


def local_positions(
    positions: Int[Tensor, "*shape"], *, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """Where each position lies in its owner's share; -1 for a negative position.

    (p // (world * interleave)) * interleave + p % interleave.
    """
    _require_integers("positions", positions)
    require_share(0, world, interleave)
    local = positions // (world * interleave) * interleave + positions % interleave
    return torch.where(positions < 0, -1, local)


def global_positions(
    local: Int[Tensor, "*shape"], *, rank: int, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """The position in the request of each place in a rank's share; -1 for a negative place.

    -1 too where the position does not fit the integers of `local`: it would come round as another
    one. It rises with `local`, so a tie that a rank decides for the lower local position is decided
    for the lower global one.
    """
    _require_integers("local", local)
    require_share(rank, world, interleave)
    chunk, offset = local.long() // interleave, local % interleave
    found = (chunk * world + rank) * interleave + offset
    none = (local < 0) | (found > torch.iinfo(local.dtype).max)
    return torch.where(none, -1, found).to(local.dtype)


def local_lens(
    global_lens: Int[Tensor, "*shape"], *, rank: int, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """How many of the first L tokens of a request a rank holds, for each L.

    For a verifier batch pass the causal length of every row. Rows of lengths 9, 10, 11, 12 on 4
    ranks have 3, 3, 3, 3 keys on rank 0 and 2, 2, 2, 3 on rank 3: a rank that takes its length for
    the last row and counts down by one a row loses its newest keys.

    Args:
        global_lens: Lengths over all ranks; one below 0 counts as 0. Nothing is read back to the
            host.
        rank: Whose share.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.

    Returns:
        Lengths in the dtype of `global_lens`; over all ranks they add up to it.
    """
    _require_integers("global_lens", global_lens)
    require_share(rank, world, interleave)
    lens = global_lens.clamp(min=0)
    rounds, rest = lens // (world * interleave), lens % (world * interleave)
    return rounds * interleave + (rest - rank * interleave).clamp(0, interleave)


def require_share(rank: int, world: int, interleave: int) -> None:
    """Raise unless the three describe a rank's share: 0 <= rank < world, interleave >= 1."""
    require_count("world", world, at_least=1)
    require_count("interleave", interleave, at_least=1)
    if require_count("rank", rank) >= world:
        raise ValueError(f"rank must lie in 0 .. {world - 1}, got {rank}")


def _require_integers(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {describe(value)}")

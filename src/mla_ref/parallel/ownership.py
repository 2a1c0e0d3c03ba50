"""From a rank's share to the request and back: positions and lengths.

Who holds which token stands in `mla_ref.cache.ownership`, where the indexer finds it too.
Everything here is a function of the *global* position or length. A share is never advanced,
shifted or subtracted from: each further token makes one rank's share longer and leaves the others
as they are (ROCm/ATOM#2118, vllm#50391).
"""

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.cache.ownership import require_integers, require_owner


def global_positions(
    local: Int[Tensor, "*shape"], *, rank: int, world: int, interleave: int = 1
) -> Int[Tensor, "*shape"]:
    """The position in the request of each place in a rank's share; -1 for a negative place.

    -1 too where the position does not fit the integers of `local`: it would come round as another
    one. It rises with `local`, so a tie that a rank decides for the lower local position is decided
    for the lower global one.
    """
    require_integers("local", local)
    require_owner(rank, world, interleave)
    chunk, offset = local.long() // interleave, local.long() % interleave
    # Asked before it is multiplied: a product beyond int64 comes round and looks small.
    most = ((torch.iinfo(local.dtype).max - offset) // interleave - rank) // world
    none = (local < 0) | (chunk > most)
    found = (torch.where(none, 0, chunk) * world + rank) * interleave + offset
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
    require_integers("global_lens", global_lens)
    require_owner(rank, world, interleave)
    lens = global_lens.clamp(min=0)
    rounds, rest = lens // (world * interleave), lens % (world * interleave)
    return rounds * interleave + (rest - rank * interleave).clamp(0, interleave)

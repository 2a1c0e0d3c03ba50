"""What ranks tell each other: the same tensor to all, or to each the heads that it keeps.

Two collectives of `torch.distributed`, chosen among those that gloo and NCCL have. The parts always
arrive in the order of the ranks, so that all ranks merge in one order and get the same bits.
"""

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from mla_ref.cache.ownership import require_owner


def gather_over_ranks(
    x: Shaped[Tensor, "*shape"], *, world: int, group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, "world *shape"]:
    """Every rank's `x`, of one shape and dtype, in the order of the ranks."""
    if world == 1:
        return x[None]
    parts = x.new_empty(world, *x.shape)
    dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
    return parts


def exchange_heads(
    x: Shaped[Tensor, "rows all_heads *rest"],
    *,
    world: int,
    group: dist.ProcessGroup | None = None,
) -> Shaped[Tensor, "world rows h *rest"]:
    """From each rank the part of its `x` for this rank's heads, in the order of the ranks.

    Rank r keeps heads r * h .. r * h + h - 1 of the world * h in `x`.
    """
    for_each = x.unflatten(1, (world, -1)).movedim(1, 0).contiguous()
    if world == 1:
        return for_each
    parts = for_each.new_empty(for_each.shape)
    dist.all_to_all_single(parts, for_each, group=group)
    return parts


def require_group(
    group: dist.ProcessGroup | None, *, rank: int, world: int, interleave: int = 1
) -> None:
    """Raise a ValueError unless this process is rank `rank` of `world` in `group`.

    Args:
        group: None for the default group. With one rank there is nothing to exchange and no group
            is needed.
        rank: This rank in the group; not its number among all processes, which may differ.
        world: Number of ranks in the group.
        interleave: Checked with the other two.
    """
    require_owner(rank, world, interleave)
    if world == 1:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"group must be a process group of world {world}, but torch.distributed is not "
            "initialised: call torch.distributed.init_process_group first, or simulate_ranks"
        )
    found = dist.get_rank(group), dist.get_world_size(group)
    if found != (rank, world):
        raise ValueError(
            f"group must have this process as rank {rank} of world {world}, but there it is rank "
            f"{found[0]} of {found[1]}"
        )

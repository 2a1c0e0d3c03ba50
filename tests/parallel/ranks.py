"""What each process of `test_processes.py` runs: the library's functions, results into a file.

A module of its own, since a new process imports it by name and must not import pytest's tests.
"""

import datetime
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tests.parallel.problems import CASES, CPU, PAGE, RankProblem, rank_problem
from torch import Tensor

from mla_ref.backends import TorchBackend
from mla_ref.parallel import (
    attend_on_rank,
    global_positions,
    local_lens,
    plan_for_ranks,
    select_topk_on_rank,
    share_of_rows,
)

INTERLEAVES = (1, 2, 16)
TOPK = 16
Results = dict[str, Tensor]


def run_rank(process: int, directory: str, processes: int, world: int) -> None:
    """Join the processes, run every case in groups of `world` neighbours, save what came out."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    # Of all networks only the machine itself, whatever its name resolves to.
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=process,
        world_size=processes,
        timeout=datetime.timedelta(seconds=120),
    )
    first = process // world * world
    # Every process must take part in making every group, also those that it is not in.
    groups = [
        dist.new_group(list(range(start, start + world))) for start in range(0, processes, world)
    ]
    group = None if world == processes else groups[process // world]
    results: Results = {}
    for name in CASES:
        for heads in ("all", "own"):
            attend(name, heads, process - first, world, group, results)
    for interleave in INTERLEAVES:
        share = {"rank": process - first, "world": world, "interleave": interleave}
        scores, visible = topk_problem()
        n = int(local_lens(torch.tensor([scores.shape[1]]), **share))
        mine = scores[:, global_positions(torch.arange(n), **share)]
        results[f"top-k, interleave {interleave}"] = select_topk_on_rank(
            mine, visible, TOPK, group=group, **share
        )
    results["refused"] = torch.tensor(refused(process - first, world, group))
    torch.save(results, Path(directory) / f"{process}.pt")
    dist.destroy_process_group()


def attend(
    name: str,
    heads: str,
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
    results: Results,
) -> None:
    """One case, its heads all on every rank or dealt to the ranks, with each interleave."""
    problem = rank_problem(**CASES[name]) if heads == "all" else own_heads(name, world)
    h = problem.q.shape[1] // world
    mine = slice(rank * h, rank * h + h) if heads == "own" else slice(None)
    plan = plan_for_ranks(
        TorchBackend(), problem.spec, max_rows=len(problem.q), max_requests=9, device=CPU
    )
    for interleave in interleaves(name, heads):
        share = {"rank": rank, "world": world, "interleave": interleave}
        cache, table = share_of_rows(problem.kv_rows, PAGE, **share)
        got = attend_on_rank(
            problem.q[:, mine],
            cache,
            problem.positions,
            problem.visible_lens,
            request_of_row=problem.request_of_row,
            block_table=table,
            plan=plan,
            softmax_scale=problem.softmax_scale,
            counts=problem.counts,
            sink=None if problem.sink is None else problem.sink[mine],
            group=group,
            heads=heads,
            **share,
        )
        key = f"{name}, interleave {interleave}, {heads} heads"
        results[f"{key}, out"], results[f"{key}, lse"] = got


def interleaves(name: str, heads: str) -> tuple[int, ...]:
    """All for heads that every rank has; for own heads one a case, in turn, to save time."""
    if heads == "all":
        return INTERLEAVES
    turn = list(CASES).index(name) % len(INTERLEAVES)
    return INTERLEAVES[turn : turn + 1]


def own_heads(name: str, world: int) -> RankProblem:
    """The case with a head number that the ranks can share."""
    return rank_problem(**(CASES[name] | {"heads": world * CASES[name].get("heads", 3)}))


def topk_problem() -> tuple[Tensor, Tensor]:
    """Scores of few values, so that most ties are across ranks; some rows see few keys."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(-1, 3, (6, 75), generator=generator).float()
    return scores, torch.tensor([75, 74, 73, 3, 1, 0])


def refused(rank: int, world: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a rank or world that is not the group's is an error, before anything is sent."""
    scores, visible = topk_problem()
    found = []
    for wrong in ({"rank": (rank + 1) % world, "world": world}, {"rank": rank, "world": world + 1}):
        try:
            select_topk_on_rank(scores, visible, TOPK, group=group, **wrong)
        except ValueError as error:
            found.append(f"there it is rank {rank} of {world}" in str(error))
    return found == [True, True]

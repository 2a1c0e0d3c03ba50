"""Rung 13 in earnest: ranks are processes that exchange over gloo, on this machine alone.

One test a number of processes, with all cases inside: starting processes costs more than all they
do. Their results are compared with one rank, and bit for bit with the simulation.
"""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from tests.parallel.problems import CASES, TOLERANCE, RankProblem, rank_problem
from tests.parallel.ranks import (
    INTERLEAVES,
    TOPK,
    interleaves,
    own_heads,
    run_rank,
    topk_problem,
)
from tests.support import bits
from torch import Tensor

from mla_ref.indexer import select_topk
from mla_ref.numerics import AttentionResult, compare

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("plain_calls")]


def run_processes(directory: Path, processes: int, world: int) -> list[dict[str, Tensor]]:
    """The results of each process, in order."""
    method = "spawn"
    if "forkserver" in multiprocessing.get_all_start_methods():
        # One process imports torch and is forked for each rank: 4 of them start in 3 s of one
        # core and not in 12.
        method = "forkserver"
        multiprocessing.set_forkserver_preload(["mla_ref.parallel"])
    torch.multiprocessing.start_processes(
        run_rank, (str(directory), processes, world), nprocs=processes, start_method=method
    )
    return [torch.load(directory / f"{p}.pt", weights_only=True) for p in range(processes)]


def faults(results: list[dict[str, Tensor]], world: int) -> list[str]:
    """Everything that is not as on one rank, by name."""
    found = []
    for name in CASES:
        for heads in ("all", "own"):
            problem = rank_problem(**CASES[name]) if heads == "all" else own_heads(name, world)
            expected = problem.one_rank()
            for interleave in interleaves(name, heads):
                simulated = problem.simulate(world, interleave)
                for process, result in enumerate(results):
                    h = problem.q.shape[1] // world
                    first = process % world * h
                    mine = slice(first, first + h) if heads == "own" else slice(None)
                    key = f"{name}, interleave {interleave}, {heads} heads"
                    got = AttentionResult(*(result[f"{key}, {part}"] for part in ("out", "lse")))
                    found += [
                        f"process {process}: {key}: {fault}"
                        for fault in differences(got, expected, simulated, mine, problem)
                    ]
    scores, visible = topk_problem()
    expected_list = select_topk(scores, visible, TOPK)
    for process, result in enumerate(results):
        for interleave in INTERLEAVES:
            if not torch.equal(result[f"top-k, interleave {interleave}"], expected_list):
                found.append(f"process {process}: top-k, interleave {interleave}")
        if not result["refused"]:
            found.append(f"process {process}: a wrong rank or world is not refused")
    return found


def differences(
    got: AttentionResult,
    expected: AttentionResult,
    simulated: AttentionResult,
    heads: slice,
    problem: RankProblem,
) -> list[str]:
    """Errors beyond rounding against one rank; any other bit than the simulation's."""
    limit = TOLERANCE[problem.q.dtype]
    out, lse = compare(got.out, expected.out[:, heads]), compare(got.lse, expected.lse[:, heads])
    found = [] if out.agrees(rel_l2=limit) else [f"out: {out}"]
    found += [] if lse.agrees(max_abs=min(1e-5, 10 * limit)) else [f"lse: {lse}"]
    for name, a, b in zip(("out", "lse"), got, simulated, strict=True):
        if a.dtype != b.dtype or not torch.equal(bits(a), bits(b[:, heads])):
            found.append(f"{name}: other bits than the simulation")
    return found


@pytest.mark.parametrize(
    ("processes", "world"),
    [
        pytest.param(4, 4, id="one group of 4"),
        # Processes 2 and 3 are ranks 0 and 1 of their group.
        pytest.param(4, 2, id="two groups of 2"),
        pytest.param(8, 8, id="one group of 8", marks=pytest.mark.slow),
    ],
)
def test_ranks_in_processes_equal_one_rank(tmp_path: Path, processes: int, world: int) -> None:
    results = run_processes(tmp_path, processes, world)
    assert len(results) == processes
    wrong = faults(results, world)
    assert not wrong, "\n".join(wrong)

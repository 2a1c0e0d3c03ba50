"""Context parallelism in earnest: greedy texts by several processes that share one cache.

Each process is a rank with the whole model and a world-th of the cached rows and index keys. All
run the same engine; only attention and top-k are exchanged, over gloo on a CPU and over NCCL where
each rank has a GPU of its own. So every rank must write the same text, and that of one process, or
a near tie must explain the first difference.
"""

import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from mla_ref.checks import require_choice, require_count
from mla_ref.models.smollm2_ranks import DCPSmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.platform import resolve_device
from mla_ref.platform.stream import current_device
from mla_ref.speculative import Drafter
from mla_ref.validation.modes_acceptance import Acceptance
from mla_ref.validation.modes_texts import PAGE_SIZE, Departure, Texts, departures, write_texts
from mla_ref.validation.verdict import FAILS, HOLDS, PROVES_NOTHING

ONE_PROCESS = "one process"
Prepare = Callable[[torch.device], tuple[SparseSmolLM2, Drafter]]
"""Makes the model and its drafter on a process's device: a function that can be imported, or a
partial of one. The drafter keeps nothing from run to run, since not every rank is in every run."""


class RankError(Exception):
    """A process of the ranks has failed, was killed, or was not done in time."""


@dataclass(frozen=True)
class RankJob:
    """What every process is told.

    Attributes:
        prepare: Makes the model and the drafter.
        prompts: Tokens by name.
        worlds: Numbers of ranks, each of which is run.
        tokens: Tokens to write for each prompt.
        num_drafts: Drafts a step.
        cache_dtype: What the cache stores; None: the model's choice.
        page_size: Tokens of a page of one rank.
        device: "cpu", or "cuda": rank r has the r-th GPU.
    """

    prepare: Prepare
    prompts: Mapping[str, Sequence[int]]
    worlds: tuple[int, ...]
    tokens: int
    num_drafts: int
    cache_dtype: torch.dtype | None = None
    page_size: int = PAGE_SIZE
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        require_choice("device", self.device, ("cpu", "cuda"))
        if not self.worlds:
            raise ValueError("worlds must hold a number of ranks at least, got none")
        for world in self.worlds:
            require_count("worlds", world, at_least=1)
        require_count("num_drafts", self.num_drafts, at_least=1)

    def device_of(self, rank: int) -> torch.device:
        """Where a rank computes.

        Raises:
            ValueError: It has no GPU.
        """
        return resolve_device("cpu" if self.device == "cpu" else f"cuda:{rank}")


def run_ranks(job: RankJob, *, timeout: float = 600.0) -> dict[int, list[Texts]]:
    """Start as many processes as the largest world, run every world, and end them all.

    Args:
        job: What to run.
        timeout: Seconds after which everything is ended.

    Returns:
        By world, the texts of each of its ranks.

    Raises:
        RankError: A process failed, was killed or was not done in time. None is left behind.
        ValueError: There are fewer GPUs than ranks.
    """
    processes = max(job.worlds)
    job.device_of(processes - 1)
    with TemporaryDirectory() as directory:
        context = start_processes(
            _run_process,
            (job, directory, processes, timeout),
            nprocs=processes,
            join=False,
            start_method="spawn",
        )
        deadline = monotonic() + timeout
        try:
            while not context.join(timeout=max(deadline - monotonic(), 0.0)):
                if monotonic() >= deadline:
                    raise RankError(f"the ranks were not done after {timeout:.0f} s")
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise RankError(f"rank {error.error_index} failed: {last}") from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return {
            world: [
                Texts.from_json(json.loads(_file(directory, world, rank).read_text()))
                for rank in range(world)
            ]
            for world in job.worlds
        }


def _run_process(process: int, job: RankJob, directory: str, processes: int, limit: float) -> None:
    """Join the processes and be a rank of every world that is large enough."""
    torch.set_num_threads(1)
    # Of all networks only the machine itself, whatever its name resolves to.
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    device = job.device_of(process)
    with current_device(device):  # NCCL sends from the current GPU
        # A file to meet at: a port that is free when it is looked for may be taken when it is used.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=process,
            world_size=processes,
            timeout=datetime.timedelta(seconds=limit),
            device_id=device if device.type == "cuda" else None,
        )
        # Every process must take part in making every group, also those that it is not in.
        groups = {world: dist.new_group(list(range(world))) for world in job.worlds}
        sparse, drafter = job.prepare(device)
        for world, group in groups.items():
            if process >= world:
                continue
            texts = write_texts(
                f"DCP {world}",
                DCPSmolLM2(sparse, rank=process, world=world, group=group),
                job.prompts,
                tokens=job.tokens,
                drafter=drafter,
                num_drafts=job.num_drafts,
                cache_dtype=job.cache_dtype,
                page_size=job.page_size * world,
            )
            _file(directory, world, process).write_text(json.dumps(texts.to_json()))
        # Who is in no large world is done early; to leave then would break the others' connections.
        dist.barrier()
        dist.destroy_process_group()


def _file(directory: str, world: int, rank: int) -> Path:
    return Path(directory) / f"world_{world}_rank_{rank}.json"


@dataclass(frozen=True)
class RanksFinding:
    """What the ranks have written.

    Attributes:
        one_process: By the same model without ranks.
        worlds: Texts of rank 0, by number of ranks.
        at_odds: Worlds in which two ranks have written different texts.
        departures: Where the text of a world is not that of one process.
    """

    one_process: Texts
    worlds: Mapping[int, Texts]
    at_odds: tuple[int, ...]
    departures: tuple[Departure, ...]

    @property
    def acceptance(self) -> tuple[Acceptance, ...]:
        """Of one process and of each number of ranks."""
        ways = (self.one_process, *self.worlds.values())
        return tuple(Acceptance.of(way.name, way.acceptance) for way in ways)

    @property
    def status(self) -> str:
        """Whether all have written the same, but for ties; that needs ranks that share a cache."""
        if self.at_odds or not all(departure.tie for departure in self.departures):
            return FAILS
        return HOLDS if max(self.worlds, default=0) > 1 else PROVES_NOTHING

    @property
    def headline(self) -> str:
        """What was compared, and whether it holds."""
        count = sum(map(len, self.one_process.token_ids.values()))
        sizes = ", ".join(map(str, self.worlds))
        what = f"{count} greedy tokens on {sizes} ranks (DCP) against one process"
        if self.at_odds:
            return f"NOT the same: {what}. Ranks of one group differ at {list(self.at_odds)}."
        wrong = sum(not departure.tie for departure in self.departures)
        if wrong:
            return f"NOT the same: {what}. Differences that no tie explains: {wrong}."
        if self.status == PROVES_NOTHING:
            return (
                f"Proves nothing: {what}. No cache was shared: one rank alone holds all of it, and "
                "with one GPU there is one rank."
            )
        if self.departures:
            return f"The same but for ties: {what}. Near ties: {len(self.departures)}."
        return f"The same tokens: {what}."

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "headline": self.headline,
            "status": self.status,
            "one_process": self.one_process.to_json(),
            "worlds": {str(world): texts.to_json() for world, texts in self.worlds.items()},
            "ranks_at_odds": list(self.at_odds),
            "acceptance": [found.to_json() for found in self.acceptance],
            "departures": [departure.to_json() for departure in self.departures],
        }


def compare_ranks(
    job: RankJob, *, timeout: float = 600.0, on_way: Callable[[str], None] | None = None
) -> RanksFinding:
    """Write the texts in one process and in each world, and weigh the differences.

    Args:
        job: What to run.
        timeout: As in `run_ranks`.
        on_way: Called with the name of each part before it runs.

    Raises:
        RankError: As in `run_ranks`.
    """
    tell = on_way or (lambda name: None)
    tell(ONE_PROCESS)
    model, drafter = job.prepare(job.device_of(0))
    alone = write_texts(
        ONE_PROCESS,
        model,
        job.prompts,
        tokens=job.tokens,
        drafter=drafter,
        num_drafts=job.num_drafts,
        cache_dtype=job.cache_dtype,
        page_size=job.page_size,
    )
    tell(f"DCP {', '.join(map(str, job.worlds))}")
    found = run_ranks(job, timeout=timeout)
    return RanksFinding(
        one_process=alone,
        worlds={world: ranks[0] for world, ranks in found.items()},
        at_odds=tuple(
            world
            for world, ranks in found.items()
            if any(rank.to_json() != ranks[0].to_json() for rank in ranks)
        ),
        departures=tuple(
            departure
            for ranks in found.values()
            for departure in departures(model, job.prompts, alone, ranks[0])
        ),
    )

"""What a peer is: another library's sparse MLA kernel, called on the same workload."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mla_ref.backends.served import PeerTolerance
from mla_ref.bench.kernel_workload import KernelWorkload
from mla_ref.platform import guarded_import

Import = Callable[[str], Any]


@dataclass(frozen=True)
class Way:
    """One way to call a peer; of several the fastest counts.

    Attributes:
        how: In a few words; "" where there is one way only.
        run: The call, on tensors that it holds.
        read: Takes (out [rows, heads, 512], natural LSE or None) from what it returned.
    """

    how: str
    run: Callable[[], Any]
    read: Callable[[Any], tuple[Tensor, Tensor | None]]


@runtime_checkable
class Peer(Protocol):
    """A library's kernel."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def timed(self) -> str:
        """What its time holds and what it leaves out."""

    @property
    def note(self) -> str:
        """What the reader must know of the adapter; "" if nothing."""

    @property
    def tolerance(self) -> PeerTolerance | None:
        """Of the library's own tests; None: the precision rule in bfloat16."""

    def missing(self, workload: KernelWorkload) -> str | None:
        """Why it cannot run this here, in a line; None if it can be tried."""

    def ways(self, workload: KernelWorkload) -> Sequence[Way]:
        """Calls that are ready to run."""


def first_that_imports(
    names: Sequence[str], import_module: Import = importlib.import_module
) -> tuple[Any, str | None]:
    """The first module that imports, or None and why each does not, in a line."""
    reasons = []
    for name in names:
        module, error = guarded_import(name, import_module)
        if error is None:
            return module, None
        missing = isinstance(error, ModuleNotFoundError)
        first = next(iter(str(error).splitlines()), "")
        reasons.append(f"{name} {'is not installed' if missing else f'does not import: {first}'}")
    return None, "; ".join(reasons)


def wrong_device(
    capabilities: Sequence[tuple[int, int]], gpu: tuple[int, int] | None
) -> str | None:
    """Why a kernel that is built for these compute capabilities does not run here.

    Args:
        capabilities: What the kernel is built for, such as (9, 0).
        gpu: What there is; None where the workload is on no GPU.
    """
    built_for = ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)
    if gpu is None:
        return f"needs a GPU ({built_for})"
    if gpu not in capabilities:
        return f"is built for {built_for}, this is sm_{gpu[0]}{gpu[1]}"
    return None


def padded(q: Tensor, heads: int) -> Tensor:
    """Queries with heads of zeros behind them, as engines pad for a kernel of so many heads."""
    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1])) if q.shape[1] < heads else q

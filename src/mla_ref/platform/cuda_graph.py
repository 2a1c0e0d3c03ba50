"""A function's kernels recorded in a CUDA graph, to be started again with one call.

A decode step of a small model is some hundred kernels of a few microseconds each, and launching
each costs the host as much again. A replay launches all of them at once. It runs no Python: what
was decided while recording stays decided, and every address stays as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Kernels are compiled and libraries choose theirs at first use, which must not fall into a capture.
WARM_UP_RUNS = 2


@dataclass(frozen=True)
class Recorded:
    """A function that was recorded.

    Attributes:
        output: The tensor that each replay writes.
        replay: Runs it again, on whatever its inputs hold now.
    """

    output: "torch.Tensor"
    replay: Callable[[], None]


class Recorder:
    """Records functions for one device; the graphs share one pool of memory.

    They may share it because they are replayed one after the other, and what one has put out is
    read before the next begins.
    """

    def __init__(self, device: "torch.device") -> None:
        """Record for this device; on a CPU, which has no graphs, the function itself is run."""
        self.device = device
        self._pool: Any = None

    def record(self, function: Callable[[], "torch.Tensor"]) -> Recorded:
        """Record what a function launches, after a few runs of it.

        The function must read nothing back, copy nothing from the host and run to the same result
        again: it is run before it is recorded, and recording itself computes nothing.
        """
        if self.device.type != "cuda":
            output = function().clone()
            return Recorded(output, lambda: _run_into(output, function))
        import torch

        with torch.cuda.device(self.device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # On a stream of its own: work of the default one must not be caught up in it.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        return Recorded(output, graph.replay)


def _run_into(output: "torch.Tensor", function: Callable[[], "torch.Tensor"]) -> None:
    output.copy_(function())

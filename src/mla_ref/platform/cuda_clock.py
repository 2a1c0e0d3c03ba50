"""CudaClock: what a benchmark asks of a GPU: events, graphs, memory to write over its cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Triton's do_bench writes as much. The two usual methods then differ in nothing else.
LEAST_FLUSH = 256 * 2**20


@dataclass(frozen=True)
class Captured:
    """One call in a CUDA graph.

    Attributes:
        replay: Runs it again, on the same memory.
        result: What the call returned when it was captured; a replay fills it.
    """

    replay: Callable[[], None]
    result: Any


class CudaClock:
    """Times work on one GPU by its own events.

    Args:
        device: Which GPU.

    Attributes:
        l2_bytes: Its L2 cache.
        flush_bytes: What `flush` writes: at least twice the L2, and 256 MiB.

    Raises:
        ValueError: The device is no GPU, or there is none.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        if device.type != "cuda":
            raise ValueError(
                f"device must be a CUDA device to be timed by its events, got {str(device)!r}"
            )
        if not torch.cuda.is_available():
            raise ValueError(f"device {str(device)!r} needs an NVIDIA GPU, and there is none")
        self.device = device
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush_bytes = max(2 * self.l2_bytes, LEAST_FLUSH)
        self._flush = torch.empty(self.flush_bytes // 4, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Write over the L2 cache, so that the next run finds nothing of the last one there."""
        self._flush.zero_()

    def capture(self, run: Callable[[], Any], warmup: int = 3) -> Captured:
        """Put one call into a CUDA graph, after `warmup` calls on a side stream.

        Raises:
            RuntimeError: The call does what a graph cannot hold, such as reading back to the host.
        """
        import torch

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(warmup):
                run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        return Captured(graph.replay, result)

    def seconds(
        self, run: Callable[[], object], repeats: int, before_each: Callable[[], None]
    ) -> Sequence[float]:
        """Seconds between two events around each of `repeats` runs.

        Nothing waits for the host in between: the device is still busy with `before_each` when the
        run is launched, so a short launch does not count.
        """
        import torch

        pairs = []
        for _ in range(repeats):
            before_each()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        import torch

        torch.cuda.synchronize(self.device)

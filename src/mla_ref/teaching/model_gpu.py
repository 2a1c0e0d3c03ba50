"""A GPU in virtual time, to measure without one: launches, one stream, a cache. Lesson 16 times it.

It is a model with round numbers and no time of it is a real card's. But it has what benchmarks
stumble over: a launch returns before its work is done, work waits for the work before it, what was
read or written lately is read faster, and what is written goes through the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mla_ref.checks import require_count, require_scale

R = TypeVar("R")


@dataclass(eq=False)
class Buffer:
    """Some bytes in the device's memory.

    Attributes:
        num_bytes: How many.
    """

    num_bytes: int

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_count("num_bytes", self.num_bytes, at_least=1)


@dataclass
class ModelGPU:
    """The device and its host, each at some second of virtual time.

    Attributes:
        launch_s: The host's time for one launch, of a kernel or of a graph.
        start_s: The device's time before a kernel reads its first byte.
        memory_bytes_s: Bytes a second from memory.
        cache_bytes_s: Bytes a second from the L2 cache.
        cache_bytes: Its size.
    """

    launch_s: float = 5e-6
    start_s: float = 2e-6
    memory_bytes_s: float = 4e12
    cache_bytes_s: float = 12e12
    cache_bytes: int = 60_000_000
    _host_s: float = field(default=0.0, init=False)
    _device_s: float = field(default=0.0, init=False)
    # What is in the cache, the oldest first: bytes by buffer.
    _cached: dict[Buffer, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        for name in ("launch_s", "start_s", "memory_bytes_s", "cache_bytes_s", "cache_bytes"):
            require_scale(name, getattr(self, name))

    def now(self) -> float:
        """The host's clock."""
        return self._host_s

    def sleep(self, seconds: float) -> None:
        """The host is busy elsewhere; the device goes on."""
        self._host_s += seconds

    def synchronize(self) -> None:
        """The host waits until the device has done all that was launched."""
        self._host_s = max(self._host_s, self._device_s)

    def write(self, buffer: Buffer) -> None:
        """Launch a kernel that fills a buffer; afterwards it is in the cache, as far as it fits."""
        self._launch()
        self._device_s += self.start_s + buffer.num_bytes / self.memory_bytes_s
        self._keep(buffer)

    def run(self, kernel: Callable[[], R], reads: Sequence[Buffer]) -> R:
        """Launch a kernel that reads some buffers, and return what it computes.

        The result is there at once, as a tensor is whose work has only been launched.
        """
        self._launch()
        self._work(reads)
        return kernel()

    def replay(self, graph: Sequence[Sequence[Buffer]]) -> None:
        """Launch a graph, a whole row of kernels, as one; each is what it reads."""
        self._launch()
        for reads in graph:
            self._work(reads)

    def flush(self) -> None:
        """Launch a kernel that writes four times as many bytes as the cache has."""
        self.write(Buffer(4 * self.cache_bytes))

    def _launch(self) -> None:
        self._host_s += self.launch_s
        self._device_s = max(self._device_s, self._host_s)

    def _work(self, reads: Sequence[Buffer]) -> None:
        self._device_s += self.start_s
        for buffer in reads:
            near = self._cached.get(buffer, 0)
            far = buffer.num_bytes - near
            self._device_s += near / self.cache_bytes_s + far / self.memory_bytes_s
            self._keep(buffer)

    def _keep(self, buffer: Buffer) -> None:
        self._cached.pop(buffer, None)
        self._cached[buffer] = min(buffer.num_bytes, self.cache_bytes)
        while (over := sum(self._cached.values()) - self.cache_bytes) > 0:
            oldest = next(iter(self._cached))
            self._cached[oldest] -= over
            if self._cached[oldest] <= 0:
                del self._cached[oldest]

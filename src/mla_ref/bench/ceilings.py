"""How fast this machine copies and multiplies, measured: the yardsticks of a kernel's floor."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_ref.platform import CudaClock

GPU_COPY, GPU_MATMUL = 2**30, 8192
CPU_COPY, CPU_MATMUL = 2**26, 512


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one machine.

    Attributes:
        copy_bytes_s: Bytes read plus bytes written in a second, of a copy within the device.
        matmul_flops_s: Operations a second of a large square product.
        empty_s: Time of a kernel that has next to nothing to do, by the method that the kernels are
            timed with: what no launch can go below.
        copy_what: What was copied.
        matmul_what: What was multiplied. cuBLAS chooses the instructions: on sm_90 it takes wgmma,
            and a kernel of mma.sync alone reaches less (87 % was measured on an H200); on SM120
            there is mma.sync only.
    """

    copy_bytes_s: float
    matmul_flops_s: float
    empty_s: float
    copy_what: str
    matmul_what: str

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


def measure_ceilings(device: torch.device, *, repeats: int = 10) -> Ceilings:
    """Measure the rates of a device; 2 GiB of memory and under a second on a GPU."""
    on_gpu = device.type == "cuda"
    # Bytes, numbers a side.
    copied, size = (GPU_COPY, GPU_MATMUL) if on_gpu else (CPU_COPY, CPU_MATMUL)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    seconds = _gpu_seconds(CudaClock(device)) if on_gpu else _host_seconds

    # Small first: memory and clocks are awake when the rates are taken.
    word = torch.zeros(1, device=device)
    empty_s = seconds(lambda: word.add_(1), repeats)
    source = torch.zeros(copied // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    # By a kernel: captured in a graph, `copy_` goes to the copy engine, which is slower (2.8 TB/s
    # on an H200, where kernels copy 4.2), and a yardstick that is too low flatters every kernel.
    copy_s = seconds(lambda: torch.neg(source, out=target), repeats)
    del source, target
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul_s = seconds(lambda: torch.matmul(a, b, out=out), repeats)
    return Ceilings(
        copy_bytes_s=2 * copied / copy_s,
        matmul_flops_s=2 * size**3 / matmul_s,
        empty_s=empty_s,
        copy_what=f"{copied / 2**20:,.0f} MiB to another place of the device, read and written "
        "by a kernel",
        matmul_what=f"torch.matmul {size}^3 in {str(dtype).removeprefix('torch.')}, "
        "not the rate of mma.sync",
    )


def _gpu_seconds(clock: CudaClock) -> Callable[[Callable[[], object], int], float]:
    def seconds(run: Callable[[], object], repeats: int) -> float:
        graph = clock.capture(run)
        return statistics.median(clock.seconds(graph.replay, repeats, clock.flush))

    return seconds


def _host_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)

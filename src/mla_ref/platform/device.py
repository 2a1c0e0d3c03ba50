"""The device that a run uses, by name, and the two things a benchmark asks of it."""

import re
from typing import TYPE_CHECKING

from mla_ref.platform.gpu import gpu_of, why_no_gpu
from mla_ref.platform.probes import Probes

if TYPE_CHECKING:
    import torch


def resolve_device(name: str, probes: Probes | None = None) -> "torch.device":
    """Turn a device's name, as a user types it, into a torch device that exists.

    Args:
        name: "cpu"; "cuda", the first visible GPU; "cuda:1", the second; "auto", the first GPU
            where there is one, else the CPU.
        probes: how to ask the machine; left out, this one is asked.

    Raises:
        ValueError: the name is none of these, or it names a GPU that is not there, with the reason.
    """
    import torch

    match = re.fullmatch(r"cpu|auto|cuda(?::(\d+))?", name)
    if match is None:
        raise ValueError(f"device must be cpu, cuda, cuda:N or auto, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    probes = probes or Probes()
    count = probes.count_gpus()
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if count == 0:
        reason, mend = why_no_gpu(
            probes.driver_cuda(), probes.torch_cuda(), probes.environ.get("CUDA_VISIBLE_DEVICES")
        )
        cure = f" ({mend})" if mend else ""
        raise ValueError(f"device {name!r} needs an NVIDIA GPU, and there is none: {reason}{cure}")
    index = int(match[1] or 0)
    if index >= count:
        there = ", ".join(f"cuda:{i}" for i in range(count))
        raise ValueError(f"device {name!r} is not there; the visible GPUs are {there}")
    return torch.device("cuda", index)


def device_name(device: "torch.device") -> str | None:
    """The product's name of a GPU, such as "NVIDIA H200"; None for the CPU."""
    return gpu_of(device).name if device.type == "cuda" else None


def synchronize(device: "torch.device") -> None:
    """Wait until the device has done all that was asked of it; at once on a CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_device_memory(device: "torch.device") -> None:
    """Start a new count for `peak_device_memory`.

    Raises:
        ValueError: the device is no GPU.
    """
    _require_cuda(device)
    import torch

    # Before the first use of a GPU torch has no statistics to reset, and says "invalid device".
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)


def peak_device_memory(device: "torch.device") -> int:
    """The most bytes that torch tensors held on a GPU since the count was last reset.

    Memory that a kernel library takes past torch's allocator is not in it.

    Raises:
        ValueError: the device is no GPU; torch keeps no such count for a CPU.
    """
    _require_cuda(device)
    import torch

    return torch.cuda.max_memory_allocated(device)


def _require_cuda(device: "torch.device") -> None:
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device to count its memory, got {str(device)!r}")

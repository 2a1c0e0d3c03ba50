"""Where kernels were timed: the facts that a time means nothing without, and none that name anyone.

No host name, no user, no path, no serial number: a receipt is published.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mla_ref.platform import GpuState, gpu_of, read_gpu_state

# CuPy and NVRTC are packaged for each major version of CUDA.
PACKAGES = (
    "mla-ref",
    "torch",
    "triton",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "flash-mla",
    "flashinfer-python",
    "b12x",
    "vllm",
)
# What changes which code Triton makes, or whether it is compiled at all.
SETTINGS = ("DISABLE_MMA_V3", "TRITON_INTERPRET")


@dataclass(frozen=True)
class KernelMachine:
    """One device and what runs on it; None for what is not known or not there.

    Attributes:
        device: The product's name; the architecture of a CPU.
        sm: "sm_90".
        num_sms: Streaming multiprocessors.
        l2_bytes: L2 cache.
        memory_bytes: Device memory.
        cuda: CUDA version that torch was built with.
        state: Driver, power limit and clocks, right after a large matrix product.
        versions: Of python and the packages that are installed.
        settings: Environment variables that change the compiled code, as they were set.
    """

    device: str
    sm: str | None
    num_sms: int | None
    l2_bytes: int | None
    memory_bytes: int | None
    cuda: str | None
    state: GpuState
    versions: Mapping[str, str]
    settings: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """One line for a terminal."""
        words = [self.device if self.sm is None else f"{self.device} ({self.sm})"]
        if self.state.driver:
            words.append(f"driver {self.state.driver}")
        if self.state.power_limit_w:
            words.append(f"{self.state.power_limit_w:.0f} W")
        if self.state.sm_mhz:
            words.append(f"{self.state.sm_mhz:.0f} MHz")
        words += [f"{k} {v}" for k, v in self.versions.items() if k in ("torch", "triton")]
        words += [f"{k}={v}" for k, v in self.settings.items()]
        return ", ".join(words)


def read_machine(device: torch.device) -> KernelMachine:
    """The facts of a device. Ask right after work: the clocks of an idle GPU say nothing."""
    gpu = gpu_of(device) if device.type == "cuda" else None
    return KernelMachine(
        device=gpu.name if gpu else f"CPU, {platform.machine()}",
        sm=gpu.sm if gpu else None,
        num_sms=gpu.num_sms if gpu else None,
        l2_bytes=gpu.l2_bytes if gpu else None,
        memory_bytes=gpu.total_memory if gpu else None,
        cuda=torch.version.cuda,
        state=read_gpu_state(gpu.index if gpu else None),
        versions={"python": platform.python_version(), **_versions()},
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # The module's own word tells a CUDA build from a CPU build: 2.11.0+cu130.
    return found | {"torch": torch.__version__}

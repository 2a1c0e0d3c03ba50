"""Gpu: what torch and the driver say about one CUDA device.

torch is imported inside the functions: ``mla-ref doctor`` must be able to start, and to say why,
where torch itself does not import.
"""

import ctypes
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_ref.platform.capability import (
    Capability,
    Features,
    Version,
    features,
    sm_name,
    version_text,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. Sizes are in bytes.

    Attributes:
        index: its number among the visible devices.
        name: the product's name.
        capability: compute capability, (9, 0) for Hopper.
        total_memory: device memory.
        free_memory: what of it no process holds at this moment.
        num_sms: streaming multiprocessors.
        l2_bytes: L2 cache.
        shared_memory_per_block: the most that one block may ask for, by the driver's own answer.
    """

    index: int
    name: str
    capability: Capability
    total_memory: int
    free_memory: int
    num_sms: int
    l2_bytes: int
    shared_memory_per_block: int

    @property
    def features(self) -> Features:
        """What its compute capability has."""
        return features(self.capability)

    @property
    def sm(self) -> str:
        """Its architecture as compilers name it: sm_90."""
        return sm_name(self.capability)


def count_gpus() -> int:
    """How many CUDA devices torch can use; 0 where torch or the driver cannot."""
    import torch

    with warnings.catch_warnings():
        # A driver too old for this torch is reported by `why_no_gpu`, in one line.
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def read_gpu(index: int) -> Gpu:
    """Read one device. Asking for the free memory opens a CUDA context on it."""
    import torch

    props = torch.cuda.get_device_properties(index)
    capability = (props.major, props.minor)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        index=index,
        name=props.name,
        capability=capability,
        total_memory=total,
        free_memory=free,
        num_sms=props.multi_processor_count,
        l2_bytes=props.L2_cache_size,
        # Older torch has no such property; then the table's number for the architecture stands in.
        shared_memory_per_block=getattr(
            props,
            "shared_memory_per_block_optin",
            features(capability).shared_memory_per_block,
        ),
    )


def gpu_of(device: "torch.device") -> Gpu:
    """Read the GPU that torch means by a device: "cuda" without a number is the current one."""
    import torch

    return read_gpu(torch.cuda.current_device() if device.index is None else device.index)


def read_torch_cuda() -> str | None:
    """The CUDA version that torch was built with, "13.0"; None for a CPU build."""
    import torch

    return torch.version.cuda


def read_torch_archs() -> tuple[str, ...]:
    """The architectures that torch's own kernels were built for: ("sm_90", "compute_90")."""
    import torch

    return tuple(torch.cuda.get_arch_list())


def read_driver_cuda() -> Version | None:
    """The newest CUDA version that the NVIDIA driver runs; None where there is no driver.

    Asks the driver's library alone and starts nothing on the device.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        number = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def why_no_gpu(
    driver_cuda: Version | None, torch_cuda: str | None, visible: str | None
) -> tuple[str, str]:
    """Say why torch sees no CUDA device, from what is known without one.

    Args:
        driver_cuda: from `read_driver_cuda`.
        torch_cuda: from `read_torch_cuda`.
        visible: the value of CUDA_VISIBLE_DEVICES, None where it is unset.

    Returns:
        The reason, and the command that mends it; "" where no command can.
    """
    if driver_cuda is None:
        return "no NVIDIA driver", ""
    if torch_cuda is None:
        return "this torch is built for the CPU only", "pip install --force-reinstall torch"
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    if int(torch_cuda.split(".")[0]) > driver_cuda[0]:
        newest = version_text(driver_cuda)
        return f"torch is built for CUDA {torch_cuda}, the driver runs CUDA {newest} at most", ""
    return "the NVIDIA driver shows no usable GPU", ""


def torch_runs_on(archs: tuple[str, ...], capability: Capability) -> bool:
    """Whether torch's own kernels, built for `archs`, run on a device of this capability.

    A cubin (sm_) runs on its own major number from its minor number up; PTX (compute_) runs on
    everything from its number up. A suffix, as in sm_90a, binds a build to that one architecture.
    """
    for arch in archs:
        kind, _, digits = arch.partition("_")
        if digits[-1:].isalpha():
            if digits[:-1] == f"{capability[0]}{capability[1]}":
                return True
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def gpu_capability(device: "torch.device") -> Capability | None:
    """The compute capability of a device, (9, 0) for Hopper; None for a CPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None

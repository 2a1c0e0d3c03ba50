"""Compile a kernel once for each GPU, and launch it on torch's stream.

CuPy compiles (NVRTC, and its cache on disk) and loads. The launch goes through the driver's
cuLaunchKernelEx, since CuPy's own has no way to ask for a programmatic dependent launch.
"""

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mla_kernels.cuda_kernels.emulation.host import launch as emulate
from mla_kernels.cuda_kernels.source import OPTIONS, read_source
from mla_ref.platform import require
from mla_ref.platform.stream import current_stream

# CUlaunchAttributeID of cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes behind 4 of padding."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Kernel:
    """One function of a .cu file.

    Attributes:
        file: Of this folder.
        name: Of the function.
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        early: It may start while the kernel before it still runs; it then waits by itself before
            it reads (griddepcontrol.wait). For a kernel right behind one of ours alone.
    """

    file: str
    name: str
    threads: int
    shared_bytes: int = 0
    early: bool = False

    def launch(self, device: torch.device, grid: tuple[int, int], call: ctypes.Structure) -> None:
        """Start the kernel on the stream that torch works on; an empty grid does nothing.

        On a CPU it is emulated, see `emulation.host`, and has ended when the call returns.

        Raises:
            RuntimeError: The driver refused; the message has its words.
        """
        if 0 in grid:
            return
        if device.type == "cpu":
            emulate(self.file, self.name, grid, self.threads, self.shared_bytes, call)
            return
        with current_stream(device) as stream:
            function = _function(self, device.index if device.index is not None else 0)
            config = _Config(
                grid=(*grid, 1),
                block=(self.threads, 1, 1),
                shared_bytes=self.shared_bytes,
                stream=stream,
            )
            attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
            if self.early:
                attribute.value[0] = 1
                config.attributes = ctypes.pointer(attribute)
                config.num_attributes = 1
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
            driver = _driver()
            code = driver.cuLaunchKernelEx(ctypes.byref(config), function.ptr, arguments, None)
            if code:
                words = ctypes.c_char_p()
                driver.cuGetErrorString(code, ctypes.byref(words))
                reason = words.value.decode() if words.value else f"error {code}"
                raise RuntimeError(f"kernel {self.name} of {self.file} did not start: {reason}")


@lru_cache
def _driver() -> Any:
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


@lru_cache
def _function(kernel: Kernel, device: int) -> Any:
    """The loaded function, compiled at the first call; one for each GPU, as a module is."""
    cupy = require("cupy")
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=read_source(kernel.file), options=OPTIONS, backend="nvrtc")
        raw = module.get_function(kernel.name)
        if kernel.shared_bytes > 48 * 1024:
            raw.max_dynamic_shared_size_bytes = kernel.shared_bytes
        return raw.kernel

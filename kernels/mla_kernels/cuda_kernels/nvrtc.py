"""Compile a kernel for any architecture without a GPU: NVRTC through ctypes.

CuPy compiles for the GPU it runs on and does not import where there is no driver. For the question
"does it fit SM120" the library alone is enough, from the wheel nvidia-cuda-nvrtc-cu12 or -cu13 or
from a CUDA toolkit.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

from mla_kernels.cuda_kernels.source import OPTIONS, read_source
from mla_ref.platform import Capability, sm_name

# Where the wheels for CUDA 12 and for CUDA 13 put it.
_PACKAGES = ("nvidia.cuda_nvrtc", "nvidia.cu13")


def find_library() -> Path | None:
    """The NVRTC of an installed wheel; None where there is none."""
    for package in _PACKAGES:
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found = sorted(Path(folder, "lib").glob("libnvrtc.so.*"))
            if found:
                return found[0]
    return None


def compile_cubin(file: str, capability: Capability, library: Path | None = None) -> bytes:
    """The machine code of a .cu file of this folder, with the options that CuPy gets.

    Args:
        file: "decode.cu".
        capability: (12, 0) for SM120.
        library: The NVRTC; by default that of an installed wheel.

    Raises:
        FileNotFoundError: There is no NVRTC.
        RuntimeError: NVRTC refuses the source; the text is its log.
    """
    library = library or find_library()
    if library is None:
        raise FileNotFoundError("no NVRTC is installed: pip install nvidia-cuda-nvrtc-cu12")
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    source, name = read_source(file).encode(), file.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None))
    try:
        options = [o.encode() for o in (*OPTIONS, f"-arch={sm_name(capability)}")]
        wanted = (ctypes.c_char_p * len(options))(*options)
        code = nvrtc.nvrtcCompileProgram(program, len(options), wanted)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if code:
            words = log.rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"{file} does not compile for {sm_name(capability)}: {words}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(get_size: "ctypes._FuncPointer", get: "ctypes._FuncPointer", program: object) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC gives error {code}")

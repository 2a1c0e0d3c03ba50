"""Build a .cu file with the host's C++ compiler and run its kernels on the CPU.

The source is the one that a GPU gets; only `ptx.cuh` is replaced, by functions of the same names.
What a run shows: that the arithmetic is right, and that no block asks for more shared memory than
SM120 has. Runs with a few seeds show most barriers and waits that are missing (see `scheduler.hpp`
and `copies.hpp`): orders are drawn, not all are tried, and a fault shows only where the data make a
difference. What it does not show: speed, and races within a warp between two of its meetings, so
that no `__syncwarp` is ever missed.

To step through a warp in a debugger, build with MLA_REF_EMULATION_FLAGS="-O0 -g" and set a
breakpoint in the .cu file: the threads of a block are stacks on one thread of the process.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from mla_kernels.cuda_kernels.source import read_source

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++20", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-Wno-attributes")
# Threads of blocks, in the order of their switches, and when copies land: drawn from this.
SEED = 0

_LAUNCHER = """
extern "C" const char* launch_{name}(const unsigned* grid, unsigned threads, unsigned long shared,
                                     unsigned long long seed, void** arguments) {{
  static std::string words;
  try {{
    emu::launch({name}, dim3(grid[0], grid[1]), dim3(threads), shared, seed, arguments);
    return nullptr;
  }} catch (const std::exception& error) {{
    words = error.what();
    return words.c_str();
  }}
}}
"""


def find_compiler() -> str | None:
    """The host's C++ compiler: that of the variable CXX, or the first that is on the path."""
    wanted = os.environ.get("CXX")
    return next((c for c in ([wanted] if wanted else COMPILERS) if shutil.which(c)), None)


def emulation_gap() -> str | None:
    """None, or why kernels cannot be emulated on this machine."""
    if sys.platform == "win32":
        return "the emulation knows how to switch stacks on Linux and macOS, not on Windows"
    if find_compiler() is None:
        return (
            f"the emulation needs a C++20 compiler, and none of {', '.join(COMPILERS)} is on the "
            "path: apt-get install g++, or name one in CXX"
        )
    return None


def launch(
    file: str,
    name: str,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    call: ctypes.Structure,
    seed: int = SEED,
) -> None:
    """Run a kernel to its end.

    Args:
        file: A .cu file of the folder above.
        name: Of the function in it.
        grid: Blocks.
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        call: The kernel's one argument.
        seed: Of the order in which threads run.

    Raises:
        RuntimeError: There is no compiler, or a block waits for ever, asks for more shared memory
            than SM120 has, or copies what is not aligned; the message says which.
    """
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    function = getattr(_library(host_source(file)), f"launch_{name}")
    function.restype = ctypes.c_char_p
    words = function(
        (ctypes.c_uint * 2)(*grid),
        ctypes.c_uint(threads),
        ctypes.c_ulong(shared_bytes),
        ctypes.c_ulonglong(seed),
        arguments,
    )
    if words is not None:
        raise RuntimeError(f"kernel {name} of {file}, emulated: {words.decode()}")


@lru_cache
def host_source(file: str) -> str:
    """What the host's compiler gets: the kernels, and a function for each that launches it."""
    text = read_source(file, ptx='#include "ptx.hpp"')
    names = re.findall(
        r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(', text
    )
    return text + "".join(_LAUNCHER.format(name=name) for name in names)


@lru_cache
def _library(source: str) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(emulation_gap())
    headers = "".join(path.read_text() for path in sorted(FOLDER.glob("*.hpp")))
    extra = os.environ.get("MLA_REF_EMULATION_FLAGS", "-O2").split()
    flags = [*FLAGS, *extra]
    key = hashlib.sha256(" ".join([compiler, *flags, headers, source]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"mla-ref-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            code, built = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            code.write_text(source)
            command = [compiler, *flags, "-I", str(FOLDER), "-o", str(built), str(code)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} cannot build the kernels:\n{done.stderr[-2000:]}")
            # Whole or not at all: another process may look for it meanwhile.
            built.rename(library)
    return ctypes.CDLL(str(library))

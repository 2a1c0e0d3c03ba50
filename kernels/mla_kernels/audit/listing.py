"""Every specialisation of every Triton kernel, gathered from the modules that know them."""

import importlib
import pkgutil

from mla_kernels import triton_kernels
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.platform import require

# A part lists its `signatures()`; the attention kernels' table of configurations its `launches()`.
_FUNCTIONS = ("signatures", "launches")


def list_compilations() -> list[Compilation]:
    """What the modules of `triton_kernels` say they are launched with, sorted by name.

    Raises:
        ImportError: Triton is not installed.
        ValueError: Two have the same name.
    """
    require("triton")
    found: dict[str, Compilation] = {}
    for info in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        module = importlib.import_module(info.name)
        for function in (vars(module).get(name) for name in _FUNCTIONS):
            for compilation in function() if function else ():
                if compilation.name in found:
                    raise ValueError(f"{info.name}: a second compilation {compilation.name!r}")
                found[compilation.name] = compilation
    return [found[name] for name in sorted(found)]

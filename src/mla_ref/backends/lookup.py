"""A backend by its name: a table of the project's own, then installed packages.

Another package adds a backend by an entry point of the group `mla_ref.backends`:

    [project.entry-points."mla_ref.backends"]
    mine = "my_package.my_module:MyBackend"

The object is called without arguments if it is a class. Nothing is imported before it is asked for:
a machine without Triton or CuPy can still list names.
"""

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

from mla_ref.backends.protocol import Backend
from mla_ref.checks import describe

GROUP = "mla_ref.backends"
_SERVED = "mla_ref.backends.served.backend"
# "emulated-": the arithmetic of a served kernel in torch, not the kernel.
BUILT_IN = MappingProxyType(
    {
        "torch": "mla_ref.backends.torch_backend:TorchBackend",
        "triton": "mla_kernels.triton_kernels.backend:TritonBackend",
        "cupy": "mla_kernels.cuda_kernels.backend:CupyBackend",
        "emulated-b12x": f"{_SERVED}:EMULATED_B12X",
        "emulated-flashinfer-sm120": f"{_SERVED}:EMULATED_FLASHINFER_SM120",
        "emulated-flashmla-sm90": f"{_SERVED}:EMULATED_FLASHMLA_SM90",
        "emulated-flashmla-sm100": f"{_SERVED}:EMULATED_FLASHMLA_SM100",
        "emulated-vllm-triton-sparse": f"{_SERVED}:EMULATED_VLLM_TRITON_SPARSE",
        "emulated-fa3-sparse": f"{_SERVED}:EMULATED_FA3_SPARSE",
    }
)


def backend_names() -> tuple[str, ...]:
    """Names that `find_backend` knows: the project's own, then those of installed packages."""
    return (*BUILT_IN, *sorted({e.name for e in entry_points(group=GROUP)} - set(BUILT_IN)))


def find_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: There is none; the message lists the names there are.
        ImportError: It cannot be imported here; the message names the backend and what is missing.
        TypeError: What the entry point names is no backend.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a backend's name, got {describe(name)}")
    places = {e.name: e.value for e in entry_points(group=GROUP)} | BUILT_IN
    if name not in places:
        raise ValueError(f"backend must be one of {', '.join(backend_names())}, got {name!r}")
    module, _, attribute = places[name].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"backend {name!r} ({places[name]}) cannot be used: {error}") from error
    backend = found() if inspect.isclass(found) else found
    if not isinstance(backend, Backend):
        raise TypeError(f"backend {name!r} ({places[name]}) must have name, parts, supports, plan")
    return backend


def kernel_hash(backend: object) -> str | None:
    """What a backend's measured numbers belong to: its `source_hash`; None if it names none."""
    found = getattr(backend, "source_hash", None)
    return found() if callable(found) else found

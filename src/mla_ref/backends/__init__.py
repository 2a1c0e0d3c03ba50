"""Who computes sparse MLA: the contract, the torch backend, and others by name."""

from mla_ref.backends.lookup import backend_names, find_backend, kernel_hash
from mla_ref.backends.protocol import CACHE_FORMATS, KINDS, PARTS, AttnSpec, Backend, Plan
from mla_ref.backends.torch_backend import TorchBackend, TorchPlan

__all__ = [
    "CACHE_FORMATS",
    "KINDS",
    "PARTS",
    "AttnSpec",
    "Backend",
    "Plan",
    "TorchBackend",
    "TorchPlan",
    "backend_names",
    "find_backend",
    "kernel_hash",
]

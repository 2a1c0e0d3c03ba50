"""What this machine can do, and why not. Nothing else in the project asks torch.cuda.

Importing this imports neither torch nor any optional package, and starts nothing on a GPU.
"""

from mla_ref.platform.capability import (
    REFERENCE,
    Capability,
    Features,
    arch_names,
    features,
    sm_name,
    toolkit_gap,
)
from mla_ref.platform.compilers import Interpreter, interpreter_active, triton_interpreter
from mla_ref.platform.cuda_clock import Captured, CudaClock
from mla_ref.platform.device import (
    device_name,
    peak_device_memory,
    reset_peak_device_memory,
    resolve_device,
    synchronize,
)
from mla_ref.platform.findings import GROUPS, Finding, find
from mla_ref.platform.gpu import Gpu, count_gpus, gpu_capability, gpu_of, read_gpu
from mla_ref.platform.machine import Machine, inspect_machine
from mla_ref.platform.nvidia_smi import GpuState, read_gpu_state
from mla_ref.platform.packages import find_model_file, guarded_import, model_file, require
from mla_ref.platform.probes import Probes
from mla_ref.platform.summary import base_works, summary

__all__ = [
    "GROUPS",
    "REFERENCE",
    "Capability",
    "Captured",
    "CudaClock",
    "Features",
    "Finding",
    "Gpu",
    "GpuState",
    "Interpreter",
    "Machine",
    "Probes",
    "arch_names",
    "base_works",
    "count_gpus",
    "device_name",
    "features",
    "find",
    "find_model_file",
    "gpu_capability",
    "gpu_of",
    "guarded_import",
    "inspect_machine",
    "interpreter_active",
    "model_file",
    "peak_device_memory",
    "read_gpu",
    "read_gpu_state",
    "require",
    "reset_peak_device_memory",
    "resolve_device",
    "sm_name",
    "summary",
    "synchronize",
    "toolkit_gap",
    "triton_interpreter",
]

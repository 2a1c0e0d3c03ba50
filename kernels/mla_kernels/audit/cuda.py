"""The same audit for the CUDA kernels: compiled by NVRTC, read from the machine code, kept as data.

Their record is a file of its own, since another compiler makes it: one entry a kernel, and one hash
of all sources. A kernel that no plan chooses is in it too.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mla_kernels.audit.cubin import read_cubin
from mla_kernels.audit.run import TARGETS, entry_of
from mla_kernels.audit.verdict import judge
from mla_kernels.cuda_kernels import attention, cache_write, merge
from mla_kernels.cuda_kernels.launch import Kernel
from mla_kernels.cuda_kernels.nvrtc import compile_cubin
from mla_kernels.cuda_kernels.union import UNION
from mla_kernels.kernel_hash import cuda_source_hash
from mla_ref.platform import Capability, sm_name

KERNELS: tuple[Kernel, ...] = (
    *attention.FAST.values(),
    *attention.SIMPLE.values(),
    UNION,
    merge.ALONE,
    cache_write.KERNEL,
)
_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")


def audit_cuda(progress: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compile all, for each of `TARGETS`; a record for `write_record`.

    Raises:
        FileNotFoundError: There is no NVRTC.
    """
    cubins: dict[tuple[str, Capability], bytes] = {}
    entries = {}
    for kernel in KERNELS:
        progress(kernel.name)
        targets = {}
        for target in TARGETS:
            key = kernel.file, target
            if key not in cubins:
                cubins[key] = compile_cubin(kernel.file, target)
            facts = read_cubin(cubins[key])[kernel.name]
            verdict = judge(
                facts, target, threads=kernel.threads, dynamic_shared_bytes=kernel.shared_bytes
            )
            targets[sm_name(target)] = entry_of(facts, verdict, kernel.shared_bytes)
        entries[kernel.name] = {"file": kernel.file, "threads": kernel.threads, "targets": targets}
    return {"source_hash": cuda_source_hash(), "tools": cuda_tools(), "compilations": entries}


def cuda_tools() -> dict[str, str]:
    """The NVRTC of an installed wheel and its version."""
    for name in _PACKAGES:
        try:
            return {name: version(name)}
        except PackageNotFoundError:
            continue
    return {}

"""Findings: what a machine can do, judged row by row, each "no" with its reason and its cure."""

from dataclasses import dataclass

from mla_ref.platform.capability import sm_name, version_text
from mla_ref.platform.compilers import Interpreter, nvrtc_gap
from mla_ref.platform.gpu import Gpu, torch_runs_on
from mla_ref.platform.machine import SM120, Machine
from mla_ref.platform.packages import MODEL_COMMAND, MODEL_WHEEL, install_command

LADDER, LESSONS, TRITON, CUPY, GPU = "Run the ladder", "Lessons", "Triton", "CuPy", "GPU"
GROUPS = (LADDER, LESSONS, TRITON, CUPY, GPU)

OLDEST_PYTHON = (3, 11)
REAL_MODEL = (MODEL_WHEEL, "gguf", "tokenizers")


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
        group: one of `GROUPS`.
        name: what was looked at.
        ok: the answer.
        value: what was found: a version, a path, a size.
        reason: for a no, why.
        mend: for a no, the one command that mends it; empty where no command can.
        required: whether `mla-ref ladder` cannot run without it.
    """

    group: str
    name: str
    ok: bool
    value: str = ""
    reason: str = ""
    mend: str = ""
    required: bool = False


def find(machine: Machine) -> tuple[Finding, ...]:
    """Judge a machine; the rows come in the order of `GROUPS`."""
    parts = (_ladder, _lessons, _triton, _cupy, _gpu)
    return tuple(finding for part in parts for finding in part(machine))


def _yes(group: str, name: str, value: str, *, required: bool = False) -> Finding:
    return Finding(group, name, True, value, required=required)


def _no(group: str, name: str, reason: str, mend: str = "", *, required: bool = False) -> Finding:
    return Finding(group, name, False, reason=reason, mend=mend, required=required)


def _package(machine: Machine, group: str, name: str, *, required: bool = False) -> Finding:
    package = machine.packages[name]
    if package.error is None:
        return _yes(group, name, package.version or "", required=required)
    mend = install_command(name, cuda_major=_cuda_major(machine))
    return _no(group, name, package.error, mend, required=required)


def _cuda_major(machine: Machine) -> int:
    """The CUDA whose wheels fit: torch's, since both load the same libraries, or the driver's."""
    if machine.torch_cuda:
        return int(machine.torch_cuda.split(".")[0])
    return machine.driver_cuda[0] if machine.driver_cuda else 12


def _ladder(machine: Machine) -> list[Finding]:
    name, version = "Python >= 3.11", ".".join(map(str, machine.python))
    rows = [
        _yes(LADDER, name, version, required=True)
        if machine.python >= OLDEST_PYTHON
        else _no(LADDER, name, f"this is {version}", required=True)
    ]
    rows += [_package(machine, LADDER, n, required=True) for n in ("torch", "numpy", "jaxtyping")]
    rows.append(
        _yes(LADDER, MODEL_WHEEL, machine.model_file.name)
        if machine.model_file
        else _no(LADDER, MODEL_WHEEL, "not installed", MODEL_COMMAND)
    )
    return rows + [_package(machine, LADDER, n) for n in ("gguf", "tokenizers", "transformers")]


def _lessons(machine: Machine) -> list[Finding]:
    return [_package(machine, LESSONS, n) for n in ("matplotlib", "jupyterlab", "ipykernel")]


def _triton(machine: Machine) -> list[Finding]:
    package = _package(machine, TRITON, "triton")
    if not package.ok and machine.system != "linux":
        return [_no(TRITON, "triton", "its wheels exist for Linux only")]
    if not package.ok:
        return [package]
    state = machine.interpreter
    switch = _yes(TRITON, "interpreter", state.value)
    if not state.took_effect:
        verb = "export TRITON_INTERPRET=1" if state is Interpreter.SET_TOO_LATE else ""
        switch = _no(TRITON, "interpreter", state.value, verb or "unset TRITON_INTERPRET")
    rows = [package, switch]
    for ptxas in machine.ptxas:
        name = f"assembles for {sm_name(ptxas.capability)}"
        if ptxas.gap is None and ptxas.version is not None:
            rows.append(_yes(TRITON, name, f"CUDA {version_text(ptxas.version)}, {ptxas.path}"))
        else:
            reason = f"{ptxas.gap}; {ptxas.variable} names another"
            rows.append(_no(TRITON, name, reason, ptxas.mend))
    return rows


def _cupy(machine: Machine) -> list[Finding]:
    wheels, package = machine.cupy_wheels, _package(machine, CUPY, "cupy")
    rows = [package]
    if len(wheels) > 1:
        reason = (
            f"{' and '.join(wheels)} share the folder cupy/, and removing one breaks the other: "
            "remove all, reinstall one"
        )
        again = install_command("cupy", cuda_major=_cuda_major(machine))
        mend = f"pip uninstall -y {' '.join(wheels)} && {again}"
        rows.append(_no(CUPY, "one CuPy wheel only", reason, mend))
    if not package.ok:
        return rows
    major = 13 if "cupy-cuda13x" in wheels else 12
    # NVIDIA's wheels carry the major number in their name up to CUDA 12 only.
    upgrade = f"pip install --upgrade nvidia-cuda-nvrtc{'-cu12' if major == 12 else ''}"
    if machine.nvrtc is None:
        return [*rows, _no(CUPY, "NVRTC", machine.no_nvrtc or "not found", upgrade)]
    version = version_text(machine.nvrtc)
    for capability in sorted({SM120, *(gpu.capability for gpu in machine.gpus)}):
        name, gap = f"compiles for {sm_name(capability)}", nvrtc_gap(machine.nvrtc, capability)
        rows.append(_no(CUPY, name, gap, upgrade) if gap else _yes(CUPY, name, f"NVRTC {version}"))
    return rows


def _gpu(machine: Machine) -> list[Finding]:
    if machine.driver_cuda is None:
        return [_no(GPU, "NVIDIA driver", "none on this machine")]
    rows = [_yes(GPU, "NVIDIA driver", f"runs CUDA {version_text(machine.driver_cuda)}")]
    if machine.no_gpu:
        rows.append(_no(GPU, "torch sees a GPU", *machine.no_gpu))
    for gpu in machine.gpus:
        rows += _one_gpu(gpu, machine)
    return rows


def _one_gpu(gpu: Gpu, machine: Machine) -> list[Finding]:
    device = f"cuda:{gpu.index}"
    built = f"torch is built for CUDA {machine.torch_cuda}"
    runs = torch_runs_on(machine.torch_archs, gpu.capability)
    return [
        _yes(GPU, device, f"{gpu.name}, {gpu.sm}, {gpu.features.family}"),
        _yes(GPU, f"{device} torch", built)
        if runs
        else _no(GPU, f"{device} torch", f"{built}, without {gpu.sm}", "pip install -U torch"),
        _yes(
            GPU,
            f"{device} memory",
            f"{gpu.free_memory / 2**30:.1f} of {gpu.total_memory / 2**30:.1f} GiB free",
        ),
        _yes(
            GPU,
            f"{device} on chip",
            f"{gpu.num_sms} SMs, {gpu.l2_bytes / 2**20:.0f} MiB L2 cache",
        ),
        _yes(GPU, f"{device} shared memory", f"{gpu.shared_memory_per_block:,} B a block"),
        _yes(GPU, f"{device} has", ", ".join(gpu.features.instructions) or "reference features"),
    ]

"""Machine: everything `mla-ref doctor` knows about where it runs, read once."""

from dataclasses import dataclass
from pathlib import Path

from mla_ref.platform.capability import Capability, Version
from mla_ref.platform.compilers import (
    Interpreter,
    Ptxas,
    find_nvrtc,
    find_ptxas,
    triton_interpreter,
)
from mla_ref.platform.gpu import Gpu, why_no_gpu
from mla_ref.platform.packages import (
    Package,
    cupy_wheels,
    find_model_file,
    look_up,
    try_import,
)
from mla_ref.platform.probes import Probes

# Compiled packages are imported, for only that shows whether they work; the others looked up.
IMPORTED = ("torch", "numpy", "jaxtyping", "triton", "cupy")
LOOKED_UP = ("gguf", "tokenizers", "matplotlib", "jupyterlab", "ipykernel", "transformers")

SM120: Capability = (12, 0)


@dataclass(frozen=True)
class Machine:
    """The facts, without judgement; `findings` judges them.

    Attributes:
        python: the interpreter's version.
        system: as `sys.platform`.
        packages: what was looked for, by import name.
        model_file: the model wheel's GGUF.
        driver_cuda: the newest CUDA version that the driver runs; None without a driver.
        torch_cuda: the CUDA version that torch was built with; None for a CPU build.
        torch_archs: the architectures that torch's own kernels were built for.
        gpus: the visible devices.
        no_gpu: why there is none and the command that mends it; None where there is one.
        interpreter: whether TRITON_INTERPRET took effect.
        ptxas: Triton's assembler for each capability here, and for SM120, which is compiled for
            on machines without one; empty without triton.
        cupy_wheels: the distributions that own the folder cupy/.
        nvrtc: the CUDA version of CuPy's run-time compiler.
        no_nvrtc: why there is none.
    """

    python: tuple[int, int, int]
    system: str
    packages: dict[str, Package]
    model_file: Path | None = None
    driver_cuda: Version | None = None
    torch_cuda: str | None = None
    torch_archs: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    no_gpu: tuple[str, str] | None = None
    interpreter: Interpreter = Interpreter.OFF
    ptxas: tuple[Ptxas, ...] = ()
    cupy_wheels: tuple[str, ...] = ()
    nvrtc: Version | None = None
    no_nvrtc: str | None = None


def inspect_machine(probes: Probes | None = None) -> Machine:
    """Read the machine. Imports triton and cupy if they are there, and opens CUDA contexts."""
    probes = probes or Probes()
    distributions = probes.distributions()
    packages = {name: try_import(name, distributions, probes.import_module) for name in IMPORTED}
    packages |= {name: look_up(name, distributions) for name in LOOKED_UP}

    driver = probes.driver_cuda()
    torch_cuda: str | None = None
    archs: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    no_gpu: tuple[str, str] | None = ("torch does not import", "")
    if packages["torch"].ok:
        torch_cuda, archs = probes.torch_cuda(), probes.torch_archs()
        gpus = tuple(probes.read_gpu(index) for index in range(probes.count_gpus()))
        visible = probes.environ.get("CUDA_VISIBLE_DEVICES")
        no_gpu = None if gpus else why_no_gpu(driver, torch_cuda, visible)

    ptxas: tuple[Ptxas, ...] = ()
    if packages["triton"].ok:
        capabilities = sorted({SM120, *(gpu.capability for gpu in gpus)})
        ptxas = tuple(find_ptxas(capability, probes) for capability in capabilities)
    nvrtc, no_nvrtc = find_nvrtc(probes) if packages["cupy"].ok else (None, None)

    return Machine(
        python=probes.python,
        system=probes.system,
        packages=packages,
        model_file=find_model_file(probes),
        driver_cuda=driver,
        torch_cuda=torch_cuda,
        torch_archs=archs,
        gpus=gpus,
        no_gpu=no_gpu,
        interpreter=triton_interpreter(probes),
        ptxas=ptxas,
        cupy_wheels=cupy_wheels(distributions),
        nvrtc=nvrtc,
        no_nvrtc=no_nvrtc,
    )

"""The compilers behind the GPU kernels: Triton's interpreter and ptxas, CuPy's NVRTC."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mla_ref.platform.capability import Capability, Version, toolkit_gap
from mla_ref.platform.packages import one_line
from mla_ref.platform.probes import Probes


class Interpreter(Enum):
    """Whether Triton runs kernels in its interpreter, on the CPU; the value says it in words."""

    OFF = "off"
    ON = "on"
    PENDING = "on, as soon as triton is imported"
    SET_TOO_LATE = "TRITON_INTERPRET was set after triton was imported"
    UNSET_TOO_LATE = "TRITON_INTERPRET was unset after triton was imported"

    @property
    def took_effect(self) -> bool:
        """Whether Triton does what the variable says."""
        return self not in (Interpreter.SET_TOO_LATE, Interpreter.UNSET_TOO_LATE)


def triton_interpreter(probes: Probes | None = None) -> Interpreter:
    """Find out whether TRITON_INTERPRET took effect; imports nothing.

    Triton reads the variable each time a function is decorated. Set after the import, it finds
    Triton's own library (tl.cdiv, tl.sum, tl.softmax) compiled already, and the mixture fails far
    from the cause (triton#5142). So this looks at what one of those functions became.
    """
    probes = probes or Probes()
    # The spellings that Triton itself takes for true.
    wanted = probes.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    cdiv = getattr(probes.modules.get("triton.language"), "cdiv", None)
    if cdiv is None:
        return Interpreter.PENDING if wanted else Interpreter.OFF
    loaded = type(cdiv).__name__ == "InterpretedFunction"
    if wanted == loaded:
        return Interpreter.ON if loaded else Interpreter.OFF
    return Interpreter.SET_TOO_LATE if wanted else Interpreter.UNSET_TOO_LATE


def interpreter_active(probes: Probes | None = None) -> bool:
    """Whether Triton kernels run in the interpreter now: the variable is set and took effect."""
    return triton_interpreter(probes) is Interpreter.ON


@dataclass(frozen=True)
class Ptxas:
    """The assembler that Triton uses for one architecture.

    Attributes:
        capability: what it is to assemble for.
        path: None where none was found.
        version: its CUDA version; None where it does not run.
        variable: the environment variable that puts another in its place.
    """

    capability: Capability
    path: Path | None
    version: Version | None
    variable: str

    @property
    def gap(self) -> str | None:
        """Why it cannot assemble for its capability, or None if it can (triton#8539)."""
        if self.path is None:
            return "no ptxas found beside triton"
        if self.version is None:
            return f"{self.path} does not run"
        return toolkit_gap(f"ptxas ({self.path})", self.version, self.capability)

    @property
    def mend(self) -> str:
        """The command that points Triton at a newer ptxas."""
        return f"export {self.variable}=/usr/local/cuda/bin/ptxas"


def find_ptxas(capability: Capability, probes: Probes) -> Ptxas:
    """Find the ptxas that Triton would run for a capability.

    Triton 3.6 and 3.7 carry a second one for compute capability 10.0 and up, with a variable of
    its own; for those TRITON_PTXAS_PATH changes nothing. A path that does not run is passed over
    for the bundled one, as Triton does.
    """
    folder = probes.package_folder("triton")
    bundled = folder / "backends" / "nvidia" / "bin" if folder else None
    name, variable = "ptxas", "TRITON_PTXAS_PATH"
    if bundled and capability >= (10, 0) and (bundled / "ptxas-blackwell").is_file():
        name, variable = "ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"
    wanted = probes.environ.get(variable)
    if wanted and (version := probes.tool_version(Path(wanted))):
        return Ptxas(capability, Path(wanted), version, variable)
    if bundled is None or not (bundled / name).is_file():
        return Ptxas(capability, None, None, variable)
    return Ptxas(capability, bundled / name, probes.tool_version(bundled / name), variable)


def find_nvrtc(probes: Probes) -> tuple[Version | None, str | None]:
    """The CUDA version of the NVRTC that CuPy compiles with: (version, None) or (None, why not).

    To be asked only where cupy imports.
    """
    try:
        # An attribute, not a module to import; CuPy loads the library here, at the first call.
        cupy: Any = probes.import_module("cupy")
        major, minor = cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return None, one_line(error)
    return (int(major), int(minor)), None


def nvrtc_gap(version: Version, capability: Capability) -> str | None:
    """Why this NVRTC cannot compile for a capability, or None if it can (cupy#9475)."""
    return toolkit_gap("NVRTC", version, capability)

"""GpuState: what `nvidia-smi` says of one GPU at this moment, where it is there."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

# Fields of GpuState, in the order in which nvidia-smi is asked for them.
_QUERIES = (
    "driver_version",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
)


@dataclass(frozen=True)
class GpuState:
    """A GPU's driver, power and clocks; None for what is not known.

    Attributes:
        driver: Version of the driver.
        power_limit_w: Watts that it may take.
        power_w: Watts that it takes.
        sm_mhz: Clock of its multiprocessors.
        sm_max_mhz: The highest that they can have.
        memory_mhz: Clock of its memory.
        temperature_c: Degrees Celsius.
    """

    driver: str | None = None
    power_limit_w: float | None = None
    power_w: float | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None


def run_nvidia_smi(arguments: Sequence[str]) -> str:
    """What `nvidia-smi` prints; "" where it is not there or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def read_gpu_state(
    index: int | None, nvidia_smi: Callable[[Sequence[str]], str] = run_nvidia_smi
) -> GpuState:
    """The state of a GPU; all None without one or without `nvidia-smi`.

    Args:
        index: Its number among torch's visible devices; None for a machine without GPU.
        nvidia_smi: Runs the program.
    """
    if index is None:
        return GpuState()
    answer = nvidia_smi(
        [
            f"--id={_smi_id(index)}",
            f"--query-gpu={','.join(_QUERIES)}",
            "--format=csv,noheader,nounits",
        ]
    )
    cells = [cell.strip() for cell in answer.strip().split(",")]
    if len(cells) != len(_QUERIES):
        return GpuState()
    values = [cells[0] or None, *map(_number, cells[1:])]
    return GpuState(**dict(zip((f.name for f in fields(GpuState)), values, strict=True)))  # type: ignore[arg-type]


def _smi_id(index: int) -> str:
    """CUDA_VISIBLE_DEVICES renumbers torch's devices and not those of nvidia-smi; a UUID holds."""
    import torch

    if not torch.cuda.is_available():
        return str(index)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(index) if uuid is None else f"GPU-{uuid}"


def _number(cell: str) -> float | None:
    """A number; None for "[N/A]" and "[Not Supported]"."""
    try:
        return float(cell)
    except ValueError:
        return None

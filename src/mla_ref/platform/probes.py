"""Probes: the questions that this package puts to the world outside, each one replaceable.

Every other module here computes from their answers, so a test describes a machine that it does
not have, an SM120 card or two CuPy wheels, by passing its own.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mla_ref.platform import gpu
from mla_ref.platform.capability import Version


def read_distributions() -> dict[str, str]:
    """Every installed distribution and its version, by normalised name (PEP 503)."""
    found: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        # A half-removed distribution has no name; the first hit on the path is the one in use.
        name = dist.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), dist.version)
    return found


def read_distribution_files(name: str) -> tuple[Path, ...]:
    """The files of one installed distribution; empty where it is not installed."""
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(Path(str(file.locate())) for file in files or ())


def read_package_folder(name: str) -> Path | None:
    """The folder of a top-level package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def read_tool_version(path: Path) -> Version | None:
    """The CUDA release that ``path --version`` prints; None where it does not run or say."""
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(release[1]), int(release[2])) if release else None


@dataclass(frozen=True)
class Probes:
    """What is asked of the world; the defaults ask this machine."""

    python: tuple[int, int, int] = sys.version_info[:3]
    system: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    modules: Mapping[str, object] = field(default_factory=lambda: sys.modules)
    import_module: Callable[[str], object] = importlib.import_module
    distributions: Callable[[], Mapping[str, str]] = read_distributions
    distribution_files: Callable[[str], tuple[Path, ...]] = read_distribution_files
    package_folder: Callable[[str], Path | None] = read_package_folder
    tool_version: Callable[[Path], Version | None] = read_tool_version
    driver_cuda: Callable[[], Version | None] = gpu.read_driver_cuda
    torch_cuda: Callable[[], str | None] = gpu.read_torch_cuda
    torch_archs: Callable[[], tuple[str, ...]] = gpu.read_torch_archs
    count_gpus: Callable[[], int] = gpu.count_gpus
    read_gpu: Callable[[int], gpu.Gpu] = gpu.read_gpu

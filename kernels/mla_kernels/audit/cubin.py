"""Reading a cubin, whoever made it: Triton's ptxas, NVRTC or nvcc.

Two tools of NVIDIA's do it, `cuobjdump` and `nvdisasm`. They need neither GPU nor driver, and
Triton's wheel carries both.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mla_kernels.audit.occupancy import SHARED_RESERVED
from mla_kernels.audit.sass import count_classes, find_forbidden, read_instructions
from mla_ref.platform import Probes

TIMEOUT_S = 60
_FUNCTION = re.compile(r"^\s*Function (\S+):\s*$", re.MULTILINE)
_SECTION = re.compile(r"^//-+ (\.\S+)\s+-+$", re.MULTILINE)


@dataclass(frozen=True)
class CubinFacts:
    """What one function of a cubin takes, and what it consists of.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread, in local memory: spilled registers and local arrays.
        static_shared_bytes: of a block, without the 1 KiB that the driver keeps; the dynamic
            part is chosen at launch and stands in no cubin.
        spills: instructions that load from or store to local memory.
        spills_in_loops: those of them that stand in a loop.
        instructions: all.
        instructions_in_loops: those of them that stand in a loop, each once.
        classes: instructions of each class, by name.
        classes_in_loops: the same of what stands in loops.
        forbidden: opcodes that SM120 lacks, by the feature they belong to.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    spills: int
    spills_in_loops: int
    instructions: int
    instructions_in_loops: int
    classes: Mapping[str, int]
    classes_in_loops: Mapping[str, int]
    forbidden: Mapping[str, tuple[str, ...]]


def read_cubin(cubin: bytes) -> dict[str, CubinFacts]:
    """The facts of each function of a cubin, by its name.

    Raises:
        FileNotFoundError: There is no cuobjdump or nvdisasm; the text says where they come from.
        RuntimeError: One of them does not run, or refuses the file.
        ValueError: The cubin has no function, or the tools do not agree on its functions.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "--no-dataflow", file.name)
    return facts_of(resources, code)


def facts_of(resources: str, code: str) -> dict[str, CubinFacts]:
    """The facts of each function, from what the two tools printed; see `read_cubin`."""
    taken = read_resources(resources)
    sections = _split(code)
    facts = {}
    for name, of_it in taken.items():
        text = sections.get(f".text.{name}")
        if text is None:
            raise ValueError(f"cubin: nvdisasm shows no code for the function {name!r}")
        instructions = read_instructions(text)
        classes = count_classes(instructions)
        in_loops = count_classes(instructions, in_loops=True)
        facts[name] = CubinFacts(
            registers=of_it["REG"],
            stack_bytes=of_it["STACK"],
            static_shared_bytes=max(0, of_it["SHARED"] - SHARED_RESERVED),
            spills=_local(classes),
            spills_in_loops=_local(in_loops),
            instructions=len(instructions),
            instructions_in_loops=sum(i.depth > 0 for i in instructions),
            classes=classes,
            classes_in_loops=in_loops,
            forbidden=find_forbidden(text + sections.get(f".nv.info.{name}", "")),
        )
    return facts


def read_resources(text: str) -> dict[str, dict[str, int]]:
    """What each function takes, as in {"kernel": {"REG": 80, "STACK": 0, "SHARED": 1024, ...}}.

    Args:
        text: What `cuobjdump --dump-resource-usage` prints.

    Raises:
        ValueError: It names no function, or a function without registers or shared memory.
    """
    parts = _FUNCTION.split(text)[1:]
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", body)}
        if lacking := {"REG", "STACK", "SHARED"} - numbers.keys():
            raise ValueError(f"cubin: no {', '.join(sorted(lacking))} for the function {name!r}")
        found[name] = numbers
    if not found:
        raise ValueError("cubin: cuobjdump found no function in it")
    return found


def find_tool(name: str) -> Path:
    """One of NVIDIA's binary tools, from Triton's wheel.

    Raises:
        FileNotFoundError: Triton is not installed, or its wheel lacks the tool.
    """
    folder = Probes().package_folder("triton")
    tool = folder / "backends" / "nvidia" / "bin" / name if folder else None
    if tool is None or not tool.is_file():
        raise FileNotFoundError(
            f"{name} was not found; Triton's wheel for Linux carries it: pip install 'triton>=3.4'"
        )
    return tool


def _run(name: str, *arguments: str) -> str:
    tool = find_tool(name)
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{name} failed: {error.stderr.strip() or error.stdout}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{name} does not run: {error}") from error
    return done.stdout


def _split(code: str) -> dict[str, str]:
    parts = _SECTION.split(code)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _local(classes: Mapping[str, int]) -> int:
    return classes.get("local load", 0) + classes.get("local store", 0)

"""Show a kernel's own CUDA code in a lesson, as `show` does for Python."""

import re
from dataclasses import dataclass
from pathlib import Path

from mla_ref.checks import describe


@dataclass(frozen=True)
class CudaSource:
    """CUDA code, with the place it stands in.

    Attributes:
        place: File and line, for example "decode.cu, line 17".
        code: The text.
    """

    place: str
    code: str

    def __repr__(self) -> str:
        """As plain text."""
        return f"// {self.place}\n{self.code}"

    def _repr_markdown_(self) -> str:
        """As a coloured block, in a notebook and in the book."""
        return f"```cpp\n{self!r}\n```"


def show_cuda(path: Path, name: str, *, first: str = "", last: str = "") -> CudaSource:
    """A function of a .cu or .cuh file, or some of its lines.

    Args:
        path: The file.
        name: The function; of several of that name the first that has a body.
        first: Begin with the first line that holds this; empty for the whole function.
        last: End with the first line from there on that holds this; empty for its end.

    Raises:
        ValueError: There is no such function, or no such line in it.
    """
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"^[^\n/#]*\b{re.escape(name)}\([^;{{]*\{{", text, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"name must be a function of {path.name}, got {describe(name)}")
    end, depth = found.end(), 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    lines = text[found.start() : end].splitlines()
    start = _line(lines, first, path, 0)
    stop = _line(lines, last, path, start) if last else len(lines) - 1
    indent = min(len(line) - len(line.lstrip()) for line in lines[start : stop + 1] if line.strip())
    number = text.count("\n", 0, found.start()) + 1 + start
    code = "\n".join(line[indent:] for line in lines[start : stop + 1])
    return CudaSource(f"{path.name}, line {number}", code)


def _line(lines: list[str], part: str, path: Path, start: int) -> int:
    for i in range(start, len(lines)):
        if part in lines[i]:
            return i
    raise ValueError(f"first and last must stand in the function of {path.name}, got {part!r}")

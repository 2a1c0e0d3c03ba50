"""The text of a kernel as NVRTC gets it: one string, its headers of this folder pasted in.

One string, because CuPy keeps what it has compiled under a hash of the string and the options: with
a header beside it, an edit of the header would go unseen.
"""

import re
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++20",)
# The most that SM120 gives a block; so no kernel here asks for more, on any GPU.
SHARED_LIMIT = 101_376


@lru_cache
def read_source(name: str, ptx: str | None = None) -> str:
    """The source of `name`, a .cu file of this folder, with each header once.

    Args:
        name: The file.
        ptx: What stands in place of ptx.cuh, for a compiler that knows no PTX; None: the file.
    """
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        if file == "ptx.cuh" and ptx is not None:
            return ptx
        lines = []
        for number, line in enumerate((FOLDER / file).read_text().splitlines(), start=1):
            if found := re.fullmatch(r'#include "(\w+\.cuh)"', line):
                lines += [expand(found[1]), f'#line {number + 1} "{file}"']
            elif line != "#pragma once":
                lines.append(line)
        # Errors and profilers then name the file that people read.
        return "\n".join([f'#line 1 "{file}"', *lines])

    return expand(name) + "\n"

"""Show the library's own code in a lesson, so that no lesson holds a copy that could drift."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """Code of this library, with the place it stands in.

    Attributes:
        place: File below the package and line, for example "attention/causal.py, line 17".
        code: The text.
    """

    place: str
    code: str

    def __repr__(self) -> str:
        """As plain text."""
        return f"# mla_ref/{self.place}\n{self.code}"

    def _repr_markdown_(self) -> str:
        """As a coloured block, in a notebook and in the book."""
        return f"```python\n{self!r}\n```"


def show(function: Callable[..., Any] | type, *helpers: str, docstring: bool = False) -> Source:
    """The source of a function or class, by default without its own docstring.

    Args:
        function: Anything that Python code defines; a decorated function shows what it wraps.
        helpers: Names of functions in the same module to show below it.
        docstring: Keep the docstrings.

    Raises:
        TypeError: There is no Python source, as for a built-in function.
        ValueError: The module has no such helper.
    """
    wrapped = inspect.unwrap(function)
    path = Path(inspect.getfile(wrapped)).parts
    below = path[::-1].index("mla_ref") if "mla_ref" in path else 1
    module = sys.modules[wrapped.__module__]
    parts = [wrapped]
    for helper in helpers:
        if not hasattr(module, helper):
            raise ValueError(f"helpers must name functions of {module.__name__}, got {helper!r}")
        parts.append(inspect.unwrap(getattr(module, helper)))
    return Source(
        f"{'/'.join(path[-below:])}, line {inspect.getsourcelines(wrapped)[1]}",
        "\n\n\n".join(_code(part, docstring) for part in parts),
    )


def _code(part: Callable[..., Any] | type, docstring: bool) -> str:
    code = textwrap.dedent(inspect.getsource(part)).rstrip()
    return code if docstring else _without_docstring(code)


def _without_docstring(code: str) -> str:
    definition = ast.parse(code).body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.ClassDef)) or not ast.get_docstring(
        definition
    ):
        return code
    text = definition.body[0]
    lines = code.splitlines()
    del lines[text.lineno - 1 : text.end_lineno]
    return "\n".join(lines)

"""A hash of a kernel's source that changes when the kernel does, and not when a comment does.

A measured number belongs to a kernel as it was. The hash covers the function, the functions and
constants that it uses in turn, in whatever file of this project they stand; comments, docstrings,
blank lines and line breaks are left out. It reads files and imports nothing, so it is the same with
and without Triton.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Names from elsewhere (triton, torch) are not followed: their versions stand in each receipt.
_OURS = ("mla_kernels", "mla_ref")
# Fields that not every Python has, and that no kernel uses.
_UNSTABLE = ("type_params", "type_comment", "kind")
_LENGTH = 16  # hex digits; no one is to be kept from forging a hash, only from missing a change

_Key = tuple[Path, str]


class _Imported(NamedTuple):
    """A name that a file imports: a name of the file `path`, or the file `module` as a whole."""

    path: Path | None
    name: str
    module: Path | None


def source_hash(path: Path, name: str) -> str:
    """The hash of the function, class or constant `name` of a file, and of all that it uses.

    Classes that it uses are not followed: what checks a spec is no kernel. One that says how a
    kernel is cut is named by itself.

    Returns:
        16 hex digits of the SHA-256.

    Raises:
        ValueError: The file has nothing of that name at its top level.
    """
    found: dict[_Key, str] = {}
    _collect((path.resolve(), name), found)
    if not found:
        raise ValueError(f"name must be a function, class or constant of {path.name}, got {name!r}")
    # Sorted by what it says, not by where it stands: moving a helper to another file is no change.
    return hashlib.sha256("\n".join(sorted(found.values())).encode()).hexdigest()[:_LENGTH]


def _collect(key: _Key, found: dict[_Key, str]) -> None:
    path, name = key
    node = _definitions(path).get(name)
    if key in found or node is None or (found and isinstance(node, ast.ClassDef)):
        return
    if isinstance(node, _Imported):
        if node.path is not None:
            _collect((node.path, node.name), found)
        return
    found[key] = _canonical(node)
    for used in _names(node):
        module, _, attribute = used.partition(".")
        if attribute:
            _collect_attribute(path, module, attribute, found)
        else:
            _collect((path, used), found)


def _canonical(node: object) -> str:
    """A definition in one form, whichever Python reads it.

    `ast.unparse` sets quotes and brackets otherwise in Python 3.12 than in 3.11, a node has fields
    there that it had not before, and an f-string may have an empty piece more: a receipt of one
    would be stale for the other.
    """
    if isinstance(node, ast.JoinedStr):
        pieces = [p for p in node.values if not (isinstance(p, ast.Constant) and p.value == "")]
        return f"JoinedStr{_canonical(pieces)}"
    if isinstance(node, list):
        return f"[{' '.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _UNSTABLE]
    inside = " ".join(f"{name}={_canonical(value)}" for name, value in fields)
    return f"{type(node).__name__}({inside})"


def _collect_attribute(path: Path, module: str, attribute: str, found: dict[_Key, str]) -> None:
    """`module.attribute`, where the name on the left is a module of ours."""
    node = _definitions(path).get(module)
    if isinstance(node, _Imported) and node.module is not None:
        _collect((node.module, attribute), found)


@lru_cache(maxsize=256)
def _parse(path: Path, modified_ns: int) -> dict[str, ast.stmt | _Imported]:
    found: dict[str, ast.stmt | _Imported] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = _without_docstrings(node)
        elif isinstance(node, ast.Assign):
            for name in (t.id for t in node.targets if isinstance(t, ast.Name)):
                found[name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = _module_path(f"{node.module}.{alias.name}")
                here = _Imported(_module_path(node.module), alias.name, inner)
                found[alias.asname or alias.name] = here
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = _Imported(None, "", _module_path(alias.name))
    return found


def _definitions(path: Path) -> dict[str, ast.stmt | _Imported]:
    return _parse(path, path.stat().st_mtime_ns)


def _without_docstrings(node: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | ast.ClassDef:
    documented = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    for inner in documented:
        if ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


def _names(node: ast.stmt) -> Iterator[str]:
    """The names that a definition reads, and what it reads off a name, as "module.attribute"."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            yield f"{inner.value.id}.{inner.attr}"
        elif isinstance(inner, ast.Name):
            yield inner.id


def _module_path(module: str) -> Path | None:
    """The file of a module of ours, found without importing its package."""
    package, *rest = module.split(".")
    spec = find_spec(package) if package in _OURS else None
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path.resolve()
    return None

"""The reference, one page a floor of the library, written into book/api/ before every build.

The floors and their order are those of the import rules in pyproject.toml, so a new floor has a
page as soon as it exists.
"""

import importlib
import inspect
import pkgutil
import tomllib
from importlib.util import find_spec
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1]


def floors() -> list[str]:
    """The floors that exist, the ground first. The command line has a page of its own."""
    project = tomllib.loads((BOOK.parent / "pyproject.toml").read_text("utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [f"mla_ref.{layer.strip('()')}" for layer in reversed(layers)]
    exist = [name for name in names if find_spec(name)]
    return [name for name in exist if name not in ("mla_ref.cli", "mla_ref.__main__")]


def write_pages(app) -> None:
    """Write the page of each floor where it has changed, and remove those of floors that went."""
    if Path(app.srcdir) != BOOK:
        return  # A test builds other pages with this configuration.
    folder = BOOK / "api"
    folder.mkdir(exist_ok=True)
    pages = {f"{floor.removeprefix('mla_ref.')}.md": page(floor) for floor in floors()}
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def page(floor: str) -> str:
    """What a floor is for, the names it hands out, then module by module."""
    package = importlib.import_module(floor)
    parts = [f"# {floor.removeprefix('mla_ref.')}", module(floor)]
    if names := getattr(package, "__all__", None):
        names = "".join(f"    {name},\n" for name in names)
        parts.append(f"```python\nfrom {floor} import (\n{names})\n```")
    for name in public_modules(package):
        parts += [f"({name})=\n## {name.removeprefix(floor + '.')}", module(name)]
    return "\n\n".join(parts) + "\n"


def module(name: str) -> str:
    """A module's docstring, which is Markdown already, and what autodoc makes of its members."""
    text = inspect.getdoc(importlib.import_module(name)) or ""
    # Without :ignore-module-all: a package would show what it hands on from its modules again.
    options = "   :members:\n   :ignore-module-all:\n"
    return f"{text}\n\n```{{eval-rst}}\n.. automodule:: {name}\n{options}```"


def public_modules(package) -> list[str]:
    """The full names of a package's public modules, at any depth, in alphabetical order."""
    path = getattr(package, "__path__", [])
    names = [found.name for found in pkgutil.walk_packages(path, package.__name__ + ".")]
    return [n for n in names if not any(part.startswith("_") for part in n.split("."))]


def setup(app):
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}

"""One place knows the machine: only mla_ref.platform touches torch.cuda."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLATFORM = ROOT / "src" / "mla_ref" / "platform"
MODULES = sorted(
    path
    for folder in (ROOT / "src" / "mla_ref", ROOT / "kernels")
    for path in folder.rglob("*.py")
    if PLATFORM not in path.parents
)


def lines_that_touch_cuda(source: str) -> list[int]:
    """The lines that import torch.cuda or anything from it, or reach it as an attribute."""
    tree = ast.parse(source)
    torches = {
        alias.asname or "torch"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "torch"
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                touches = any(f"{alias.name}.".startswith("torch.cuda.") for alias in names)
            case ast.ImportFrom(module="torch", names=names):
                touches = any(alias.name == "cuda" for alias in names)
            case ast.ImportFrom(module=str(module)):
                touches = f"{module}.".startswith("torch.cuda.")
            case ast.Attribute(attr="cuda", value=ast.Name(id=name)):
                touches = name in torches
            case _:
                touches = False
        if touches:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.cuda.is_available()",
        "import torch as t\ndef f():\n    return t.cuda",
        "def f():\n    import torch\n    torch.cuda.synchronize()",
        "import torch.nn\ntorch.cuda.synchronize()",
        "import torch.cuda",
        "import torch.cuda.nvtx as nvtx",
        "from torch import nn, cuda",
        "from torch.cuda import Event",
        "from torch.cuda.graphs import CUDAGraph",
    ],
)
def test_the_check_finds_each_way_to_touch_it(source):
    assert lines_that_touch_cuda(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.device('cuda')",
        "import torch\nx = torch.version.cuda",
        "'torch.cuda in words'  # torch.cuda",
        "class box:\n    cuda = 1\nbox.cuda",
        "from mla_ref.platform import resolve_device",
    ],
)
def test_the_check_passes_what_does_not_touch_it(source):
    assert not lines_that_touch_cuda(source)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_asks_platform_instead(path):
    lines = lines_that_touch_cuda(path.read_text(encoding="utf-8"))
    assert not lines, f"{path.relative_to(ROOT)} touches torch.cuda in lines {lines}"


def test_the_platform_itself_does_touch_it():
    """Else the rule above guards nothing."""
    files = sorted(PLATFORM.rglob("*.py"))
    assert any(lines_that_touch_cuda(path.read_text(encoding="utf-8")) for path in files)

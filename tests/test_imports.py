"""Every module imports without a GPU and without one optional package, and starts nothing.

Each check runs in a fresh interpreter: here torch and half of the packages are loaded already.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

OPTIONAL = ("triton", "cupy", "gguf", "tokenizers", "matplotlib", "transformers")

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({absent!r}))
import mla_ref
names = ["mla_ref"]
for module in pkgutil.walk_packages(mla_ref.__path__, "mla_ref."):
    importlib.import_module(module.name)
    names.append(module.name)
print(len(names))
"""

REQUIRE_ALL = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))
from mla_ref.platform import require
for name in {absent!r}:
    try:
        require(name)
    except ImportError as error:
        print(error)
"""

LOADED = """
import sys
import {module}
print(*(name for name in {optional!r} if name in sys.modules))
"""

NO_CUDA = """
import torch
import mla_ref.platform
print(torch.cuda.is_initialized())
"""


def _python(program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_B121_B122_every_module_imports_without_gpu_and_optional_packages():
    (count,) = _python(IMPORT_ALL.format(absent=OPTIONAL))
    assert int(count) > 20


def test_B121_B122_the_ladders_table_is_there_without_them():
    """The command line builds, since every verb imports what is optional inside its function."""
    program = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))"
    lines = _python(f"{program}\nfrom mla_ref.cli import main\nsys.argv[1:] = ['--help']\nmain()")
    assert any("doctor" in line for line in lines)


def test_B122_asking_for_an_absent_package_names_its_extra():
    lines = _python(REQUIRE_ALL.format(absent=OPTIONAL))
    assert len(lines) == len(OPTIONAL)
    for name, line in zip(OPTIONAL, lines, strict=True):
        assert line.startswith(f"{name} is needed here and is not installed: pip install")
        assert '"mla-ref[' in line


def test_importing_the_package_loads_nothing_optional():
    assert _python(LOADED.format(module="mla_ref", optional=OPTIONAL)) == [""]


def test_importing_platform_loads_nothing_optional_and_no_torch():
    assert _python(LOADED.format(module="mla_ref.platform", optional=("torch", *OPTIONAL))) == [""]


def test_importing_platform_does_not_start_cuda():
    assert _python(NO_CUDA) == ["False"]

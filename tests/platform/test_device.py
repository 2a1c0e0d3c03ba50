"""A device's name becomes a device that exists, or an error that says why not."""

import pytest
import torch

from mla_ref.platform import (
    gpu,
    peak_device_memory,
    reset_peak_device_memory,
    resolve_device,
    synchronize,
)
from mla_ref.platform.gpu import torch_runs_on, why_no_gpu

CPU = torch.device("cpu")


def test_the_cpu_is_always_there(bare):
    assert resolve_device("cpu", bare()) == CPU
    assert resolve_device("cpu") == CPU


def test_auto_takes_a_gpu_where_there_is_one(bare):
    assert resolve_device("auto", bare()) == CPU
    assert resolve_device("auto", bare(count_gpus=lambda: 2)) == torch.device("cuda:0")


def test_a_gpu_by_number(bare):
    two = bare(count_gpus=lambda: 2)
    assert resolve_device("cuda", two) == torch.device("cuda:0")
    assert resolve_device("cuda:1", two) == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"'cuda:2' is not there; .* are cuda:0, cuda:1$"):
        resolve_device("cuda:2", two)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "mps", "", "cpu\n"])
def test_another_name_is_refused(bare, name):
    with pytest.raises(ValueError, match="device must be cpu, cuda, cuda:N or auto"):
        resolve_device(name, bare(count_gpus=lambda: 1))


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_says_why(bare, name):
    with pytest.raises(ValueError, match=f"'{name}' needs an NVIDIA GPU.*: no NVIDIA driver"):
        resolve_device(name, bare())
    with pytest.raises(ValueError, match=r"built for the CPU only \(pip install .* torch\)"):
        resolve_device(name, bare(driver_cuda=lambda: (13, 0)))


@pytest.mark.parametrize(
    "driver, torch_cuda, visible, reason",
    [
        (None, "13.0", None, "no NVIDIA driver"),
        ((13, 0), None, None, "built for the CPU only"),
        ((13, 0), "13.0", "", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ((13, 0), "13.0", "-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        ((12, 4), "13.0", None, "built for CUDA 13.0, the driver runs CUDA 12.4 at most"),
        ((13, 0), "12.8", "0", "shows no usable GPU"),
    ],
)
def test_each_reason_for_no_gpu(driver, torch_cuda, visible, reason):
    assert reason in why_no_gpu(driver, torch_cuda, visible)[0]


@pytest.mark.parametrize(
    "archs, capability, runs",
    [
        (("sm_80", "sm_90"), (9, 0), True),
        (("sm_80", "sm_90"), (8, 9), True),
        (("sm_80", "sm_90"), (12, 0), False),
        (("sm_90", "compute_90"), (12, 0), True),
        (("sm_120",), (12, 1), True),
        (("sm_121",), (12, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_120a",), (12, 1), False),
        (("compute_90a",), (12, 0), False),
        ((), (9, 0), False),
    ],
)
def test_which_builds_of_torch_run_on_a_card(archs, capability, runs):
    assert torch_runs_on(archs, capability) is runs


def test_a_cpu_has_nothing_to_wait_for_and_no_count_of_memory():
    assert synchronize(CPU) is None
    for count in (peak_device_memory, reset_peak_device_memory):
        with pytest.raises(ValueError, match=r"device must be a CUDA device.*'cpu'"):
            count(CPU)


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:0", 0), ("cuda:2", 2)])
def test_cuda_without_a_number_is_the_current_gpu(monkeypatch, name, index):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        gpu, "read_gpu", lambda number: gpu.Gpu(number, "a card", (12, 0), 1, 1, 1, 1, 1)
    )
    assert gpu.gpu_of(torch.device(name)).index == index

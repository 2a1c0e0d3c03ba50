"""nvidia-smi's answer as facts, and nothing where it is not there or says [N/A]."""

from collections.abc import Sequence

import pytest

from mla_ref.platform import GpuState, read_gpu_state
from mla_ref.platform.nvidia_smi import run_nvidia_smi


def test_an_answer_is_read_by_field() -> None:
    asked: list[str] = []

    def nvidia_smi(arguments: Sequence[str]) -> str:
        asked.extend(arguments)
        return "580.159.04, 700.00, 512.3, 1725, 1980, 3201, 61\n"

    assert read_gpu_state(1, nvidia_smi) == GpuState(
        driver="580.159.04",
        power_limit_w=700.0,
        power_w=512.3,
        sm_mhz=1725.0,
        sm_max_mhz=1980.0,
        memory_mhz=3201.0,
        temperature_c=61.0,
    )
    assert asked[0].startswith("--id=") and "power.limit" in asked[1]


def test_what_is_not_available_is_none() -> None:
    state = read_gpu_state(0, lambda arguments: "580.1, [N/A], [N/A], 1725, 1980, 3201, 61")
    assert (state.driver, state.power_limit_w, state.sm_mhz) == ("580.1", None, 1725.0)


@pytest.mark.parametrize("answer", ["", "No devices were found", "a, b"])
def test_no_answer_is_no_facts(answer: str) -> None:
    assert read_gpu_state(0, lambda arguments: answer) == GpuState()


def test_without_a_gpu_nothing_is_asked() -> None:
    def never(arguments: Sequence[str]) -> str:
        raise AssertionError("asked")

    assert read_gpu_state(None, never) == GpuState()


def test_a_program_that_is_not_there_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_nvidia_smi(["--help"]) == ""

"""The GPU timer, on a clock that invents times: gate, order, flush, graphs and their absence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import FakeClock
from torch import Tensor

from mla_ref.bench import Agreement, Contender, NoTime, Timing
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.kernel_timer import HostTimer, kernel_timer
from mla_ref.numerics import compare
from mla_ref.platform import CudaClock

RIGHT = torch.tensor([1.0, 2.0])


def check(result: Tensor) -> list[Agreement]:
    return [Agreement("result", compare(result, RIGHT), rel_l2=0.0, max_abs=0.0)]


def contender(run: Callable[[], Any], name: str = "one") -> Contender[Any]:
    return Contender(name, run, check)


def test_a_sample_is_the_median_of_a_turn_and_turns_alternate() -> None:
    clock = FakeClock(3e-3, 30e-3, 1e-3, 10e-3, 2e-3, 20e-3)
    timer = GpuTimer(clock, rounds=3, replays=2)
    a, b = timer.race([contender(RIGHT.clone, "a"), contender(RIGHT.clone, "b")])
    assert isinstance(a, Timing) and isinstance(b, Timing)
    assert (a.samples_s, b.samples_s) == ((3e-3, 1e-3, 2e-3), (30e-3, 10e-3, 20e-3))
    assert (a.median_s, b.median_s) == (2e-3, 20e-3)


def test_every_replay_comes_after_a_flush() -> None:
    clock = FakeClock()
    GpuTimer(clock, rounds=2, replays=3).race([contender(RIGHT.clone)])
    after_capture = clock.calls[clock.calls.index("capture") + 1 :]
    assert after_capture == ["flush", "replay"] * 6


def test_the_time_says_how_it_was_taken() -> None:
    (found,) = GpuTimer(FakeClock(), rounds=1, replays=5).race([contender(RIGHT.clone)])
    assert isinstance(found, Timing)
    assert (
        found.clock == "median of 5 CUDA graph replays, each after 1 MiB were written over the L2"
    )


def test_what_no_graph_can_hold_is_timed_by_launches_and_says_so() -> None:
    (found,) = GpuTimer(FakeClock(captures=False), replays=4).race([contender(RIGHT.clone)])
    assert isinstance(found, Timing)
    assert "4 plain launches" in found.clock
    assert "no graph can hold it (operation not permitted when stream is capturing)" in found.clock


def test_plain_launches_capture_nothing() -> None:
    clock = FakeClock()
    (found,) = GpuTimer(clock, mode="launches").race([contender(RIGHT.clone)])
    assert isinstance(found, Timing) and "capture" not in clock.calls


def test_a_wrong_result_gets_no_time_and_costs_only_itself() -> None:
    wrong, right = GpuTimer(FakeClock()).race(
        [contender(lambda: RIGHT + 1, "wrong"), contender(RIGHT.clone, "right")]
    )
    assert isinstance(wrong, NoTime) and wrong.wrong and "before the timed runs" in wrong.why
    assert isinstance(right, Timing)


def test_a_graph_that_does_nothing_gets_no_time() -> None:
    """The first call is right and the replays leave the output as it was: it was spoilt."""
    kept = RIGHT.clone()
    calls = []

    class IdleClock(FakeClock):
        def capture(self, run: Callable[[], Any]) -> Any:
            captured = super().capture(run)
            return type(captured)(lambda: None, captured.result)

    def run() -> Tensor:
        calls.append(1)
        return kept.copy_(RIGHT)

    (found,) = GpuTimer(IdleClock()).race([contender(run)])
    assert isinstance(found, NoTime) and found.wrong
    assert "of the last of 60 timed runs" in found.why


def test_what_raises_is_a_reason_in_one_line() -> None:
    def refuse() -> Tensor:
        raise RuntimeError("\n  no kernel image is available\nmore")

    (found,) = GpuTimer(FakeClock()).race([contender(refuse)])
    assert found == NoTime("one", "RuntimeError: no kernel image is available", raised=True)


def test_an_error_of_no_known_kind_costs_only_itself_on_every_timer() -> None:
    class OutOfResources(Exception):
        """As Triton's, whose only base is Exception."""

    def refuse() -> Tensor:
        raise OutOfResources("shared memory, Required: 147456")

    for timer in (GpuTimer(FakeClock()), HostTimer()):
        refused, right = timer.race([contender(refuse, "a"), contender(RIGHT.clone, "b")])
        assert isinstance(refused, NoTime) and refused.raised and not refused.wrong
        assert refused.why == "OutOfResources: shared memory, Required: 147456"
        assert isinstance(right, Timing)


@pytest.mark.parametrize("field", ["rounds", "replays"])
def test_no_round_and_no_replay_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        GpuTimer(FakeClock(), **{field: 0})


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        GpuTimer(FakeClock(), mode="loop")


def test_without_a_gpu_the_clock_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="must be a CUDA device"):
        CudaClock(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="'cuda' needs an NVIDIA GPU, and there is none"):
        CudaClock(torch.device("cuda"))


def test_a_cpu_gets_the_clock_of_the_host_and_the_same_gate() -> None:
    timer = kernel_timer(torch.device("cpu"), repeats=2)
    assert isinstance(timer, HostTimer)
    right, wrong = timer.race([contender(RIGHT.clone), contender(lambda: RIGHT + 1)])
    assert isinstance(right, Timing) and right.clock == "wall clock" and len(right.samples_s) == 2
    assert isinstance(wrong, NoTime) and wrong.wrong

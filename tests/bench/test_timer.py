"""The timer: no time without a right result, and the samples are the ones the clock gave."""

import json
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from mla_ref.bench import (
    Agreement,
    Contender,
    GateError,
    WallClock,
    close_to,
    compare_times,
    measure,
    spoil,
)
from mla_ref.numerics import AttentionResult, compare, precision_rule

RIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


def check_right(result: Tensor) -> list[Agreement]:
    return [Agreement("result", compare(result, RIGHT), rel_l2=1e-6, max_abs=1e-6)]


class FakeTime:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def run_taking(self, durations: Iterable[float]) -> Callable[[], Tensor]:
        remaining = iter(durations)

        def run() -> Tensor:
            self.seconds += next(remaining)
            return RIGHT.clone()

        return run


class Script:
    """A run that returns the next of some prepared results, and counts its calls."""

    def __init__(self, *results: Tensor) -> None:
        self.results = results
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.results[self.calls - 1].clone()


# ---- the gate


def test_a_wrong_result_gets_no_time_and_the_error_names_case_and_comparison() -> None:
    run = Script(RIGHT + torch.tensor([0.0, 0.0, 0.5, 0.0]))
    with pytest.raises(GateError, match=r"paged 8x64.*before the timed runs.*worst at \[2\]") as e:
        measure("paged 8x64", run, check_right, warmup=3, repeats=5)
    assert run.calls == 1  # stopped at the door: no warm-up, no timed run
    assert e.value.name == "paged 8x64"
    assert [verdict.passed for verdict in e.value.verdicts] == [False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_with_one_nan_or_inf_gets_no_time(bad: float) -> None:
    wrong = RIGHT.clone()
    wrong[1] = bad
    with pytest.raises(GateError, match=r"worst at \[1\]"):
        measure("case", lambda: wrong.clone(), check_right, warmup=0, repeats=1)


def test_a_result_that_is_right_only_before_the_timing_gets_no_time() -> None:
    run = Script(RIGHT, RIGHT, RIGHT, RIGHT + 1)  # checked, warm-up, timed, timed
    with pytest.raises(GateError, match="last timed run"):
        measure("case", run, check_right, warmup=1, repeats=2)
    assert run.calls == 4


def test_a_run_that_hands_out_its_first_result_again_gets_no_time() -> None:
    cache: list[Tensor] = []

    def run() -> Tensor:
        if not cache:
            cache.append(RIGHT.clone())
        return cache[0]

    with pytest.raises(GateError, match="last timed run"):
        measure("case", run, check_right, warmup=0, repeats=1)


def test_a_run_that_leaves_a_part_of_its_buffer_unwritten_gets_no_time() -> None:
    buffer = RIGHT.clone()

    def run() -> Tensor:
        buffer[1:] = RIGHT[1:]  # element 0 is right the first time, by luck
        return buffer

    with pytest.raises(GateError, match=r"last timed run.*worst at \[0\]"):
        measure("case", run, check_right, warmup=0, repeats=1)


def test_a_run_that_clones_a_private_copy_is_caught_by_changing_its_input() -> None:
    state: dict[str, Tensor] = {}

    def run() -> Tensor:
        return state.setdefault("kept", 2 * state["x"]).clone()

    def change_input() -> None:
        state["x"] = torch.rand(4)

    def check(result: Tensor) -> list[Agreement]:
        return [Agreement("y", compare(result, 2 * state["x"]), rel_l2=1e-6, max_abs=1e-6)]

    with pytest.raises(GateError, match="last timed run"):
        measure("case", run, check, warmup=0, repeats=1, before_each=change_input)


def test_a_run_in_place_passes_if_its_input_is_restored() -> None:
    data = torch.empty(4)

    def restore() -> None:
        data.copy_(RIGHT - 1)

    timing = measure(
        "case", lambda: data.add_(1), check_right, warmup=1, repeats=3, before_each=restore
    )
    assert len(timing.samples_s) == 3

    restore()
    with pytest.raises(GateError):
        measure("case", lambda: data.add_(1), check_right, warmup=1, repeats=3)


def test_a_check_that_raises_closes_the_gate() -> None:
    with pytest.raises(GateError, match=r"case.*shape \[3\]") as error:
        measure("case", lambda: RIGHT[:3].clone(), check_right)
    assert isinstance(error.value.__cause__, ValueError)


def test_a_check_that_compares_nothing_closes_the_gate() -> None:
    with pytest.raises(GateError, match="compared nothing"):
        measure("case", RIGHT.clone, lambda result: [])


@pytest.mark.parametrize("limit", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("which", ["rel_l2", "max_abs"])
def test_a_limit_that_would_let_everything_through_is_refused(which: str, limit: float) -> None:
    limits = {"rel_l2": 1e-6, "max_abs": 1e-6, which: limit}
    with pytest.raises(ValueError, match=which):
        Agreement("out", compare(RIGHT, RIGHT), **limits)


@pytest.mark.parametrize("part", ["out", "lse"])
def test_close_to_checks_every_named_part(part: str) -> None:
    good = AttentionResult(torch.ones(2, 1, 4), torch.zeros(2, 1))
    check = close_to(good._asdict(), rel_l2=1e-6, max_abs=1e-6)
    assert [verdict.passed for verdict in check(good)] == [True, True]
    bad = good._replace(**{part: getattr(good, part) + 0.1})
    assert [v.what for v in check(bad) if not v.passed] == [part]


def test_spoil_reaches_every_tensor_of_a_result() -> None:
    shared = torch.zeros(2, 3)
    result = AttentionResult(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16))
    others = [shared[1], {"ids": torch.zeros(2, dtype=torch.int32), "mask": torch.tensor([True])}]
    spoil((result, others, "not a tensor", None))
    assert result.out.isnan().all()
    assert result.lse.isnan().all()
    assert shared.isnan().all(dim=1).tolist() == [False, True]  # a view spoils what it shows
    assert (others[1]["ids"] == torch.iinfo(torch.int32).min).all()
    assert not others[1]["mask"].any()


# ---- the times


def test_samples_are_the_timed_runs_only() -> None:
    now = FakeTime()
    run = now.run_taking([100.0, 50.0, 50.0, 3.0, 1.0, 2.0, 9.0])  # checked, 2 warm-up, 4 timed
    timing = measure("case", run, check_right, warmup=2, repeats=4, clock=WallClock(now=now))
    assert timing.samples_s == (3.0, 1.0, 2.0, 9.0)
    assert (timing.median_s, timing.min_s, timing.max_s) == (2.5, 1.0, 9.0)
    assert str(timing) == "case: median 2.5 s, from 1 s to 9 s in 4 runs"


def test_the_clock_waits_for_the_device_before_and_after() -> None:
    events: list[str] = []

    def now() -> float:
        events.append("read clock")
        return float(len(events))

    clock = WallClock(synchronize=lambda: events.append("wait"), now=now)
    clock(lambda: events.append("run"))
    assert events == ["wait", "read clock", "run", "wait", "read clock"]


def test_before_each_runs_before_every_run_and_is_not_timed() -> None:
    now, calls = FakeTime(), []

    def flush() -> None:
        calls.append(now.seconds)
        now.seconds += 1000.0

    run = now.run_taking([1.0, 1.0, 2.0, 3.0])
    clock = WallClock(now=now)
    timing = measure("case", run, check_right, warmup=1, repeats=2, clock=clock, before_each=flush)
    assert len(calls) == 4
    assert timing.samples_s == (2.0, 3.0)


def test_compare_times_takes_turns_and_gives_the_ratio() -> None:
    now, order = FakeTime(), []

    def contender(name: str, durations: list[float]) -> Contender[Tensor]:
        run = now.run_taking(durations)

        def noted() -> Tensor:
            order.append(name)
            return run()

        return Contender(name, noted, check_right)

    a = contender("a", [9.0, 9.0, 2.0, 4.0, 6.0])
    b = contender("b", [9.0, 9.0, 1.0, 4.0, 2.0])
    result = compare_times(a, b, warmup=1, repeats=3, clock=WallClock(now=now))
    assert "".join(order) == "aabb" + "ababab"
    assert result.ratio == 2.0  # 4 over 2
    assert result.pair_ratios == (2.0, 1.0, 3.0)
    assert str(result) == "a takes 2.00 times as long as b (1.00 to 3.00 over 3 pairs of runs)"


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_compare_times_gates_both(wrong: str) -> None:
    a, b = (Contender(name, (RIGHT + (name == wrong)).clone, check_right) for name in ("a", "b"))
    with pytest.raises(GateError, match=f"^{wrong}: "):
        compare_times(a, b, warmup=0, repeats=1)


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(ValueError, match="clock"):
        measure("case", RIGHT.clone, check_right, clock=WallClock(now=lambda: 7.0))


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ({"repeats": 0}, ValueError),
        ({"warmup": -1}, ValueError),
        ({"repeats": 2.0}, TypeError),
        ({"warmup": True}, TypeError),
    ],
)
def test_counts_are_checked(counts: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(counts))):
        measure("case", RIGHT.clone, check_right, **counts)  # type: ignore[arg-type]
    pair = Contender("a", RIGHT.clone, check_right), Contender("b", RIGHT.clone, check_right)
    with pytest.raises(error, match=next(iter(counts))):
        compare_times(*pair, **counts)  # type: ignore[arg-type]


def test_json_is_strict_and_holds_every_sample() -> None:
    def check(result: Tensor) -> list[object]:
        rows = result[None]
        # An empty comparison has NaN as its worst values, which strict JSON cannot hold.
        nothing = Agreement("nothing", compare(rows[:0], rows[:0]), rel_l2=0.0, max_abs=0.0)
        return [nothing, precision_rule(rows, RIGHT[None].double(), RIGHT[None])]

    pair = Contender("a", RIGHT.clone, check), Contender("b", RIGHT.clone, check)
    result = compare_times(*pair, warmup=1, repeats=3)
    read = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert read["a"]["samples_s"] == list(result.a.samples_s)
    assert (read["a"]["warmup"], read["a"]["clock"]) == (1, "wall clock")
    assert [verdict["passed"] for verdict in read["b"]["verdicts"]] == [True, True]
    assert read["b"]["verdicts"][0]["comparison"]["worst_actual"] == "nan"
    assert read["ratio"] == pytest.approx(result.a.median_s / result.b.median_s)

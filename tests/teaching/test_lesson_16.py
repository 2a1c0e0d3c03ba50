"""What lesson 16 says of measuring: its model of a GPU, its receipt, and the clock it plants."""

from pathlib import Path

import pytest
import torch

from mla_ref.bench import Agreement, GateError, WallClock, measure, read_receipt
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted
from mla_ref.teaching.model_gpu import Buffer, ModelGPU
from mla_ref.teaching.receipt_example import example_receipt

ROOT = Path(__file__).parents[2]
MB = 1_000_000


def check(result):
    return [Agreement("out", compare(result, torch.ones(3)), rel_l2=0.0, max_abs=0.0)]


def time_of(gpu, launch):
    gpu.synchronize()
    start = gpu.now()
    launch()
    gpu.synchronize()
    return gpu.now() - start


# -- The model GPU ---------------------------------------------------------------------------------


def test_a_launch_returns_before_its_work_is_done():
    gpu = ModelGPU()
    assert gpu.run(lambda: "here", [Buffer(4 * MB)]) == "here"
    assert gpu.now() == pytest.approx(5e-6)
    gpu.synchronize()
    assert gpu.now() == pytest.approx(5e-6 + 2e-6 + 1e-6)


def test_work_waits_for_the_work_before_it_and_the_host_does_not():
    gpu = ModelGPU()
    for _ in range(2):
        gpu.run(lambda: None, [Buffer(400 * MB)])
    assert gpu.now() == pytest.approx(10e-6)
    gpu.synchronize()
    assert gpu.now() == pytest.approx(5e-6 + 2 * 102e-6)
    gpu.sleep(1.0)
    assert time_of(gpu, lambda: gpu.run(lambda: None, [Buffer(4 * MB)])) == pytest.approx(8e-6)


def test_what_was_read_or_written_lately_is_read_faster():
    gpu, data = ModelGPU(), Buffer(12 * MB)
    cold, warm = (time_of(gpu, lambda: gpu.run(lambda: None, [data])) for _ in range(2))
    assert (cold, warm) == (pytest.approx(10e-6), pytest.approx(8e-6))
    gpu.flush()
    assert time_of(gpu, lambda: gpu.run(lambda: None, [data])) == pytest.approx(10e-6)
    new = Buffer(12 * MB)
    gpu.write(new)
    assert time_of(gpu, lambda: gpu.run(lambda: None, [new])) == pytest.approx(8e-6)


def test_the_cache_forgets_the_oldest_first_and_holds_no_more_than_fits():
    gpu, first, second = ModelGPU(), Buffer(40 * MB), Buffer(40 * MB)
    gpu.run(lambda: None, [first, second])
    assert time_of(gpu, lambda: gpu.run(lambda: None, [second])) == pytest.approx(7e-6 + 40 / 12e6)
    # 20 MB of the first are left: the other half comes from memory.
    expected = 7e-6 + 20 / 12e6 + 20 / 4e6
    assert time_of(gpu, lambda: gpu.run(lambda: None, [first])) == pytest.approx(expected)
    huge = Buffer(600 * MB)
    for _ in range(2):
        seconds = time_of(gpu, lambda: gpu.run(lambda: None, [huge]))
    assert seconds == pytest.approx(7e-6 + 60 / 12e6 + 540 / 4e6)


def test_a_graph_is_one_launch():
    parts = [[Buffer(4 * MB)] for _ in range(10)]
    gpu = ModelGPU()
    assert time_of(gpu, lambda: gpu.replay(parts)) == pytest.approx(5e-6 + 10 * 3e-6)
    gpu = ModelGPU()
    one_by_one = time_of(gpu, lambda: [gpu.run(lambda: None, part) for part in parts])
    assert one_by_one == pytest.approx(10 * 5e-6 + 3e-6)


@pytest.mark.usefixtures("plain_calls")
def test_bad_input_is_named():
    with pytest.raises(ValueError, match="num_bytes must be at least 1"):
        Buffer(0)
    with pytest.raises(ValueError, match="launch_s"):
        ModelGPU(launch_s=0.0)


# -- The bug ---------------------------------------------------------------------------------------


def median(clock_type, num_bytes):
    gpu, data = ModelGPU(), Buffer(num_bytes)
    clock = clock_type(synchronize=gpu.synchronize, now=gpu.now)
    run = lambda: gpu.run(lambda: torch.ones(3), [data])  # noqa: E731
    return measure("it", run, check, clock=clock, before_each=gpu.flush).median_s


def test_B174_a_timed_launch_does_not_grow_with_the_work_and_passes_the_gate():
    right = [median(WallClock, n * MB) for n in (4, 400)]
    wrong = [median(planted.LaunchClock, n * MB) for n in (4, 400)]
    assert right == [pytest.approx(8e-6), pytest.approx(107e-6)]
    assert wrong == [pytest.approx(5e-6)] * 2
    assert 400 * MB / wrong[1] > 10 * ModelGPU().memory_bytes_s


def test_B174_where_a_call_ends_with_its_work_both_clocks_agree():
    ticks = iter(range(100))
    for clock_type in (WallClock, planted.LaunchClock):
        _, seconds = clock_type(now=lambda: float(next(ticks)))(lambda: None)
        assert seconds == 1.0


def test_the_gate_of_lesson_16_refuses_what_was_kept():
    kept = torch.ones(3)
    with pytest.raises(GateError, match="of the last timed run"):
        measure("the cheat", lambda: kept, check)


# -- The receipt -----------------------------------------------------------------------------------


def test_the_receipt_of_the_lesson_is_part_of_one_that_was_measured():
    mine = example_receipt()
    folder = ROOT / "kernels" / "receipts"
    paths = [*folder.glob("*/*.json"), *folder.glob("*/superseded/*.json")]
    wholes = [read_receipt(path) for path in paths]
    key = (mine.kernel_hash, mine.seconds)
    (whole,) = (whole for whole in wholes if (whole.kernel_hash, whole.seconds) == key)
    assert set(mine.lines) <= set(whole.lines)
    assert (mine.machine, mine.ceilings) == (whole.machine, whole.ceilings)


def test_what_lesson_16_says_of_the_receipt():
    lines = {
        (line.contender, line.rows, line.heads, line.workload): line
        for line in example_receipt().lines
    }

    def time(contender, rows, heads):
        return lines[contender, rows, heads, "disjoint"].median_us

    for rows in (4, 16, 64, 256):
        assert time("FlashMLA", rows, 8) == pytest.approx(time("FlashMLA", rows, 64), rel=0.01)
    slower = [time("decode", rows, 64) / time("FlashMLA", rows, 64) for rows in (4, 256)]
    assert [round(ratio, 1) for ratio in slower] == [1.2, 2.9]
    many = lines["decode", 256, 8, "verifier"]
    assert many.gathered_bytes / many.unique_bytes == pytest.approx(3.6, abs=0.01)
    widest = lines["decode", 256, 8, "disjoint"]
    assert widest.median_us / widest.floor_us == pytest.approx(2.4, abs=0.05)
    assert example_receipt().ceilings.empty_s == pytest.approx(3.6e-6, abs=0.05e-6)


# -- Figures ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_sample_is_drawn_with_median_and_mean():
    pytest.importorskip("matplotlib")
    (axes,) = figures.timed_samples({"a": [1e-3, 2e-3, 9e-3]}).axes
    samples, middle, mean = axes.lines
    assert list(samples.get_xdata()) == [1e-3, 2e-3, 9e-3]
    assert set(middle.get_xdata()) == {2e-3}
    assert list(mean.get_xdata()) == [pytest.approx(4e-3)]


@pytest.mark.thorough
def test_a_receipt_s_points_and_floor_are_its_own():
    pytest.importorskip("matplotlib")
    lines = [
        line
        for line in example_receipt().lines
        if line.workload == "verifier" and line.contender in ("decode", "b12x")
    ]
    few, many = figures.receipt_times(lines).axes
    assert [axes.get_title(loc="left") for axes in (few, many)] == ["8 heads", "64 heads"]
    drawn = [list(line.get_ydata()) for line in few.lines]
    mine = sorted((line.rows, line) for line in lines if line.heads == 8)
    assert [line.median_us for _, line in mine] in drawn
    assert [line.floor_us for _, line in mine] in drawn


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: figures.timed_samples({}), "runs must be one to eight"),
        (lambda: figures.timed_samples({"a": []}), r"runs\['a'\] must have a sample"),
        (lambda: figures.timed_samples({"a": [0.0]}), r"runs\['a'\]"),
        (lambda: figures.receipt_times([]), "lines must hold a time"),
        (lambda: figures.receipt_times(example_receipt().lines), "lines must be of one workload"),
    ],
)
def test_what_cannot_be_drawn(draw, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        draw()

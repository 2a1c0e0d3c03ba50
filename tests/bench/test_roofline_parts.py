"""The model of the steps around the attention: by hand, against the sweep, and what it refuses."""

import json
from pathlib import Path
from statistics import median

import pytest

from mla_ref.bench.roofline_devices import H200, RTX_5090
from mla_ref.bench.roofline_parts import PARTS, PartRates, hold_part, part_rates

SWEEP = Path(__file__).parents[2].glob("kernels/receipts/nvidia-h200/sweep/*.json")
POINTS = json.loads(max(SWEEP).read_text("utf-8"))["points"]
SCORES, TOPK, SLOTS = PARTS


def point(requests, rows, context, **seconds):
    parts = {name.replace("_", " "): {"median_s": x} for name, x in seconds.items()}
    sizes = {"requests": requests, "rows_per_request": rows, "context": context, "topk": 8}
    return {**sizes, "parts": parts}


def test_two_points_give_the_step_and_the_rate_by_hand():
    launch = H200.launch_s.value
    small = point(1, 1, 0, index_scores=launch + 3e-6)
    large = point(4, 2, 1000, index_scores=launch + 4 * 3e-6 + 8e-3)  # 8,000 pairs at 1 a us
    rates = part_rates([large, small], SCORES, H200)
    assert rates.step_s == pytest.approx(3e-6) and rates.rate == pytest.approx(1e6)
    assert rates.expected_s(point(2, 1, 500), H200) == pytest.approx(launch + 6e-6 + 1e-3)


def test_a_part_whose_largest_point_takes_no_longer_has_work_for_nothing():
    launch = H200.launch_s.value
    points = [point(1, 1, 8, index_scores=launch + 2e-6), point(1, 4, 8, index_scores=launch)]
    assert part_rates(points, SCORES, H200).rate == float("inf")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_sweep_s_other_times_are_near(part):
    held = list(hold_part(POINTS, part, H200))
    assert len(held) == 68 and sum(h.calibrates for h in held) == 2
    assert all(abs(h.error) < 1e-6 for h in held if h.calibrates)
    errors = [abs(h.error) for h in held if not h.calibrates]
    assert 0.01 < median(errors) < 0.2 and max(errors) < 0.4


def test_another_device_changes_the_rate_and_not_the_wait():
    rates = PartRates(SCORES, 2e-6, 1e9).on(RTX_5090, H200)
    assert rates.step_s == 2e-6 and rates.rate == pytest.approx(1e9 * 209.5 / 621)
    assert PartRates(TOPK, 0.0, 132e9).on(RTX_5090, H200).rate == pytest.approx(170e9)


def test_one_size_is_too_few():
    with pytest.raises(ValueError, match="two sizes with a time of slots"):
        part_rates([point(1, 1, 8, slots=1e-6)], SLOTS, H200)

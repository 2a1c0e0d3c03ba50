"""A model of the steps around the attention, held against a sweep: how long, and how far off.

    time = launch + calls * step + work / rate

A call's step is what it takes with next to nothing to do: waits, and for top-k the sort of a list.
The rate is work done a second when there is much. Each part of a sweep gives both, by its smallest
and its largest point; all its other points are foretold.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mla_ref.bench.kernel_step import CONVERT, SCORES, TOPK
from mla_ref.bench.roofline_devices import Device

Point = Mapping[str, Any]


def _pairs(point: Point) -> int:
    """Pairs of a query row and a cached token."""
    return int(point["requests"] * point["rows_per_request"] * point["context"])


def _entries(point: Point) -> int:
    """Entries of all lists."""
    return int(point["requests"] * point["rows_per_request"] * point["topk"])


@dataclass(frozen=True)
class PartModel:
    """A step around the attention, as far as the model goes.

    Attributes:
        name: As a sweep names it.
        work: Units of work of a point.
        calls: How often the kernel is launched: once a request, or once.
        by_products: Whether its rate follows the rate of products, or the multiprocessors.
    """

    name: str
    work: Callable[[Point], int]
    calls: Callable[[Point], int]
    by_products: bool


PARTS = (
    PartModel(SCORES, _pairs, lambda point: int(point["requests"]), True),
    PartModel(TOPK, _pairs, lambda point: 1, False),
    PartModel(CONVERT, _entries, lambda point: 1, False),
)


@dataclass(frozen=True)
class PartRates:
    """What two points of a sweep say of a part.

    Attributes:
        part: Which.
        step_s: Of a call.
        rate: Units of work a second.
    """

    part: PartModel
    step_s: float
    rate: float

    def expected_s(self, point: Point, device: Device) -> float:
        """The model's time of a point."""
        steps = self.part.calls(point) * self.step_s
        return device.launch_s.value + steps + self.part.work(point) / self.rate

    def on(self, device: Device, measured: Device) -> "PartRates":
        """The same on a device that nobody has measured: the rate scaled, the waits as they are."""
        if self.part.by_products:
            factor = device.mma_flops_s.value / measured.mma_flops_s.value
        else:
            factor = device.multiprocessors / measured.multiprocessors
        return PartRates(self.part, self.step_s, self.rate * factor)


@dataclass(frozen=True)
class PartTime:
    """A measured time of a part and the model's.

    Attributes:
        point: Of the sweep.
        measured_s: The time.
        expected_s: The model's.
        calibrates: Whether the model has a number from it.
    """

    point: Point
    measured_s: float
    expected_s: float
    calibrates: bool

    @property
    def error(self) -> float:
        """The model's time over the measured one, less 1."""
        return self.expected_s / self.measured_s - 1


def part_rates(points: list[Point], part: PartModel, device: Device) -> PartRates:
    """From the smallest and the largest point of a sweep.

    Raises:
        ValueError: The sweep has no two points of different work a call with a time of this part.
    """
    timed = _timed(points, part)
    ends = timed[:1] + timed[-1:]
    if len({part.work(point) / part.calls(point) for point in ends}) < 2:
        raise ValueError(f"points must hold two sizes with a time of {part.name}")
    (c1, w1, t1), (c2, w2, t2) = (
        (part.calls(p), part.work(p), _seconds(p, part) - device.launch_s.value) for p in ends
    )
    # Two equations, t = calls * step + work / rate.
    a_unit = (t2 * c1 - t1 * c2) / (w2 * c1 - w1 * c2)
    # Where the largest takes no longer than its steps, work is free as far as anyone can see.
    step = (t1 - w1 * max(a_unit, 0.0)) / c1
    return PartRates(part, step, 1 / a_unit if a_unit > 0 else float("inf"))


def hold_part(points: list[Point], part: PartModel, device: Device) -> Iterator[PartTime]:
    """All times of a part beside the model's, the smallest work first."""
    rates, timed = part_rates(points, part, device), _timed(points, part)
    for place, point in enumerate(timed):
        expected = rates.expected_s(point, device)
        yield PartTime(point, _seconds(point, part), expected, place in (0, len(timed) - 1))


def _timed(points: list[Point], part: PartModel) -> list[Point]:
    found = [point for point in points if "median_s" in point["parts"].get(part.name, {})]
    return sorted(found, key=lambda point: (part.work(point), part.calls(point)))


def _seconds(point: Point, part: PartModel) -> float:
    return float(point["parts"][part.name]["median_s"])

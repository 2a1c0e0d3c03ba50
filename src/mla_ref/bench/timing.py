"""What a measurement of time leaves behind: every sample, and the check it rests on."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from mla_ref.bench.gate import GateError, Verdict, verdict_to_json


@dataclass(frozen=True)
class Timing:
    """The times of one thing, in seconds, and the check that they rest on.

    Attributes:
        name: What was timed.
        clock: What kind of time this is.
        warmup: How many runs went before, after the one that was checked.
        samples_s: Seconds of each timed run, in the order in which they ran.
        verdicts: What the check found in the result of the last timed run; all passed.
    """

    name: str
    clock: str
    warmup: int
    samples_s: tuple[float, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def median_s(self) -> float:
        """The middle sample. Unlike the mean it does not move for one interrupted run."""
        return statistics.median(self.samples_s)

    @property
    def min_s(self) -> float:
        """The fastest sample."""
        return min(self.samples_s)

    @property
    def max_s(self) -> float:
        """The slowest sample."""
        return max(self.samples_s)

    def __str__(self) -> str:
        return (
            f"{self.name}: median {in_words(self.median_s)}, from {in_words(self.min_s)} to "
            f"{in_words(self.max_s)} in {len(self.samples_s)} runs"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every sample, so that nobody has to trust the summary."""
        return {
            "name": self.name,
            "clock": self.clock,
            "warmup": self.warmup,
            "median_s": self.median_s,
            "min_s": self.min_s,
            "max_s": self.max_s,
            "samples_s": list(self.samples_s),
            "verdicts": [verdict_to_json(verdict) for verdict in self.verdicts],
        }


@dataclass(frozen=True)
class NoTime:
    """Why there is no time of something.

    Attributes:
        name: What was to be timed.
        why: In a line.
        wrong: Whether it ran and its result was wrong.
        raised: Whether it raised an error; neither where it is not there or refuses by itself.
    """

    name: str
    why: str
    wrong: bool = False
    raised: bool = False

    @property
    def failed(self) -> bool:
        """Whether it was wrong or raised an error."""
        return self.wrong or self.raised

    @classmethod
    def wrong_result(cls, name: str, error: GateError) -> "NoTime":
        """Of a result that failed its check."""
        return cls(name, " ".join(str(error).removeprefix(f"{name}: ").split()), wrong=True)

    @classmethod
    def failure(cls, name: str, error: Exception) -> "NoTime":
        """Of something that did not run: its error and the first line that it says."""
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return cls(name, f"{type(error).__name__}: {first.strip()}".rstrip(": "), raised=True)

    def to_json(self) -> dict[str, Any]:
        """The reason as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class TimeComparison:
    """How the times of two things compare, run in turn on the same machine in the same minute.

    Attributes:
        a: The times of the first.
        b: The times of the second, as many.
    """

    a: Timing
    b: Timing

    @property
    def ratio(self) -> float:
        """Median time of `a` over median time of `b`: above 1, `b` is the faster one."""
        return self.a.median_s / self.b.median_s

    @property
    def pair_ratios(self) -> tuple[float, ...]:
        """The same ratio for each pair of neighbouring runs."""
        return tuple(a_s / b_s for a_s, b_s in zip(self.a.samples_s, self.b.samples_s, strict=True))

    def __str__(self) -> str:
        low, high = min(self.pair_ratios), max(self.pair_ratios)
        return (
            f"{self.a.name} takes {self.ratio:.2f} times as long as {self.b.name} "
            f"({low:.2f} to {high:.2f} over {len(self.pair_ratios)} pairs of runs)"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with both timings."""
        return {
            "ratio": self.ratio,
            "lowest_pair_ratio": min(self.pair_ratios),
            "highest_pair_ratio": max(self.pair_ratios),
            "a": self.a.to_json(),
            "b": self.b.to_json(),
        }


def in_words(seconds: float) -> str:
    """A time with three digits and the unit that suits it, such as "1.25 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"

"""The gate: no time is reported for a result that was not checked.

A kernel that does nothing is very fast, and so is one that hands out the answer it kept from an
earlier call. Public kernel contests have met both. So every timed thing comes with a check of its
result, and a result that has been looked at is overwritten before the next run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mla_ref.numerics import Comparison, compare

R = TypeVar("R")


@runtime_checkable
class Verdict(Protocol):
    """What a check says of one part of a result: a dataclass that knows whether it passed.

    `Agreement` is one, for references; `PrecisionVerdict` another, for low-precision kernels. Its
    `str()` says in one line what was found and what was allowed.
    """

    @property
    def passed(self) -> bool:
        """Whether the part may count as right."""


Check = Callable[[R], Sequence[Verdict]]
"""Looks at a result and says what it found, one `Verdict` for each part it compared."""


@dataclass(frozen=True)
class Agreement:
    """One comparison and the limits that it must keep.

    Attributes:
        what: Which part of the result was compared, such as "out" or "lse".
        comparison: What `compare(actual, expected)` found.
        rel_l2: Largest relative L2 error allowed.
        max_abs: Largest absolute error allowed in any one element.

    Raises:
        ValueError: A limit is not a finite number of at least 0. An infinite limit would be a gate
            that is always open.
    """

    what: str
    comparison: Comparison
    rel_l2: float
    max_abs: float

    def __post_init__(self) -> None:
        for name, limit in (("rel_l2", self.rel_l2), ("max_abs", self.max_abs)):
            if not (math.isfinite(limit) and limit >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {limit!r}")

    @property
    def passed(self) -> bool:
        """Whether NaN and inf stand where they should and both errors keep their limits."""
        return self.comparison.agrees(rel_l2=self.rel_l2, max_abs=self.max_abs)

    def __str__(self) -> str:
        """One line for a terminal or an error message."""
        return (
            f"{self.what}: {self.comparison}; allowed: max abs {self.max_abs:.2e}, "
            f"rel L2 {self.rel_l2:.2e}"
        )


class GateError(Exception):
    """A result failed its check, so there is no time to report.

    Attributes:
        name: The case that was to be timed.
        when: At which point the result was wrong, in words.
        verdicts: What the check found; empty if the check raised or looked at nothing.
    """

    def __init__(self, name: str, when: str, why: str, verdicts: Sequence[Verdict] = ()) -> None:
        super().__init__(f"{name}: no time is reported. The result {when} is wrong: {why}")
        self.name = name
        self.when = when
        self.verdicts = tuple(verdicts)


def close_to(expected: Mapping[str, Tensor], *, rel_l2: float, max_abs: float) -> Check[Any]:
    """Build a check that compares the named parts of a result with known good values.

    Args:
        expected: The good values by attribute name, such as `{"out": out, "lse": lse}`.
        rel_l2: Largest relative L2 error allowed, for each part.
        max_abs: Largest absolute error allowed in any one element, for each part.

    Returns:
        A check of any result that has these attributes, an `AttentionResult` for one.
    """

    def check(result: Any) -> list[Verdict]:
        return [
            Agreement(what, compare(getattr(result, what), value), rel_l2=rel_l2, max_abs=max_abs)
            for what, value in expected.items()
        ]

    return check


def require_right(name: str, when: str, result: R, check: Check[R]) -> tuple[Verdict, ...]:
    """Check a result and return what was found, if all of it passed.

    Args:
        name: The case, for the error.
        when: At which point this is, for the error, such as "before the timed runs".
        result: What the case returned.
        check: Its check.

    Raises:
        GateError: A part failed, the check itself raised (a wrong shape, say), or it returned no
            verdict at all: what nothing looked at is not known to be right.
    """
    try:
        verdicts = tuple(check(result))
    except Exception as error:
        raise GateError(name, when, f"the check raised {type(error).__name__}: {error}") from error
    if not verdicts:
        raise GateError(name, when, "the check compared nothing")
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        raise GateError(name, when, "; ".join(map(str, failed)), verdicts)
    return verdicts


def spoil(result: Any) -> None:
    """Overwrite every tensor in a result, so that it cannot pass a second time.

    Floats become NaN, integers their least value, booleans their opposite. A run that hands out
    an old tensor again, or that leaves part of its output buffer unwritten, then fails the check.
    A run that keeps a private copy and clones it is not caught: change its inputs between runs.

    Args:
        result: A tensor, or tuples, lists and dicts of them. Anything else is left alone.
    """
    for leaf in tree_leaves(result):
        if not isinstance(leaf, Tensor):
            continue
        tensor = leaf.detach()  # writes into the same memory, and autograd does not object
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The fields of a verdict as plain data, with whether it passed."""
    return {"passed": verdict.passed, **non_finite_as_text(asdict(verdict))}  # type: ignore[call-overload]


def non_finite_as_text(value: Any) -> Any:
    """Nested data with floats that JSON cannot hold, NaN and infinity, as strings."""
    if isinstance(value, dict):
        return {key: non_finite_as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [non_finite_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

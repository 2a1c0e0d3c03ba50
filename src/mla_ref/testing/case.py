"""A case: arguments of one call and the result they must give. Frozen, and plain data as JSON."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from mla_ref.testing.adapter import Adapter, Limits, Skipped, as_adapter, missing_parameters
from mla_ref.testing.storage import too_large
from mla_ref.testing.verdict import Finding, Mismatch

# A field of a case, and the limit of an adapter that it must keep.
_LIMITED = (
    ("heads", "heads"),
    ("page_size", "page_sizes"),
    ("cache_format", "cache_formats"),
    ("q_dtype", "q_dtypes"),
)


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """Base of all cases; `str(case)` is its id in pytest and on the command line.

    Attributes:
        kind: "decode", "extend" or one of `mla_ref.backends.PARTS`.
        name: Unique within the kind; words joined by hyphens.
        about: What the case is about, and the usual fault behind a failure, in plain words.
        seed: Of all random numbers in it.
        point: Fields that must not be changed to fit an adapter's limits, since the case is about
            them.
    """

    kind: str
    name: str
    about: str
    seed: int = 0
    point: tuple[str, ...] = ()

    @abstractmethod
    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The arguments of the call by name, the positional ones first."""

    @abstractmethod
    def expect(self) -> Any:
        """The right result, on the CPU; floating-point numbers in float64."""

    @abstractmethod
    def tolerance(self, maths: str = "float32") -> Any:
        """Largest absolute error for each part of the result; None where it must be exact."""

    @abstractmethod
    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        """Call the function and judge it: what is wrong, and which known faults give that."""

    def needs(self) -> tuple[str, ...]:
        """Parameters beyond the least that a function must take for this case."""
        return ()

    def nbytes(self) -> int:
        """Bytes of address space that the case needs, where that is worth asking; else 0."""
        return 0

    def __str__(self) -> str:
        """kind/name."""
        return f"{self.kind}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data, for `case_from_json`."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}

    def within(self, limits: Limits) -> "Case":
        """The case itself, or the nearest one that an adapter with these limits serves.

        Raises:
            Skipped: There is none, because the number that does not fit is what the case is about.
        """
        changes: dict[str, Any] = {}
        for name, limit in _LIMITED:
            allowed, value = getattr(limits, limit), getattr(self, name, None)
            if allowed is None or value is None or value in allowed:
                continue
            if name in self.point or name in ("cache_format", "q_dtype"):
                served = ", ".join(map(str, allowed))
                raise Skipped(f"{name} {value} is outside the limits: {served}")
            changes[name] = allowed[0]
        topk = getattr(self, "topk", None)
        if self.kind in ("decode", "extend") and topk and topk % limits.topk_multiple:
            if "topk" in self.point:
                raise Skipped(f"topk {topk} is no multiple of {limits.topk_multiple}")
            changes["topk"] = -(-topk // limits.topk_multiple) * limits.topk_multiple
        if getattr(self, "gaps", "none") != "none" and not limits.strided:
            raise Skipped("gaps between pages or queries are outside the limits")
        return replace(self, **changes) if changes else self

    def check(self, target: object, device: torch.device | str = "cpu") -> None:
        """Run what is under test on this case.

        Args:
            target: A function, an `Adapter` or a backend, see `as_adapter`.
            device: Where to.

        Raises:
            Mismatch: The result is wrong; an AssertionError that says what the case is about.
            Skipped: The case is outside what the target declares; pytest reports a skip.
        """
        adapter = as_adapter(target, self.kind)
        case = self.within(adapter.limits)
        device = torch.device(device)
        function = case.bind(adapter, device)
        if missing := missing_parameters(function, case.needs()):
            raise Skipped(f"it has no parameter {', '.join(missing)}")
        if reason := too_large(case.nbytes(), device):
            raise Skipped(reason)
        try:
            findings, looks_like = case._try(function, adapter, device)
        except torch.OutOfMemoryError as error:
            if not case.nbytes():
                raise
            raise Skipped(f"the device has too little memory: {error}") from error
        if findings:
            raise Mismatch(str(case), case.about, findings, looks_like)

    def bind(self, adapter: Adapter, device: torch.device) -> Callable[..., Any]:
        """The function of the adapter that this case calls."""
        return adapter.function(self.kind)

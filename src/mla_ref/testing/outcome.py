"""What came of running one case in a worker."""

from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("passed", "failed", "crashed", "timed out", "skipped")


@dataclass(frozen=True)
class Result:
    """What came of one case.

    Attributes:
        case: Its name, kind/name.
        status: One of `STATUSES`.
        reason: What is wrong, in lines; or why the case was skipped. Empty if it passed.
        seconds: Time in the worker; nothing to compare kernels by.
        details: Of a failure: the findings, with index, numbers and limit, and what it looks like.
    """

    case: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    details: dict[str, Any] | None = None

    @property
    def bad(self) -> bool:
        """Whether the code under test is to blame."""
        return self.status in ("failed", "crashed", "timed out")

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

"""What an exercise is: a task in words, a blank to fill, and cases in the order that teaches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


class Complaint(Exception):
    """What a case has against an answer: what it was and what was expected."""


@dataclass(frozen=True)
class Case:
    """One thing that an answer must get right.

    Attributes:
        name: A few words, with the sizes: "one-token decode, s_q 1, s_kv 5".
        why: Where it happens and what goes wrong there; shown when the case fails.
        check: Calls the answer, as often as it likes, and raises a Complaint if it is wrong. The
            same inputs every time.
    """

    name: str
    why: str
    check: Callable[[Function], None]


@dataclass(frozen=True)
class Exercise:
    """A function for the reader to write.

    Attributes:
        id: The name that `grade` takes, with the lesson's number in front.
        title: A few words.
        task: What to write, in Markdown; the lesson prints it word for word.
        signature: The `def` line with shapes.
        cases: From the easiest to the one that most answers forget.
    """

    id: str
    title: str
    task: str
    signature: str
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """The name of the function to write."""
        return self.signature.removeprefix("def ").split("(")[0]

    @property
    def blank(self) -> str:
        """The cell that the reader fills in."""
        return f"{self.signature}\n    raise NotImplementedError  # your code here"

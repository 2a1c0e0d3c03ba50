"""Grading: run a reader's function through an exercise's cases and say the first thing amiss.

Nothing that a reader writes can break the notebook. An exception is caught and shown with the line
that raised it; a blank is "not attempted yet"; a change to an argument is found and named, since
in-place surprises are the bugs that a caller sees last.
"""

import inspect
import textwrap
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.teaching.exercises import EXERCISES
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function


@dataclass(frozen=True)
class Grade:
    """How far an answer came.

    Attributes:
        exercise: The exercise's id.
        attempted: False while the function still raises NotImplementedError.
        passed_cases: Names of the cases passed, in order.
        num_cases: How many there are.
        failed_case: Name of the first case that failed, None if none did.
        complaint: What was wrong there and what was expected.
        why: Where such a case happens.
    """

    exercise: str
    attempted: bool
    passed_cases: tuple[str, ...]
    num_cases: int
    failed_case: str | None = None
    complaint: str = ""
    why: str = ""

    @property
    def passed(self) -> bool:
        """True if every case passed."""
        return self.attempted and self.failed_case is None

    def __repr__(self) -> str:
        """What a notebook shows."""
        if not self.attempted:
            return f"{self.exercise}: not attempted yet. Write the function, run both cells again."
        if self.passed:
            return f"{self.exercise}: all {self.num_cases} cases passed."
        count = f"{len(self.passed_cases)} of {self.num_cases} cases passed, then one failed"
        lines = [f"{self.exercise}: {count}."]
        lines += [f"  passed  {name}" for name in self.passed_cases]
        lines += [f"  FAILED  {self.failed_case}"]
        lines += _paragraph("what", self.complaint) + _paragraph("why", self.why)
        return "\n".join(lines)


def _paragraph(label: str, text: str) -> list[str]:
    """A labelled text, indented and wrapped so that no line needs scrolling in the book."""
    first, *rest = (line for part in text.splitlines() for line in textwrap.wrap(part, 76))
    return [f"    {label:<6}{first}", *(f"          {line}" for line in rest)]


def grade(exercise: str | Exercise, function: Function) -> Grade:
    """Run `function` through the cases of an exercise, up to the first that fails.

    Args:
        exercise: The exercise or its id, for example "01-offset-mask".
        function: The reader's function itself, not its result.

    Raises:
        TypeError: `function` cannot be called.
        ValueError: There is no such exercise; the message lists those there are.
    """
    chosen = _find(exercise)
    if not callable(function):
        raise TypeError(
            f"function must be the function itself, as in grade({chosen.id!r}, "
            f"{chosen.name}), got {describe(function)}"
        )
    passed: list[str] = []
    for case in chosen.cases:
        try:
            _run(case, function)
        except _Blank:
            return Grade(chosen.id, False, (), len(chosen.cases))
        except Complaint as complaint:
            return Grade(
                chosen.id,
                True,
                tuple(passed),
                len(chosen.cases),
                case.name,
                str(complaint),
                case.why,
            )
        passed.append(case.name)
    return Grade(chosen.id, True, tuple(passed), len(chosen.cases))


class _Blank(Exception):
    """The function has not been written yet."""


def _find(exercise: str | Exercise) -> Exercise:
    if isinstance(exercise, Exercise):
        return exercise
    if exercise not in EXERCISES:
        raise ValueError(f"exercise must be one of {', '.join(EXERCISES)}, got {exercise!r}")
    return EXERCISES[exercise]


def _run(case: Case, function: Function) -> None:
    def guarded(*args: Any) -> Any:
        # Copies: a case may use its tensors again, after an answer that wrote into them.
        given = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        try:
            result = function(*given)
        except Exception as error:
            # torch raises NotImplementedError too, with a message; the blank has none.
            if isinstance(error, NotImplementedError) and not str(error):
                raise _Blank from error
            raise Complaint(_describe_error(error, function)) from error
        for index, (before, after) in enumerate(zip(args, given, strict=True)):
            if isinstance(after, Tensor) and not torch.equal(_bits(before), _bits(after)):
                raise Complaint(
                    f"the call changed its argument {_name(function, index)}; "
                    "it must leave its arguments as they are"
                )
        return result

    case.check(guarded)


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes, since NaN would not equal NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _name(function: Function, index: int) -> str:
    parameters = list(inspect.signature(function).parameters)
    return parameters[index] if index < len(parameters) else f"number {index + 1}"


def _describe_error(error: Exception, function: Function) -> str:
    """The error and the last line of the reader's own file that led to it."""
    text = f"it raised {type(error).__name__}: {error}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    return f"{text}\nat: {frames[-1].line}" if frames and frames[-1].line else text

"""The process that grades one function: `python -m mla_ref.teaching.answer_worker FILE ID LOG`.

It writes a JSON line as it begins to read the file, one with each case's name as the case begins,
and one with the verdict at the end.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_ref.teaching.answer_file import AnswerError, load_answer
from mla_ref.teaching.exercises import EXERCISES
from mla_ref.teaching.exercises.exercise import Case, Function
from mla_ref.teaching.grade import grade


def main(path: Path, exercise_id: str, log: Path) -> None:
    """Grade, and write down how far it went."""

    def write(line: dict[str, Any]) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def announced(case: Case) -> Callable[[Function], None]:
        def check(function: Function) -> None:
            write({"case": case.name})
            case.check(function)

        return check

    exercise = EXERCISES[exercise_id]
    cases = tuple(dataclasses.replace(case, check=announced(case)) for case in exercise.cases)
    # Python and torch have started: what takes long from here on is the file.
    write({"reading": path.name})
    try:
        function = load_answer(path, exercise)
        result = grade(dataclasses.replace(exercise, cases=cases), function)
    except AnswerError as error:
        write({"passed": False, "text": f"{exercise_id}: {error}"})
    except SystemExit as error:
        # Not an Exception, so that only here it can be told from an end of the process.
        text = f"{exercise_id}: it left the program (SystemExit: {error}), expected a result"
        write({"passed": False, "text": text})
    else:
        text = repr(result)
        if not result.attempted:
            text = f"{exercise_id}: still blank, expected a function in its place"
        write({"passed": result.passed, "text": text})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

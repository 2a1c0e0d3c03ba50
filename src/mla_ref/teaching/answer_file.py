"""Grade a file that a reader hands in: its functions, by name, each in a process of its own.

So neither a crash nor a loop without an end reaches whoever grades. The file may be a module or the
lesson's own notebook, of which the imports and definitions are taken and the rest is left alone.
"""

import ast
import json
import linecache
import os
import subprocess
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mla_ref
from mla_ref.checks import require_scale, require_utf8
from mla_ref.teaching.exercises import Exercise
from mla_ref.teaching.exercises.exercise import Function

_WORKER = "mla_ref.teaching.answer_worker"
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


class AnswerError(Exception):
    """A file from which the function asked for cannot be had; says what was expected."""


@dataclass(frozen=True)
class Verdict:
    """What is said of one exercise in a file.

    Attributes:
        passed: True if every case passed.
        text: What was wrong and what was expected; the grade's own words where there is a grade.
    """

    passed: bool
    text: str


def grade_file(path: Path, exercise: Exercise, *, limit_s: float = 60.0) -> Verdict:
    """Grade the function of this exercise in a file of the reader's.

    Args:
        path: A Python file, or a notebook (.ipynb).
        exercise: Which one; the function's name stands in its signature.
        limit_s: Seconds after which the process is stopped. Python and torch start in them too.

    Raises:
        ValueError: The limit is not above 0.
    """
    require_scale("limit_s", limit_s)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, "-m", _WORKER, str(path), exercise.id, str(log)]
        # The process imports this very package, wherever it was imported from here.
        roots = [str(Path(mla_ref.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
        try:
            code = subprocess.run(command, env=environment, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            code = None
        lines = log.read_text("utf-8").splitlines() if log.exists() else []
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "passed" in last:
        return Verdict(last["passed"], last["text"])
    if "case" in last:
        place = f"in the case {last['case']!r}"
    else:
        place = f"{'while' if lines else 'before'} {path.name} was read"
    if code is None:
        text = f"no result after {limit_s:g} s, {place}"
        if lines:
            text += ": is there a loop that does not end?"
    else:
        text = f"the process ended with code {code}, {place}, and without a result"
    return Verdict(False, f"{exercise.id}: {text}")


def load_answer(path: Path, exercise: Exercise) -> Function:
    """The function of this exercise in a file of the reader's.

    Raises:
        AnswerError: The file cannot be read or run, or has no such function.
    """
    try:
        source = require_utf8("it", path.read_bytes())
    except (OSError, ValueError) as error:
        raise AnswerError(f"{path.name} cannot be read: {error}") from error
    if path.suffix == ".ipynb":
        source = _definitions(path.name, source)
        linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
    sys.path.insert(0, str(path.parent))  # as if it were run: it may import what lies beside it
    # Dataclasses look up the module of their class in sys.modules. Not under the file's own name,
    # which may be that of a library.
    module = types.ModuleType(f"answer_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    names = vars(module)
    try:
        exec(compile(source, str(path), "exec"), names)
    except Exception as error:
        raise AnswerError(
            f"{path.name} cannot be imported: {type(error).__name__}: {error}{_place(error, path)}"
        ) from error
    answer = names.get(exercise.name)
    if not callable(answer):
        own = [n for n, x in names.items() if getattr(x, "__module__", None) == module.__name__]
        there = f"; it has {', '.join(own)}" if own else ""
        raise AnswerError(
            f"{path.name} has no function {exercise.name}{there}. Expected:\n\n{exercise.signature}"
        )
    function: Function = answer
    return function


def _definitions(name: str, notebook: str) -> str:
    """Imports, functions and classes of a notebook's code cells, in order."""
    try:
        cells = json.loads(notebook)["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise AnswerError(f"{name} is no notebook: {error}") from error
    # A notebook's cell may begin with an import from __future__, a file only its first line.
    first: list[str] = []
    kept: list[str] = []
    for source in sources:
        try:
            body = ast.parse(source).body
        except SyntaxError:
            continue  # a magic command, or a cell left half written: its function will be missed
        for node in body:
            if isinstance(node, _KEPT):
                future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
                (first if future else kept).append(ast.unparse(node))
    return "\n\n".join(first + kept) + "\n"


def _place(error: Exception, path: Path) -> str:
    """The line of the reader's file that an error came from, if it came from there."""
    if isinstance(error, SyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
    code = linecache.getline(str(path), line).strip() if line else ""
    return f"\nat line {line}: {code}" if line else ""

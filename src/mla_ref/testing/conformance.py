"""Run cases on code under test in a worker process that may crash or hang: it costs one case.

A wrong address on a CPU ends the process; on a GPU it ends the CUDA context, and a loop without end
never returns. So the code under test runs in a process of its own, which is started again when it
is lost.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mla_ref.testing.case import Case
from mla_ref.testing.outcome import Result

START_SECONDS = 180.0


class Worker:
    """The other side of `worker`: one process, started when it is needed.

    Args:
        target: A backend's name or module:object.
        kind: What a plain function does.
        device: "cpu", "cuda", "cuda:1" or "auto".
        module: The program of the other side.

    Attributes:
        kinds: The kinds of case that the target can run.
    """

    def __init__(
        self,
        target: str,
        *,
        kind: str = "decode",
        device: str = "cpu",
        module: str = "mla_ref.testing.worker",
    ) -> None:
        self._setup = {"target": target, "kind": kind, "device": device}
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._timed_out = False
        self.kinds: tuple[str, ...] = ()

    def __enter__(self) -> "Worker":
        """Start the process, so that a target that is not there is known at once."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._stop()

    def run(self, case: Case, timeout: float) -> Result:
        """Run one case, for at most `timeout` seconds."""
        if self._process is None:
            self._start()
        answer = self._ask(case.to_json(), timeout)
        ending = self._last_words() if answer is None and not self._timed_out else ""
        if answer is None or answer.get("lost"):
            self._stop()
        name, about = str(case), f"\n  the case: {case.about}"
        if answer is not None:
            details: dict[str, Any] = {
                k: answer[k] for k in ("findings", "looks_like") if k in answer
            }
            return Result(
                name,
                answer["status"],
                answer.get("reason", ""),
                answer["seconds"],
                details or None,
            )
        if self._timed_out:
            reason = f"{name} gives no result in {timeout:g} s{about}"
            return Result(name, "timed out", reason, timeout)
        return Result(name, "crashed", f"{name} ends the process: {ending}{about}")

    def _start(self) -> None:
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # The code under test may import from the current directory, and mla_ref from where it is.
        paths = [os.getcwd(), *(p for p in sys.path if p)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        answer = self._ask(self._setup, START_SECONDS)
        if answer is None:
            words = "takes too long" if self._timed_out else f"fails: {self._last_words()}"
            self._stop()
            raise ImportError(f"{self._setup['target']} cannot be used: importing it {words}")
        if "error" in answer:
            self._stop()
            raise ImportError(f"{self._setup['target']} cannot be used: {answer['error']}")
        self.kinds = tuple(answer["kinds"])

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        answers = self._answers
        if process.stdout is not None:
            for line in process.stdout:
                answers.put(line)
        answers.put("")

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """The answer; None if the process has ended or gives none in time."""
        self._timed_out = False
        process = self._process
        if process is None or process.stdin is None:
            return None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._timed_out = True
            return None
        except OSError:
            return None
        return json.loads(line) if line else None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # it has gone, and with it who would read the rest
                process.stdin.close()
        try:
            # A worker that waits for a case ends with its stdin; one that hangs does not.
            process.wait(timeout=0.0 if self._timed_out else 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        """How the process ended: its signal or exit code, and the last line that it wrote."""
        if self._process is None:
            return "it has ended"
        code = self._process.wait(timeout=START_SECONDS)
        ending = f"exit code {code}"
        if code < 0:
            try:
                ending = signal.Signals(-code).name
            except ValueError:
                ending = f"signal {-code}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"{ending} ({lines[-1]})" if lines else ending


def run_cases(
    cases: Sequence[Case],
    target: str,
    *,
    kind: str = "decode",
    device: str = "cpu",
    timeout: float = 60.0,
) -> Iterator[Result]:
    """Results in the order of the cases, each as soon as it is there.

    Args:
        cases: What to run.
        target: A backend's name or module:object.
        kind: What a plain function does.
        device: Where to run.
        timeout: Seconds for each case. The first on a GPU may compile a kernel.

    Raises:
        ImportError: The target cannot be used; the message names it and says why.
    """
    with Worker(target, kind=kind, device=device) as worker:
        for case in cases:
            yield worker.run(case, timeout)

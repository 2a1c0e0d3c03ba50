"""The process in which code under test runs: `python -m mla_ref.testing.worker`.

It reads JSON lines from stdin and answers each with one on its first stdout. The first line names
the target, every other one is a case. What the code under test prints goes to stderr, so that it
cannot mix with the answers.
"""

import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

import torch

from mla_ref.platform import resolve_device
from mla_ref.testing.adapter import Adapter, Skipped, load_target
from mla_ref.testing.cases import case_from_json
from mla_ref.testing.verdict import Mismatch

# After such an error a CUDA context is lost, and every later call in this process fails.
LOST = ("CUDA error", "CUDA_ERROR", "cudaError", "device-side assert", "illegal memory access")


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    adapter: Adapter | None = None
    device = torch.device("cpu")
    for line in sys.stdin:
        request = json.loads(line)
        if adapter is None:
            try:
                adapter = load_target(request["target"], request["kind"])
                device = resolve_device(request["device"])
            except Exception as error:
                traceback.print_exc()
                _answer(answers, {"error": str(error) or repr(error)})
                return
            _answer(answers, {"kinds": adapter.kinds})
        else:
            began = time.perf_counter()
            result = run_case(request, adapter, device)
            _answer(answers, result | {"seconds": time.perf_counter() - began})


def run_case(data: dict[str, Any], adapter: Adapter, device: torch.device) -> dict[str, Any]:
    """Run one case; the answer has "status" and, unless it passed, "reason"."""
    case = case_from_json(data)
    try:
        case.check(adapter, device)
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except Mismatch as mismatch:
        return {"status": "failed", "reason": str(mismatch), **mismatch.to_json()}
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        lost = any(mark in str(error) for mark in LOST)
        return {
            "status": "crashed" if lost else "failed",
            "reason": f"{case} raises {words} ({where})\n  the case: {case.about}",
            "lost": lost,
        }
    return {"status": "passed"}


def _answer(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()

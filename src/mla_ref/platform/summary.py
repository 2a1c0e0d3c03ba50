"""The doctor's first line: what works on this machine, in one sentence."""

from collections.abc import Sequence

from mla_ref.platform.findings import CUPY, LESSONS, REAL_MODEL, TRITON, Finding
from mla_ref.platform.machine import Machine


def base_works(findings: Sequence[Finding]) -> bool:
    """Whether all that `mla-ref ladder` cannot do without is there."""
    return all(finding.ok for finding in findings if finding.required)


def summary(machine: Machine, findings: Sequence[Finding]) -> str:
    """Say what works here and, in a few words, why the rest does not."""
    for finding in findings:
        if finding.required and not finding.ok:
            return f"The ladder does not run here: no working {finding.name}."
    return f"{_ladder_and_lessons(findings)}; {_kernels(machine, findings)}."


def _ladder_and_lessons(findings: Sequence[Finding]) -> str:
    no = [finding for finding in findings if not finding.ok]
    model = [finding.name for finding in no if finding.name in REAL_MODEL]
    lessons = [finding.name for finding in no if finding.group == LESSONS]
    if model:
        return f"The ladder runs here, but not on the real model: no {', '.join(model)}"
    if lessons:
        return f"The ladder runs here, the lessons do not: no {', '.join(lessons)}"
    return "The ladder and all lessons run here"


def _kernels(machine: Machine, findings: Sequence[Finding]) -> str:
    if machine.no_gpu:
        return f"GPU kernels do not: {machine.no_gpu[0]}"
    broken = {finding.group for finding in findings if not finding.ok}
    working = [group for group in (TRITON, CUPY) if group not in broken]
    cards = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.sm})" for gpu in machine.gpus))
    if not working:
        return f"GPU kernels do not, on the {cards}: neither Triton nor CuPy is ready"
    return f"GPU kernels can run on the {cards} with {' and '.join(working)}"

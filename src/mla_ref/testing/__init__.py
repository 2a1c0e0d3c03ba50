"""What anyone can run on their own kernel, and the public bugs that the tests here are about."""

from mla_ref.testing.adapter import KINDS, Adapter, Limits, Skipped, as_adapter, load_target
from mla_ref.testing.bugs import BUGS, Bug, load_bugs
from mla_ref.testing.case import Case
from mla_ref.testing.cases import case_from_json, cases, find_case
from mla_ref.testing.verdict import Finding, Mismatch

__all__ = [
    "BUGS",
    "KINDS",
    "Adapter",
    "Bug",
    "Case",
    "Finding",
    "Limits",
    "Mismatch",
    "Skipped",
    "as_adapter",
    "case_from_json",
    "cases",
    "find_case",
    "load_bugs",
    "load_target",
]

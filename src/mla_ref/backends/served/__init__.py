"""Served sparse-MLA backends as data, and their arithmetic emulated in torch."""

from mla_ref.backends.served.arithmetic import attend_rows, read_rows, round_queries
from mla_ref.backends.served.backend import ServedBackend, served_backend
from mla_ref.backends.served.error import ErrorStep, arithmetic_error
from mla_ref.backends.served.plan import ServedPlan, lse_as_returned
from mla_ref.backends.served.profile import Arithmetic, ServedProfile
from mla_ref.backends.served.table import PROFILES
from mla_ref.backends.served.tolerance import PeerTolerance

__all__ = [
    "PROFILES",
    "Arithmetic",
    "ErrorStep",
    "PeerTolerance",
    "ServedBackend",
    "ServedPlan",
    "ServedProfile",
    "arithmetic_error",
    "attend_rows",
    "lse_as_returned",
    "read_rows",
    "round_queries",
    "served_backend",
]

"""Kernels run in Triton's interpreter here: see TRITON_INTERPRET in the conftest above."""

import os
from importlib.util import find_spec

# CI requires Triton: a suite that skips quietly proves nothing.
if os.environ.get("MLA_REF_REQUIRE_TRITON") == "1" and not find_spec("triton"):
    raise RuntimeError("MLA_REF_REQUIRE_TRITON is set, but triton is not installed")

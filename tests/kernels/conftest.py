"""Kernels run in Triton's interpreter here: see TRITON_INTERPRET in the conftest above."""

import os
from importlib.util import find_spec

from mla_kernels.cuda_kernels.emulation.host import emulation_gap

# CI requires Triton: a suite that skips quietly proves nothing.
if os.environ.get("MLA_REF_REQUIRE_TRITON") == "1" and not find_spec("triton"):
    raise RuntimeError("MLA_REF_REQUIRE_TRITON is set, but triton is not installed")
if os.environ.get("MLA_REF_REQUIRE_COMPILER") == "1" and (gap := emulation_gap()):
    raise RuntimeError(f"MLA_REF_REQUIRE_COMPILER is set, but CUDA kernels are not emulated: {gap}")

"""GPU kernels for sparse MLA, in Triton and in CUDA C++ through CuPy.

Kernels import the reference `mla_ref`, never the other way round. Each kernel is one file; each
number about a kernel is tied to a receipt in `kernels/receipts/` and goes stale when the kernel
changes. `kernels/LOG.md` tells what was tried, what failed and why.
"""

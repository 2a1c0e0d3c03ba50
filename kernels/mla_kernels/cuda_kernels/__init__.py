"""Kernels in CUDA C++, one .cu a kernel, that CuPy compiles at run time: rung 15.

Read decode_simple.cu first, then decode_mma.cu, decode.cu and merge.cu, then decode_wide.cu and
decode_wide64.cu; decode_union.cu is for the rows of one request, and was not worth it. The headers
ptx.cuh, call.cuh and rows.cuh hold what they share. Only instructions that SM120 has (mma.sync,
movmatrix, bulk copies) and at most 101,376 bytes of shared memory a block; no wgmma, tcgen05,
setmaxnreg or clusters.
"""

"""Kernels in CUDA C++, one .cu a kernel, that CuPy compiles at run time: rung 15.

Read decode_simple.cu first, then decode.cu and merge.cu, then decode_wide.cu; the headers ptx.cuh,
call.cuh and rows.cuh hold what they share. Only instructions that SM120 has (mma.sync, movmatrix,
bulk copies) and at most 101,376 bytes of shared memory a block; no wgmma, tcgen05, setmaxnreg or
clusters.
"""

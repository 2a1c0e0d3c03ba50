"""The CUDA kernels built for the CPU: their own source, run lane by lane."""

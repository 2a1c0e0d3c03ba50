"""A reference implementation of multi-head latent attention, from a causal loop to serving kernels.

The ladder in `mla_ref.ladder` is the table of contents: every rung computes the same attention as
the rung below it and is tested against it. Importing this package needs torch and small pure
packages only; no GPU, triton, cupy, model file or plotting library.
"""

__version__ = "0.1.0"

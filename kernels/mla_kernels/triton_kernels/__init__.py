"""The Triton kernels, one file a kernel, and the backend `triton` that serves them.

On Hopper Triton multiplies with wgmma, which SM120 does not have (nor any other Blackwell): a time
measured that way would say nothing about it. `DISABLE_MMA_V3=1` makes Triton emit mma.sync, the
instruction that SM120 has. Triton reads the variable when it compiles, and the process that sets it
late has wgmma kernels in its cache; so it is set here, before any kernel's module is imported. Set
it to 0 yourself to see what wgmma would give.
"""

import os

os.environ.setdefault("DISABLE_MMA_V3", "1")

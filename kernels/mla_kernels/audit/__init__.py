"""Does a kernel fit SM120? Compiled without a GPU, read from the machine code, kept as data.

`cubin` reads whatever cubin it is given and `verdict` judges it; `compile_triton` makes one from a
Triton kernel, `cuda` from the CUDA kernels. `python -m mla_kernels.audit` does it for all of them,
with `--cuda` for the latter, and `record` keeps the results in `sm120-audit.json` and
`cuda-audit.json` beside this file.
"""

from mla_kernels.audit.cubin import CubinFacts, read_cubin
from mla_kernels.audit.occupancy import LIMITS, Occupancy, SMLimits, occupancy
from mla_kernels.audit.record import RECORD, admitted, read_record, stale
from mla_kernels.audit.verdict import Verdict, judge

__all__ = [
    "LIMITS",
    "RECORD",
    "CubinFacts",
    "Occupancy",
    "SMLimits",
    "Verdict",
    "admitted",
    "judge",
    "occupancy",
    "read_cubin",
    "read_record",
    "stale",
]

"""Kernels with a fault that the SM120 audit must catch, and one without; prints their audit.

Run by test_audit.py in a process of its own: there Triton's interpreter is off, so it compiles.
"""

import json
import os
import sys
from pathlib import Path

import triton
import triton.language as tl

from mla_kernels.audit.run import audit_one, source_of
from mla_kernels.triton_kernels.signature import Compilation


@triton.jit
def multiply(a, b, out, n, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr):
    """A running product of tiles; what it needs grows with the tile."""
    row, col, k = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, K)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n, K):
        left = tl.load(a + row[:, None] * n + start + k[None, :])
        right = tl.load(b + (start + k)[:, None] * COLS + col[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * COLS + col[None, :], total)


def planted(name, rows, cols, k, warps, stages):
    return Compilation(
        name,
        multiply,
        {"a": "*fp16", "b": "*fp16", "out": "*fp32", "n": "i32"},
        {"ROWS": rows, "COLS": cols, "K": k},
        num_warps=warps,
        num_stages=stages,
        aligned=("a", "b", "out", "n"),
    )


SMALL = planted("small", 64, 64, 32, warps=4, stages=2)
# 3 tiles in flight of 2 * 128 * 128 fp16: 196,608 bytes.
LARGE = planted("large", 128, 128, 128, warps=8, stages=4)
# 128 * 128 sums over 32 threads: 512 registers each.
SPILLING = planted("spilling", 128, 128, 32, warps=1, stages=2)


def main():
    found = {c.name: audit_one(c, (12, 0)) for c in (SMALL, LARGE, SPILLING)}
    found["large on sm_90"] = audit_one(LARGE, (9, 0))
    # Without the switch that triton_kernels sets, Triton multiplies with wgmma on Hopper.
    os.environ["DISABLE_MMA_V3"] = "0"
    found["wgmma"] = audit_one(SMALL, (9, 0))
    root = Path(__file__).parent
    print(json.dumps({"audit": found, "source": source_of(SMALL, root)}))


if __name__ == "__main__":
    sys.exit(main())

"""What the shared memory of a Triton block is used for, by Triton's own allocation.

Buffers whose lifetimes do not meet share bytes, so uses cannot be added up. Each byte counts for
its longest-lived use, in the order of `USES`; then they add up to what the block takes.
"""

import math
import re
import tempfile
from pathlib import Path

from mla_ref.platform import Capability, require

RING = "tiles in flight"
OPERANDS = "operands of the products"
SCRATCH = "layout changes and sums"
USES = (RING, OPERANDS, SCRATCH)

# "%kk = ttg.local_alloc %tile {allocation.offset = 0 : i32} : (...) -> !ttg.memdesc<2x64x16xf16,".
_ALLOCATION = re.compile(
    r"ttg\.local_alloc\s+(%\S+)?.*allocation\.offset = (\d+).*memdesc<([^,>]+)"
)
_BITS = re.compile(r"[a-z]+(\d+)")  # f8E4M3FN, bf16, i8


def shared_uses(allocated: str) -> dict[str, int]:
    """Bytes of a block by use.

    Args:
        allocated: The module's text with offsets, as `allocate` gives it.

    Returns:
        For each of `USES` the bytes that no use before it takes.

    Raises:
        ValueError: The text does not say how much the block takes.
    """
    total = re.search(r"ttg\.shared = (\d+)", allocated)
    if total is None:
        raise ValueError("allocated must be a module with ttg.shared, got one without")
    use = [SCRATCH] * int(total[1])
    for wanted in (OPERANDS, RING):
        for value, offset, shape in _ALLOCATION.findall(allocated):
            # A buffer that is made without a value is filled later, by asynchronous copies.
            if (OPERANDS if value else RING) == wanted:
                start = int(offset)
                stop = min(len(use), start + _bytes(shape))
                use[start:stop] = [wanted] * (stop - start)
    return {name: use.count(name) for name in USES}


def allocate(ttgir: str, capability: Capability) -> str:
    """The module after Triton has given each buffer its place.

    Triton runs these passes on the way to LLVM and keeps no text of it. They are inner parts of
    Triton 3.7; another version may lack them.

    Args:
        ttgir: `Compiled.ttgir`.
        capability: What it was compiled for.
    """
    lib = require("triton._C.libtriton")
    number = capability[0] * 10 + capability[1]
    target = require("triton.backends.compiler").GPUTarget("cuda", number, 32)
    backend = require("triton.compiler").make_backend(target)
    context = lib.ir.context()
    lib.ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.ttgir"
        path.write_text(ttgir, "utf-8")
        module = lib.ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = lib.ir.pass_manager(context)
    lib.passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    lib.passes.ttgpuir.add_allocate_warp_groups(manager)
    lib.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, number, 80)
    manager.run(module, "allocate shared memory")
    return str(module)


def _bytes(shape: str) -> int:
    """The bytes of "2x64x128xf8E4M3FN": two buffers of 64 rows of 128 bytes."""
    *sizes, dtype = shape.split("x")
    bits = _BITS.match(dtype)
    if bits is None:
        raise ValueError(f"shape must end in a dtype with its bits, got {shape!r}")
    return math.prod(map(int, sizes)) * int(bits[1]) // 8

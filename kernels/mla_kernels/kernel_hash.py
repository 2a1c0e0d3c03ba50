"""What a backend's measured numbers belong to: the hash of its kernels and of how they are cut.

Read from files, nothing imported: the book tells stale numbers on a machine without Triton or CuPy.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from mla_kernels.source_hash import source_hash

FOLDER = Path(__file__).parent
# The kernels of a decode step, and the functions that choose tiles, warps and splits for them.
TRITON = (
    ("attention.py", "sparse_attention_kernel"),
    ("attention_wide.py", "sparse_attention_wide_kernel"),
    ("merge.py", "merge_kernel"),
    ("configs.py", "choose"),
    ("split_plan.py", "plan_splits"),
)


def triton_hash() -> str:
    """A hash for each, joined."""
    folder = FOLDER / "triton_kernels"
    return "-".join(source_hash(folder / file, name) for file, name in TRITON)


def cuda_hash() -> str:
    """One hash of all CUDA source, and one of the choice of splits."""
    splits = source_hash(FOLDER / "cuda_kernels" / "attention.py", "plan_splits")
    return f"{cuda_source_hash()}-{splits}"


def cuda_source_hash() -> str:
    """One hash of all CUDA source, without its comments."""
    folder = FOLDER / "cuda_kernels"
    text = [
        " ".join(re.sub(r"//[^\n]*", "", path.read_text("utf-8")).split())
        for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")])
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


# By the name of the backend.
KERNEL_HASHES: dict[str, Callable[[], str]] = {"triton": triton_hash, "cupy": cuda_hash}

"""What a backend's measured numbers belong to: the hash of its kernels and of how they are cut.

Read from files, nothing imported: the book tells stale numbers on a machine without Triton or CuPy.

    python -m mla_kernels.kernel_hash   # after a measurement: records the hash of each source

One hash says that something has changed, the record says what. A measured number names the one hash
alone, and whoever changes one kernel of twelve need not measure all of them again.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from mla_kernels.source_hash import source_hash

FOLDER = Path(__file__).parent
# By backend and by the hash of the whole, the hash of each source.
RECORD = FOLDER / "kernel_sources.json"
# The kernels of a decode step, and the functions that choose tiles, warps and splits for them.
TRITON = (
    ("attention.py", "sparse_attention_kernel"),
    ("attention_wide.py", "sparse_attention_wide_kernel"),
    ("merge.py", "merge_kernel"),
    ("configs.py", "choose"),
    ("configs.py", "Config"),
    ("split_plan.py", "plan_splits"),
)
# How the CUDA kernels are compiled, launched and cut.
CUDA = (
    ("source.py", "OPTIONS"),
    ("attention.py", "NARROW"),
    ("attention.py", "WIDE"),
    ("attention.py", "WIDE64"),
    ("attention.py", "plan_splits"),
    ("merge.py", "BEHIND_DECODE"),
    ("union.py", "UNION"),
    ("union.py", "plan_union_splits"),
)


def triton_hash() -> str:
    """One hash of all Triton kernels of a decode step and of how they are cut."""
    return _hash(json.dumps(sources("triton")))


def cuda_hash() -> str:
    """One hash of all CUDA source and of how it is compiled, launched and cut."""
    return _hash(json.dumps(sources("cupy")))


def cuda_source_hash() -> str:
    """One hash of all CUDA source, without its comments."""
    return _hash("\n".join(_cuda_texts().values()))


# By the name of the backend.
KERNEL_HASHES: dict[str, Callable[[], str]] = {"triton": triton_hash, "cupy": cuda_hash}


def sources(backend: str) -> dict[str, str]:
    """The hash of each source that a backend's numbers depend on, by its name."""
    if backend == "triton":
        return _python_sources("triton_kernels", TRITON)
    files = {file: _hash(text) for file, text in _cuda_texts().items()}
    return files | _python_sources("cuda_kernels", CUDA)


def changed_since(backend: str, kernel_hash: str) -> tuple[str, ...] | None:
    """The sources that are not, or not as they were, when a backend had this hash.

    Returns:
        Their names; empty where all are the same. None where the hash was not recorded, so that
        nobody can say.
    """
    if kernel_hash == KERNEL_HASHES[backend]():
        return ()
    then, now = json.loads(RECORD.read_text("utf-8"))[backend].get(kernel_hash), sources(backend)
    if then is None:
        return None
    return tuple(name for name in sorted(then | now) if then.get(name) != now.get(name))


def record() -> None:
    """Add what stands here to the record, under the hashes of the backends."""
    known = json.loads(RECORD.read_text("utf-8"))
    for backend, hash_of in KERNEL_HASHES.items():
        known[backend][hash_of()] = sources(backend)
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def _python_sources(folder: str, names: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {f"{file}, {name}": source_hash(FOLDER / folder / file, name) for file, name in names}


def _cuda_texts() -> dict[str, str]:
    folder = FOLDER / "cuda_kernels"
    return {
        path.name: " ".join(re.sub(r"//[^\n]*", "", path.read_text("utf-8")).split())
        for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")])
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    record()

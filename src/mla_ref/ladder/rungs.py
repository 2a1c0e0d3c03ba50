"""The table of rungs. The command line, the tests and the book read it from here."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder.

    Attributes:
        number: From 1.
        name: Two or three words.
        what_is_new: What this rung adds to the one below.
        checked_against: What its results are compared with.
        file: The file to read, from the top of the repository.
        test: Its tests, from the top of the repository.
        lesson: Its lesson, from the top of the repository.
    """

    number: int
    name: str
    what_is_new: str
    checked_against: str
    file: str
    test: str
    lesson: str


_ATTENTION = "src/mla_ref/attention"
_TESTS = "tests/attention"

RUNGS: tuple[Rung, ...] = (
    Rung(
        1,
        "causal",
        "one query row at a time, any dtype up to float64",
        "by hand, float64",
        f"{_ATTENTION}/causal.py",
        f"{_TESTS}/test_causal.py",
        "lessons/01_causal_attention.ipynb",
    ),
    Rung(
        2,
        "vectorised",
        "all rows at once, mask aligned at the bottom right",
        "rung 1",
        f"{_ATTENTION}/vectorised.py",
        f"{_TESTS}/test_vectorised.py",
        "lessons/01_causal_attention.ipynb",
    ),
    Rung(
        3,
        "online",
        "tiles with a running maximum and sum, LSE out, merge of parts",
        "rung 2",
        f"{_ATTENTION}/online.py",
        f"{_TESTS}/test_online.py",
        "lessons/02_online_softmax.ipynb",
    ),
    Rung(
        4,
        "paged",
        "KV pages, block tables, slot mapping, ragged batches",
        "rung 3",
        f"{_ATTENTION}/paged.py",
        f"{_TESTS}/test_paged.py",
        "lessons/04_paging.ipynb",
    ),
    Rung(
        5,
        "MLA expanded",
        "one latent row and one rotary key a token, rebuilt to K and V",
        "rung 4",
        f"{_ATTENTION}/mla_expanded.py",
        f"{_TESTS}/test_mla_expanded.py",
        "lessons/06_mla_expanded.ipynb",
    ),
    Rung(
        6,
        "MLA absorbed",
        "W_UK folded into q, W_UV into the output: every head reads the latent row",
        "rung 5",
        f"{_ATTENTION}/mla_absorbed.py",
        f"{_TESTS}/test_mla_absorbed.py",
        "lessons/07_mla_absorbed.ipynb",
    ),
    Rung(
        7,
        "FP8 latent cache",
        "656-byte rows, group scales",
        "rung 6, same rows",
        f"{_ATTENTION}/fp8_latent.py",
        f"{_TESTS}/test_fp8_latent.py",
        "lessons/08_fp8_cache.ipynb",
    ),
    Rung(
        8,
        "lightning indexer",
        "scores, top-k, FP8 index keys",
        "float64 scores",
        "src/mla_ref/indexer/select.py",
        "tests/indexer/test_select.py",
        "lessons/09_lightning_indexer.ipynb",
    ),
    Rung(
        9,
        "sparse MLA, extend",
        "one pass per query row over its selected slots",
        "rung 7, masked",
        f"{_ATTENTION}/sparse_extend.py",
        f"{_TESTS}/test_sparse.py",
        "lessons/10_sparse_mla.ipynb",
    ),
    Rung(
        10,
        "sparse MLA, decode",
        "split-KV partials and LSE merge",
        "rung 9",
        f"{_ATTENTION}/sparse_decode.py",
        f"{_TESTS}/test_sparse.py",
        "lessons/10_sparse_mla.ipynb",
    ),
    Rung(
        11,
        "verifier batch",
        "1 + n rows a request, own causal length per row, routed by metadata",
        "rung 10, by row",
        "src/mla_ref/batching/verifier.py",
        "tests/batching/test_verifier.py",
        "lessons/12_verifier_batch.ipynb",
    ),
    Rung(
        12,
        "speculative decoding",
        "draft, verify, accept, roll back",
        "plain decoding",
        "src/mla_ref/engine/engine.py",
        "tests/engine/test_fuzz.py",
        "lessons/11_draft_verify_roll_back.ipynb",
    ),
    Rung(
        13,
        "context parallel",
        "each rank holds a share of the KV, partials merged by LSE",
        "rung 10, 1 rank",
        "src/mla_ref/parallel/attend.py",
        "tests/parallel/test_simulate.py",
        "lessons/13_context_parallel.ipynb",
    ),
    Rung(
        14,
        "Triton",
        "decode, extend, merge, cache write, indexer and sampler as kernels",
        "rung 10, by row",
        "kernels/mla_kernels/triton_kernels/backend.py",
        "tests/kernels/test_triton_attention.py",
        "lessons/14_triton_on_sm120.ipynb",
    ),
    Rung(
        15,
        "CuPy",
        "the same attention as CUDA C++",
        "rung 10, by row",
        "kernels/mla_kernels/cuda_kernels/backend.py",
        "tests/kernels/test_cuda_backend.py",
        "lessons/15_what_a_warp_does.ipynb",
    ),
)


def where(rung: Rung) -> Path | None:
    """The rung's file on this machine, wherever the package is installed; None if it is not."""
    module = ".".join(Path(rung.file).with_suffix("").parts[1:])
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec and spec.origin else None

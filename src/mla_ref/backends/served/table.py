"""The served backends that this project knows, one profile each.

Where sources disagree the profile follows the code that serves the model, and says so here:
FlashMLA's README gives base 2 for its LSE, its code and tests the natural one; b12x's docstring
lists top-k 512, 1024 and 2048, and vLLM's tests drive it with 128; FlashMLA's sparse decode takes
any page size, and vLLM gives it 64. b12x ports FlashInfer's quantisation of queries by its own
account; that FlashInfer cuts its weights into the same tiles is an assumption here.
"""

import math
from types import MappingProxyType

import torch

from mla_ref.backends.served.profile import Arithmetic, ServedProfile
from mla_ref.backends.served.tolerance import PeerTolerance

_UP_TO_128 = tuple(range(1, 129))
_FLASHMLA_TOLERANCE = PeerTolerance(
    "deepseek-ai/FlashMLA, tests of sparse decode",
    out_abs=1e-3,
    out_rel=2.01 / 128,
    either=True,
    similarity=1 - 5e-6,
    lse_abs=1e-6,
    lse_rel=8.01 / 65536,
)
# The same for all rows of the shared test; its LSE is not compared there.
_VLLM_BF16_TOLERANCE = PeerTolerance(
    "vllm-project/vllm, tests/v1/attention/test_sparse_mla_backends.py", out_abs=0.01, out_rel=0.01
)

B12X = ServedProfile(
    name="b12x",
    stands_for="b12x sparse MLA for GLM (vLLM: B12X_MLA_SPARSE, upstream B12X)",
    sources=(
        "local-inference-lab/vllm#164",
        "local-inference-lab/b12x: traits.py, kernel.py, decode_math.py, mla_sm120_postmortem.md",
        "local-inference-lab/vllm#5 (4 heads a rank, unpadded, gave garbage)",
    ),
    architectures=("sm_120", "sm_121"),
    heads=MappingProxyType({"fp8": tuple(range(8, 129, 8))}),
    page_sizes=(64,),
    q_dtypes=(torch.bfloat16,),
    topk_multiple=64,
    scale_rule="fp32-one",
    arithmetic=Arithmetic(queries="e4m3", weights="e4m3+residual", partials="bfloat16"),
    max_splits=32,
    lse_base="e",
    empty_lse="-inf",
    sink="none",
    hands_on_lse=True,
    lists="Physical slots; a count of entries for each row; -1 is skipped. The LSE is base 2 "
    "inside and asked for in base e, and only under context parallelism.",
    tolerance=PeerTolerance(
        "local-inference-lab/b12x, GLM against a dense float32 oracle; its SM120 suites",
        out_abs=2e-2,
        out_rel=0.0,
        similarity=0.9995,
        lse_abs=5e-2,
    ),
)

FLASHINFER_SM120 = ServedProfile(
    name="flashinfer-sm120",
    stands_for="FlashInfer sparse MLA for SM120 with kv_scale_format arbitrary_fp32, as for GLM "
    "(vLLM: FLASHINFER_MLA_SPARSE_SM120)",
    sources=(
        "flashinfer-ai/flashinfer: mla/_sparse_mla_sm120",
        "vllm-project/vllm: flashinfer_mla_sparse_sm120.py",
        "vllm-project/vllm#54563 (other models read arbitrary scales as powers of two)",
        "flashinfer-ai/flashinfer#4485 (base of the LSE)",
    ),
    architectures=("sm_120", "sm_121"),
    heads=MappingProxyType({"fp8": _UP_TO_128}),
    page_sizes=(64,),
    q_dtypes=(torch.bfloat16,),
    topk_multiple=1,
    scale_rule="fp32-floor",
    arithmetic=Arithmetic(queries="e4m3", weights="e4m3+residual", partials="bfloat16"),
    max_splits=32,
    lse_base="2",
    empty_lse="-inf",
    sink="out and lse",
    hands_on_lse=False,
    lists="Physical slots without counts: all of the buffer's width, -1 where there is none.",
    tolerance=PeerTolerance(
        "flashinfer-ai/flashinfer, tests of sparse MLA on SM120: 5e-2 on out and base-2 LSE",
        out_abs=5e-2,
        out_rel=5e-2,
        lse_abs=5e-2 * math.log(2.0),
        lse_rel=5e-2,
    ),
)

FLASHMLA_SM90 = ServedProfile(
    name="flashmla-sm90",
    stands_for="FlashMLA sparse decode on Hopper (vLLM: FLASHMLA_SPARSE)",
    sources=(
        "deepseek-ai/FlashMLA: README, flash_mla_interface.py, tests/quant.py, tests/ref.py",
        "vllm-project/vllm: flashmla_sparse.py (head padding)",
        "vllm-project/vllm#49435, deepseek-ai/FlashMLA#184 (scales)",
        "flashinfer-ai/flashinfer#4484 (+inf of empty rows)",
    ),
    architectures=("sm_90",),
    heads=MappingProxyType({"bf16": (64, 128), "fp8": (64, 128)}),
    page_sizes=(64,),
    q_dtypes=(torch.bfloat16,),
    topk_multiple=64,
    scale_rule="pow2",
    arithmetic=Arithmetic(rows="bfloat16", weights="q dtype"),
    max_splits=4,
    lse_base="e",
    empty_lse="+inf",
    sink="out",
    hands_on_lse=True,
    lists="Physical slots. Only exactly -1 is none and there are no counts for 576-wide rows, so "
    "whatever lies outside the cache or beyond a count is made -1 first.",
    tolerance=_FLASHMLA_TOLERANCE,
)

FLASHMLA_SM100 = ServedProfile(
    name="flashmla-sm100",
    stands_for="FlashMLA sparse decode on datacenter Blackwell (vLLM: FLASHMLA_SPARSE)",
    sources=FLASHMLA_SM90.sources,
    architectures=("sm_100",),
    heads=MappingProxyType({"bf16": (128,), "fp8": (64, 128)}),
    page_sizes=(64,),
    q_dtypes=(torch.bfloat16,),
    topk_multiple=64,
    scale_rule="pow2",
    arithmetic=Arithmetic(scale_reader="truncated", rows="bfloat16", weights="q dtype"),
    max_splits=4,
    lse_base="e",
    empty_lse="+inf",
    sink="out",
    hands_on_lse=True,
    lists=FLASHMLA_SM90.lists,
    tolerance=_FLASHMLA_TOLERANCE,
)

VLLM_TRITON_SPARSE = ServedProfile(
    name="vllm-triton-sparse",
    stands_for="vLLM's Triton sparse MLA kernel (vLLM: TRITON_MLA_SPARSE)",
    sources=("vllm-project/vllm: triton_mla_sparse.py and its kernel",),
    architectures=("sm_80", "any other CUDA GPU"),
    heads=MappingProxyType({"bf16": None}),
    page_sizes=None,
    q_dtypes=(torch.bfloat16, torch.float16),
    topk_multiple=16,
    scale_rule=None,
    arithmetic=Arithmetic(weights="q dtype"),
    max_splits=16,
    lse_base="e",
    empty_lse="-inf",
    sink="none",
    hands_on_lse=False,
    lists="Physical slots; what lies outside the cache is masked by a finite -1e30.",
    tolerance=_VLLM_BF16_TOLERANCE,
)

FA3_SPARSE = ServedProfile(
    name="fa3-sparse",
    stands_for="FlashAttention 3 with pages of one token (vLLM: FLASH_ATTN_MLA_SPARSE)",
    sources=(
        "vllm-project/vllm: flashattn_mla_sparse.py",
        "Dao-AILab/flash-attention: hopper/softmax.h",
    ),
    architectures=("sm_90",),
    heads=MappingProxyType({"bf16": None}),
    page_sizes=(64,),
    q_dtypes=(torch.bfloat16, torch.float16),
    topk_multiple=1,
    scale_rule=None,
    arithmetic=Arithmetic(weights="q dtype"),
    max_splits=4,
    lse_base="e",
    empty_lse="-inf",
    sink="none",
    hands_on_lse=False,
    lists="The list is a block table of pages of one token, and the number of valid entries the "
    "sequence length: valid entries come first. Each query row is a sequence of its own.",
    tolerance=_VLLM_BF16_TOLERANCE,
)

PROFILES = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            B12X,
            FLASHINFER_SM120,
            FLASHMLA_SM90,
            FLASHMLA_SM100,
            VLLM_TRITON_SPARSE,
            FA3_SPARSE,
        )
    }
)

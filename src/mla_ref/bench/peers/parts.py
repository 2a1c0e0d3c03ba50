"""Peers of single parts: vLLM's merge of two partial results, DeepGEMM's index scores."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.bench.peers.peer import Import, first_that_imports, wrong_device
from mla_ref.numerics import AttentionResult
from mla_ref.numerics.float8 import E4M3_MAX
from mla_ref.platform import gpu_capability

VLLM_MERGE = ("vllm.v1.attention.ops.merge_attn_states", "vllm.attention.ops.merge_attn_states")
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
Capability = Callable[[torch.device], tuple[int, int] | None]


@dataclass(frozen=True)
class VllmMerge:
    """vLLM's `merge_attn_states`: two partial results, LSE [heads, rows].

    Attributes:
        import_module: How to import, for tests.
        capability: How to ask for the GPU's compute capability, for tests.
    """

    import_module: Import = importlib.import_module
    capability: Capability = gpu_capability
    name: ClassVar[str] = "vLLM merge"

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here."""
        if self.capability(device) is None:
            return "needs a GPU"
        return first_that_imports(VLLM_MERGE, self.import_module)[1]

    def call(
        self, outs: Float[Tensor, "2 rows h d"], lses: Float[Tensor, "2 rows h"]
    ) -> Callable[[], AttentionResult]:
        """A call that is ready to run."""
        module, reason = first_that_imports(VLLM_MERGE, self.import_module)
        if module is None:
            raise ImportError(reason)
        first, second = (lse.T.contiguous() for lse in lses)
        out, lse = torch.empty_like(outs[0]), torch.empty_like(first)

        def run() -> AttentionResult:
            module.merge_attn_states(out, outs[0], first, outs[1], second, output_lse=lse)
            return AttentionResult(out, lse.T)

        return run


@dataclass(frozen=True)
class DeepGemmScores:
    """DeepGEMM's `fp8_mqa_logits`: index scores of one request over FP8 keys.

    A query's scale goes into its weight, as vLLM puts it there.

    Attributes:
        import_module: How to import, for tests.
        capability: How to ask for the GPU's compute capability, for tests.
    """

    import_module: Import = importlib.import_module
    capability: Capability = gpu_capability
    name: ClassVar[str] = "DeepGEMM index scores"

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here."""
        if reason := wrong_device(((9, 0), (10, 0), (10, 3)), self.capability(device)):
            return reason
        module, reason = first_that_imports(DEEP_GEMM, self.import_module)
        if module is not None and not hasattr(module, "fp8_mqa_logits"):
            return "this deep_gemm has no fp8_mqa_logits"
        return reason

    def call(
        self,
        q: Float[Tensor, "rows index_heads d_i"],
        k: Float[Tensor, "s_kv d_i"],
        weights: Float[Tensor, "rows index_heads"],
    ) -> Callable[[], Any]:
        """A call on the same numbers in FP8; quantising them is not in it."""
        module, reason = first_that_imports(DEEP_GEMM, self.import_module)
        if module is None:
            raise ImportError(reason)
        q8, q_scale = _quantised(q)
        k8, k_scale = _quantised(k)
        scaled = (weights * q_scale).contiguous()
        start = torch.zeros(len(q), dtype=torch.int32, device=q.device)
        end = torch.full_like(start, len(k))
        return lambda: module.fp8_mqa_logits(
            q8, (k8, k_scale), scaled, start, end, clean_logits=False
        )


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers with one float32 scale for the last dimension."""
    scale = x.float().abs().amax(dim=-1).clamp(min=1e-4) / E4M3_MAX
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale

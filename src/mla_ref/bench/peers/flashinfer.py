"""FlashInfer's sparse MLA for SM120, by its public API (flashinfer-ai/flashinfer, flashinfer.mla).

The call is the one that vLLM's FLASHINFER_MLA_SPARSE_SM120 makes, with raw float32 scales.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mla_ref.backends.served import PeerTolerance
from mla_ref.backends.served.table import FLASHINFER_SM120
from mla_ref.bench.kernel_workload import LATENT, ROW, SOFTMAX_SCALE, KernelWorkload
from mla_ref.bench.peers.peer import Import, Way, first_that_imports, wrong_device
from mla_ref.platform import gpu_capability

MODULE = "flashinfer.mla"
CAPABILITIES = ((12, 0), (12, 1))
# vLLM keeps 128 MB for all of FlashInfer's MLA kernels; partial results of 64 rows fit into it.
WORKSPACE_BYTES = 128 * 2**20
# Of DeepSeek-V3.2's heads before absorption; the sparse kernel ignores it.
QK_NOPE_HEAD_DIM = 128


@dataclass(frozen=True)
class FlashInferSM120:
    """The kernel behind `trtllm_batch_decode_with_kv_cache_mla(..., sparse_mla_top_k=...)`.

    Attributes:
        import_module: How to import, for tests.
        capability: How to ask for the GPU's compute capability, for tests.
    """

    import_module: Import = importlib.import_module
    capability: Callable[[torch.device], tuple[int, int] | None] = gpu_capability
    name: ClassVar[str] = "FlashInfer SM120"
    timed: ClassVar[str] = "the kernel and its merge"
    note: ClassVar[str] = "written from its public API, never run here"
    tolerance: ClassVar[PeerTolerance | None] = FLASHINFER_SM120.tolerance

    def missing(self, workload: KernelWorkload) -> str | None:
        """Why it cannot run this here."""
        if reason := wrong_device(CAPABILITIES, self.capability(workload.q.device)):
            return reason
        if workload.shape.cache_format != "fp8":
            return "reads 656-byte rows only"
        return first_that_imports([MODULE], self.import_module)[1]

    def ways(self, workload: KernelWorkload) -> Sequence[Way]:
        """One: each row is a request of one token; lists stand where block tables would."""
        decode = self.import_module(MODULE).trtllm_batch_decode_with_kv_cache_mla
        rows, heads, topk = workload.shape.rows, workload.shape.heads, workload.shape.topk
        device = workload.q.device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        out = torch.empty(rows, 1, heads, LATENT, dtype=torch.bfloat16, device=device)

        def run() -> Any:
            return decode(
                query=workload.q[:, None],
                kv_cache=workload.kv_cache[:, None],
                workspace_buffer=workspace,
                qk_nope_head_dim=QK_NOPE_HEAD_DIM,
                kv_lora_rank=LATENT,
                qk_rope_head_dim=ROW - LATENT,
                block_tables=workload.indices[:, None],
                seq_lens=None,
                max_seq_len=topk,
                out=out,
                bmm1_scale=SOFTMAX_SCALE,
                bmm2_scale=1.0,
                sparse_mla_top_k=topk,
                kv_scale_format="arbitrary_fp32",
            )

        return [Way("", run, lambda result: (result[:, 0], None))]

"""torch's own scaled_dot_product_attention on gathered rows: what needs no kernel of one's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mla_ref.backends.served import PeerTolerance
from mla_ref.bench.kernel_workload import LATENT, ROW, SOFTMAX_SCALE, KernelWorkload
from mla_ref.bench.peers.peer import Way
from mla_ref.cache import unpack_fp8_rows

# float32 numbers of the gathered rows and their bfloat16 copies.
_BYTES_A_NUMBER = 4 + 2
MEMORY_LIMIT = 2 * 2**30


@dataclass(frozen=True)
class TorchSDPA:
    """Gather, dequantise, and one fused attention of torch in bfloat16.

    Attributes:
        memory_limit: Bytes that the gathered rows may take.
    """

    memory_limit: int = MEMORY_LIMIT
    name: ClassVar[str] = "torch SDPA"
    timed: ClassVar[str] = "gathering and dequantising the rows, and the attention"
    note: ClassVar[str] = ""
    tolerance: ClassVar[PeerTolerance | None] = None

    def missing(self, workload: KernelWorkload) -> str | None:
        """Only memory can lack."""
        needed = workload.indices.numel() * ROW * _BYTES_A_NUMBER
        if needed > self.memory_limit:
            return (
                f"its gathered rows take {needed / 1e9:.1f} GB, more than "
                f"{self.memory_limit / 1e9:.1f} GB"
            )
        return None

    def ways(self, workload: KernelWorkload) -> Sequence[Way]:
        """One: each row is a batch, its heads are queries of one key head."""
        rows = workload.kv_cache.flatten(0, 1)
        q = workload.q[:, None]  # [rows, 1, heads, 576]
        indices = workload.indices.long()

        def run() -> Tensor:
            keys = rows[indices]
            if keys.dtype == torch.uint8:
                keys = unpack_fp8_rows(keys).to(torch.bfloat16)
            keys = keys[:, None]
            return torch.nn.functional.scaled_dot_product_attention(
                q, keys, keys[..., :LATENT], scale=SOFTMAX_SCALE
            )

        return [Way("", run, lambda out: (out[:, 0], None))]

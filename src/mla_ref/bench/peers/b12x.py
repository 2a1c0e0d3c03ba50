"""b12x's sparse MLA for SM12x, by its public API (lukealonso/b12x 1.5, attention/sparse_mla).

plan(Caps(...)) -> plan.scratch_specs() -> bind(plan, ...) -> run(binding)
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from mla_ref.backends.served import PeerTolerance
from mla_ref.backends.served.table import B12X
from mla_ref.bench.kernel_workload import LATENT, PAGE_SIZE, ROW, SOFTMAX_SCALE, KernelWorkload
from mla_ref.bench.peers.peer import Import, Way, first_that_imports, padded, wrong_device
from mla_ref.platform import gpu_capability

MODULE = "b12x.attention.sparse_mla"
CAPABILITIES = ((12, 0), (12, 1))


@dataclass(frozen=True)
class B12x:
    """The kernel behind vLLM's B12X_MLA_SPARSE.

    Attributes:
        import_module: How to import, for tests.
        capability: How to ask for the GPU's compute capability, for tests.
    """

    import_module: Import = importlib.import_module
    capability: Callable[[torch.device], tuple[int, int] | None] = gpu_capability
    name: ClassVar[str] = "b12x"
    timed: ClassVar[str] = (
        "the kernel and its merge, queries quantised in it; not the padding of heads"
    )
    note: ClassVar[str] = "written from its public API, never run here"
    tolerance: ClassVar[PeerTolerance | None] = B12X.tolerance

    def missing(self, workload: KernelWorkload) -> str | None:
        """Why it cannot run this here."""
        if reason := wrong_device(CAPABILITIES, self.capability(workload.q.device)):
            return reason
        if workload.shape.cache_format != "fp8":
            return "reads 656-byte rows only"
        if workload.shape.topk % B12X.topk_multiple:
            return f"takes lists whose width is a multiple of {B12X.topk_multiple}"
        return first_that_imports([MODULE], self.import_module)[1]

    def ways(self, workload: KernelWorkload) -> Sequence[Way]:
        """One: a query row is its unit; heads are padded to a multiple of 8."""
        b12x = self.import_module(MODULE)
        rows, heads, topk = workload.shape.rows, workload.shape.heads, workload.shape.topk
        q = padded(workload.q, -(-heads // 8) * 8).contiguous()
        device = q.device
        plan = b12x.plan(
            b12x.Caps(
                device=device,
                num_q_heads=q.shape[1],
                max_q_rows=rows,
                max_width=topk,
                softmax_scale=SOFTMAX_SCALE,
                kv_dtype=torch.uint8,
                head_dim=ROW,
                v_head_dim=LATENT,
                mode="decode",
                page_size=PAGE_SIZE,
            )
        )
        lengths = torch.full((rows,), topk, dtype=torch.int32, device=device)
        binding = b12x.bind(
            plan,
            scratch=tuple(
                torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for spec in plan.scratch_specs()
            ),
            q=q,
            kv_cache=workload.kv_cache,
            selected_indices=workload.indices,
            cache_lengths=lengths,
            selected_lengths=lengths,
        )
        return [Way("", lambda: b12x.run(binding), lambda out: (out[:, :heads], None))]

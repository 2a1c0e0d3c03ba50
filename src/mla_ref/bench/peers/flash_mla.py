"""FlashMLA's sparse decode over 656-byte rows (deepseek-ai/FlashMLA; vLLM: FLASHMLA_SPARSE).

It is called as engines call it: heads padded with zeros to 64 or 128, and the scheduling metadata
made once, by the first call, since all layers of a step share it. A batch of verifier rows is
tried as one request a row (b = rows, s_q = 1) and as rows of a request (b = requests, s_q = 4).
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_ref.backends.served import PeerTolerance
from mla_ref.backends.served.table import FLASHMLA_SM90
from mla_ref.bench.kernel_workload import LATENT, ROWS_PER_REQUEST, SOFTMAX_SCALE, KernelWorkload
from mla_ref.bench.peers.peer import Import, Way, first_that_imports, padded, wrong_device
from mla_ref.numerics import to_natural_lse
from mla_ref.platform import gpu_capability

PACKAGES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
HEADS = (64, 128)
CAPABILITIES = ((9, 0), (10, 0), (10, 3))

Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""f(q [b, s_q, h, 576], kv_cache [pages, 64, 1, 656], indices [b, s_q, topk]) -> out, lse."""


def load_operators(library: str) -> Any:
    """The operators that a shared library registers with torch."""
    torch.ops.load_library(library)
    return torch.ops._flashmla_C


@dataclass(frozen=True)
class FlashMLA:
    """The kernel from its Python package, from vLLM's copy of it, or from a shared library.

    Attributes:
        shared_object: `_flashmla_C.abi3.so` of a vLLM wheel; None for an installed package.
        import_module: How to import, for tests.
        load: How to load a library and hand out its operators, for tests.
        capability: How to ask for the GPU's compute capability, for tests.
    """

    shared_object: Path | None = None
    import_module: Import = importlib.import_module
    load: Callable[[str], Any] = load_operators
    capability: Callable[[torch.device], tuple[int, int] | None] = gpu_capability
    name: ClassVar[str] = "FlashMLA"
    timed: ClassVar[str] = (
        "the kernel and its merge; not the copy of q into padded heads, nor the scheduling "
        "metadata, which a step's layers share"
    )
    note: ClassVar[str] = ""
    tolerance: ClassVar[PeerTolerance | None] = FLASHMLA_SM90.tolerance

    def missing(self, workload: KernelWorkload) -> str | None:
        """Why it cannot run this here."""
        if reason := wrong_device(CAPABILITIES, self.capability(workload.q.device)):
            return reason
        if workload.shape.cache_format != "fp8":
            return "its sparse decode reads 656-byte rows only"
        if workload.shape.heads > max(HEADS):
            return f"takes at most {max(HEADS)} heads"
        if self.shared_object is not None:
            return (
                None
                if self.shared_object.is_file()
                else f"there is no file {self.shared_object.name}"
            )
        return self._package()[1]

    def ways(self, workload: KernelWorkload) -> Sequence[Way]:
        """One request a row; and rows of a request where the workload has such."""
        shapes = [(f"b = {workload.shape.rows}, s_q = 1", 1)]
        if workload.shape.rows % ROWS_PER_REQUEST == 0:
            requests = workload.shape.rows // ROWS_PER_REQUEST
            shapes.append((f"b = {requests}, s_q = {ROWS_PER_REQUEST}", ROWS_PER_REQUEST))
        return [self._way(workload, how, s_q) for how, s_q in shapes]

    def _way(self, workload: KernelWorkload, how: str, s_q: int) -> Way:
        heads = workload.shape.heads
        kernel_heads = min(h for h in HEADS if h >= heads)
        q = padded(workload.q, kernel_heads).unflatten(0, (-1, s_q)).contiguous()
        indices = workload.indices.unflatten(0, (-1, s_q))
        cache = workload.kv_cache.unsqueeze(2)
        call = self._call()

        def read(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            out, lse = result  # the LSE is [b, heads, s_q]
            lse = to_natural_lse(lse, base="e", empty="+inf").transpose(1, 2).flatten(0, 1)
            return out.flatten(0, 1)[:, :heads], lse[:, :heads]

        return Way(how, lambda: call(q, cache, indices), read)

    def _call(self) -> Call:
        """A call that makes its metadata once and takes it again from then on."""
        if self.shared_object is not None:
            return _operator(self.load(str(self.shared_object)))
        module, reason = self._package()
        if module is None:
            raise ImportError(reason)
        metadata, _ = module.get_mla_metadata()

        def call(q: Tensor, cache: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = module.flash_mla_with_kvcache(
                q,
                cache,
                None,
                None,
                LATENT,
                metadata,
                softmax_scale=SOFTMAX_SCALE,
                is_fp8_kvcache=True,
                indices=indices,
            )
            return out, lse

        return call

    def _package(self) -> tuple[Any, str | None]:
        return first_that_imports(PACKAGES, self.import_module)


def _operator(operators: Any) -> Call:
    """The operator itself: `sparse_decode_fwd` of 13 arguments, out, LSE and metadata come back.

    q, k_cache, indices, topk_length, attn_sink, tile_scheduler_metadata, num_splits, extra_k_cache,
    extra_indices, extra_topk_length, head_dim_v, softmax_scale, out.
    """
    metadata: tuple[Tensor | None, Tensor | None] = (None, None)

    def call(q: Tensor, cache: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal metadata
        out, lse, *made = operators.sparse_decode_fwd(
            q, cache, indices, None, None, *metadata, None, None, None, LATENT, SOFTMAX_SCALE, None
        )
        metadata = made[0], made[1]
        return out, lse

    return call

"""What a route costs on a GPU, counted: units of work against multiprocessors, and bytes.

A count, no time. It says whether a kernel can keep the GPU busy, which is why few rows want decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_ref.attention.sparse_decode import HEADS_PER_BLOCK, plan_splits
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.batching.facts import host_counts
from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.checks import describe, require_choice, require_count

SM120_MULTIPROCESSORS = 188  # RTX PRO 6000


@dataclass(frozen=True)
class KernelCost:
    """One launch of one kernel.

    Attributes:
        kind: "decode" or "extend".
        num_splits: Pieces of each row's list; 1 for extend.
        blocks: Thread blocks: one a row, 16 heads and split.
        multiprocessors: Of the GPU.
        gathered_bytes: Cached rows that the blocks ask for. Blocks of other heads ask again, and
            rows of one request ask for much the same: how much of it leaves the L2 cache, this
            count does not know.
        query_bytes: Queries and index lists read.
        output_bytes: Outputs written.
        partial_bytes: Partial results of the splits, written once and read once by the merge.
    """

    kind: str
    num_splits: int
    blocks: int
    multiprocessors: int
    gathered_bytes: int
    query_bytes: int
    output_bytes: int
    partial_bytes: int

    @property
    def busy(self) -> float:
        """Share of the multiprocessors that have a block, at most 1."""
        return min(1.0, self.blocks / self.multiprocessors)

    @property
    def moved_bytes(self) -> int:
        """All bytes together."""
        return self.gathered_bytes + self.query_bytes + self.output_bytes + self.partial_bytes


def kernel_cost(
    kind: str,
    visible_lens: Sequence[int],
    spec: AttnSpec,
    *,
    num_rows_padded: int | None = None,
    multiprocessors: int = SM120_MULTIPROCESSORS,
    num_splits: int | None = None,
) -> KernelCost:
    """Count what a kernel does for rows that may see so many keys.

    Args:
        kind: "decode" or "extend".
        visible_lens: Keys that each real row may see; it reads the best topk of them.
        spec: The layer.
        num_rows_padded: Rows that are launched; None: as many as are real.
        multiprocessors: Of the GPU.
        num_splits: Of a decode kernel. None: `plan_splits` for the rows that are launched, since a
            graph keeps the number that it was captured with (vllm#51119).
    """
    require_choice("kind", kind, KINDS)
    if not isinstance(spec, AttnSpec):
        raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
    keys = [min(length, spec.topk) for length in host_counts("visible_lens", visible_lens)]
    real = len(keys)
    rows = real if num_rows_padded is None else require_count("num_rows_padded", num_rows_padded)
    if rows < real:
        raise ValueError(f"num_rows_padded must be at least the {real} real rows, got {rows}")
    require_count("multiprocessors", multiprocessors, at_least=1)
    if num_splits is None:
        num_splits = plan_splits(rows, spec.num_heads, spec.topk, multiprocessors)
    require_count("num_splits", num_splits, at_least=1)
    if kind == "extend":
        num_splits = 1
    head_blocks, item = -(-spec.num_heads // HEADS_PER_BLOCK), spec.q_dtype.itemsize
    row_bytes = ROW_BYTES if spec.cache_format == "fp8" else spec.row_dim * 2
    partials = rows * spec.num_heads * num_splits * (spec.kv_lora_rank + 1) * 4
    return KernelCost(
        kind=kind,
        num_splits=num_splits,
        blocks=rows * head_blocks * num_splits,
        multiprocessors=multiprocessors,
        gathered_bytes=sum(keys) * row_bytes * head_blocks,
        query_bytes=real * (spec.num_heads * spec.row_dim * item + spec.topk * 4),
        output_bytes=rows * spec.num_heads * (spec.kv_lora_rank * item + 4),
        partial_bytes=2 * partials if num_splits > 1 else 0,
    )

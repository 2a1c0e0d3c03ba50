"""One layer's sparse latent attention over a step: index, select, convert, attend.

    x ──> row, index key ──> caches
    x ──> index queries ──> scores of all visible keys ──> top-k positions ──> slots
    x ──> absorbed queries ─────────────── attention over those slots ──> output

Rows and index keys of all new tokens are written first. So a verifier's later candidates find the
earlier ones in the cache, and each row's own causal length decides what it may select.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention import absorb_query, project_values
from mla_ref.batching import Step
from mla_ref.cache import new_index_cache, write_index_keys, write_rows
from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.checks import describe, require_integer, require_size
from mla_ref.indexer import select_positions, select_positions_fixed
from mla_ref.layers import MLAConfig
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.projections import LatentProjections, padded_rows
from mla_ref.models.sparse_parts import SparseParts
from mla_ref.numerics import AttentionResult


@runtime_checkable
class Attend(Protocol):
    """Attention of all rows of a step over their slots.

    A plan's `decode` (rung 10) or `extend` (rung 9), or `partial(attend_along, route, scratch)`,
    which sends each segment of a step to its kernel.
    """

    def __call__(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        *,
        softmax_scale: float,
    ) -> AttentionResult:
        """Arguments as in `Plan.decode`."""


@dataclass(frozen=True)
class SparseCache:
    """One layer's cache. Both parts belong to a request's state (sglang#39156).

    Attributes:
        kv: Rows of numbers or of 656 bytes, in pages.
        index: Index keys, plain or of 132 bytes, in pages; None in a layer without an indexer.
    """

    kv: Shaped[Tensor, "pages page_size row"]
    index: Shaped[Tensor, "pages *page"] | None

    @classmethod
    def new(
        cls,
        config: MLAConfig,
        layer: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> "SparseCache":
        """Zeros for one layer; uint8 for FP8 rows and keys, else plain numbers of this dtype."""
        row = ROW_BYTES if dtype == torch.uint8 else config.kv_row_dim
        index = None
        if config.indexer is not None and layer in config.indexer.full_layers:
            index = new_index_cache(
                num_pages,
                page_size,
                dtype=dtype,
                head_dim=config.indexer.head_dim,
                device=device,
            )
        return cls(torch.zeros(num_pages, page_size, row, dtype=dtype, device=device), index)


_LIBRARY = SparseParts()


def attend_sparse(
    layer: LatentProjections,
    indexer: IndexerLayer | None,
    x: Float[Tensor, "padded_tokens hidden"],
    cache: SparseCache,
    step: Step,
    attend: Attend,
    *,
    selected: Int[Tensor, "padded_tokens topk"] | None = None,
    scale_rule: str = "fp32",
    parts: SparseParts = _LIBRARY,
) -> tuple[Float[Tensor, "padded_tokens hidden"], Int[Tensor, "padded_tokens topk"]]:
    """Write the new rows, choose the keys of each and attend to them.

    Args:
        layer: The attention's linear maps.
        indexer: The layer's own indexer, or None where it takes the list of a layer before it.
        x: Input of the attention (after its norm), one row a new token.
        cache: Of this layer; the step's slots are overwritten in place.
        step: The batch.
        attend: Who attends, with buffers for as many rows at least. All give the same.
        selected: Positions that an earlier layer chose; read only where `indexer` is None.
        scale_rule: Of the 656-byte rows.
        parts: Who writes rows, scores and selects keys, and finds their slots.

    Returns:
        The attention's output and the positions that it used, for the layers that share them.

    Raises:
        ValueError: There is neither an indexer nor a list, or no place for index keys.
        TypeError: `attend` cannot be called.
    """
    if not callable(attend):
        raise TypeError(f"attend must be a plan's decode or extend, got {describe(attend)}")
    latent, rows = layer.query_latent(x), layer.kv_rows(x, step.positions)
    # The list comes first: a step that is refused for want of one leaves the cache as it was.
    if indexer is None:
        chosen = _shared(selected, step)
    else:
        chosen = _select(indexer, latent, x, cache, step, parts)
    slots = step.slot_mapping
    if cache.kv.dtype == torch.uint8:
        parts.write(cache.kv, rows, slots, scale_rule=scale_rule, validate=step.validates)
    else:
        write_rows(cache.kv, rows, slots, validate=step.validates)
    indices = parts.convert(
        chosen, step.request_of_row, step.block_table.to(torch.int32), step.page_size
    )
    q_nope, q_pe = layer.queries(latent, step.positions)
    q = absorb_query(q_nope, q_pe, layer.w_uk)
    result = attend(q, cache.kv, indices, softmax_scale=layer.softmax_scale)
    return layer.output(project_values(result.out, layer.w_uv)), chosen


def _shared(
    selected: Int[Tensor, "padded_tokens topk"] | None, step: Step
) -> Int[Tensor, "padded_tokens topk"]:
    """The list of an earlier layer, which must be there and have a row for each new token."""
    if selected is None:
        raise ValueError("selected must hold an earlier layer's list where a layer has no indexer")
    require_integer("selected", selected, "padded_tokens topk")
    require_size("selected", selected, 0, step.positions.shape[0], "one list a new token")
    return selected


def _select(
    indexer: IndexerLayer,
    latent: Float[Tensor, "padded_tokens d_q"],
    x: Float[Tensor, "padded_tokens hidden"],
    cache: SparseCache,
    step: Step,
    parts: SparseParts,
) -> Int[Tensor, "padded_tokens topk"]:
    if cache.index is None:
        raise ValueError("cache.index must be there in a layer with an indexer, got None")
    config = indexer.config
    write_index_keys(
        cache.index,
        indexer.keys(x, step.positions),
        step.slot_mapping,
        scale_rule=config.scale_rule,
        validate=step.validates,
    )
    q, weights = indexer.queries(latent, x, step.positions)
    if step.captured:
        return select_positions_fixed(
            q,
            weights,
            cache.index,
            visible_lens=step.visible_lens,
            request_of_row=step.request_of_row,
            block_table=step.block_table,
            topk=config.topk,
            scale_rule=config.scale_rule,
            score=parts.score,
            select=parts.select,
        )
    chosen = select_positions(
        q[: step.num_tokens],
        weights[: step.num_tokens],
        cache.index,
        **step.batch,
        topk=config.topk,
        scale_rule=config.scale_rule,
        score=parts.score,
        select=parts.select,
    )
    return padded_rows(chosen, step, -1)

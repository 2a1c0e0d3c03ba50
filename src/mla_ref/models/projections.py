"""What a layer must offer so that latent attention can run on it, and the step that runs it."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from mla_ref.attention import (
    absorb_query,
    mla_absorbed_attention,
    mla_expanded_attention,
    project_values,
    sparse_extend,
)
from mla_ref.batching import Step
from mla_ref.cache import write_rows
from mla_ref.checks import require_choice
from mla_ref.indexer import all_positions, positions_to_slots
from mla_ref.numerics import compute_dtype

FORMS = ("expanded", "absorbed")


@runtime_checkable
class LatentProjections(Protocol):
    """The linear maps around latent attention in one layer of a model."""

    @property
    def softmax_scale(self) -> float:
        """Factor on q·k before the softmax."""

    @property
    def w_uk(self) -> Float[Tensor, "h d_n d_c"]:
        """Up-projection from the latent to each head's key."""

    @property
    def w_uv(self) -> Float[Tensor, "h d_v d_c"]:
        """Up-projection from the latent to each head's value."""

    def query_latent(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s d_q"]:
        """What queries are made from: the compressed query, or x itself where there is none."""

    def queries(
        self, latent: Float[Tensor, "s d_q"], positions: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, "s h d_n"], Float[Tensor, "s h d_r"]]:
        """q_nope, and q_pe turned to its position, from the query latent.

        Two steps, because the lightning indexer makes its queries from the same latent.
        """

    def kv_rows(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s d_row"]:
        """The row to cache of each token: [latent d_c | rotary key d_r]."""

    def output(self, heads: Float[Tensor, "s h d_v"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream."""


def attend_latent(
    layer: LatentProjections,
    x: Float[Tensor, "num_tokens hidden"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    step: Step,
    *,
    form: str,
) -> Float[Tensor, "num_tokens hidden"]:
    """One layer's attention over a step: write the new rows, then attend.

    Off the CPU and in a captured step the absorbed form is sparse attention to all keys, because
    rung 6 goes from page to page by numbers of the host.

    Args:
        layer: The layer's linear maps.
        x: Input of the attention (after its norm), one row a new token.
        kv_cache: Rows of this layer; the step's slots are overwritten in place.
        step: The batch.
        form: "expanded" (rung 5) or "absorbed" (rung 6). Both give the same.
    """
    attention = {"expanded": mla_expanded_attention, "absorbed": mla_absorbed_attention}[
        require_choice("form", form, FORMS)
    ]
    rows = layer.kv_rows(x, step.positions)
    write_rows(kv_cache, rows, step.slot_mapping, validate=step.validates)
    q_nope, q_pe = layer.queries(layer.query_latent(x), step.positions)
    if form == "absorbed" and not step.validates:
        return layer.output(_attend_to_all(layer, q_nope, q_pe, kv_cache, step))
    result = attention(
        q_nope[: step.num_tokens],
        q_pe[: step.num_tokens],
        kv_cache,
        layer.w_uk,
        layer.w_uv,
        **step.batch,
        softmax_scale=layer.softmax_scale,
    )
    return layer.output(padded_rows(result.out, step))


def _attend_to_all(
    layer: LatentProjections,
    q_nope: Float[Tensor, "padded_tokens h d_n"],
    q_pe: Float[Tensor, "padded_tokens h d_r"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    step: Step,
) -> Float[Tensor, "padded_tokens h d_v"]:
    """Rung 9 on lists that name every key: as dense, in shapes that the host knows beforehand."""
    table = step.block_table
    positions = all_positions(step.visible_lens, table.shape[1] * step.page_size)
    dtype = compute_dtype(q_nope, kv_cache, layer.w_uk)
    result = sparse_extend(
        absorb_query(q_nope.to(dtype), q_pe.to(dtype), layer.w_uk.to(dtype)),
        kv_cache,
        positions_to_slots(positions, step.request_of_row, table, step.page_size),
        softmax_scale=layer.softmax_scale,
        kv_lora_rank=layer.w_uk.shape[-1],
    )
    return project_values(result.out, layer.w_uv.to(dtype)).to(q_nope.dtype)


def padded_rows(
    rows: Shaped[Tensor, "num_tokens *row"], step: Step, value: int = 0
) -> Shaped[Tensor, "padded_tokens *row"]:
    """The rows of the real tokens with those of the padding behind them, which hold `value`.

    The references of rungs 4 to 8 take ragged batches and know no padding.
    """
    extra = step.num_tokens_padded - step.num_tokens
    return pad(rows, (0, 0) * (rows.ndim - 1) + (0, extra), value=value) if extra else rows

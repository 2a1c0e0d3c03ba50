"""A bug in absorbed attention, as published libraries had it."""

from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import latent_attention
from mla_ref.numerics import AttentionResult


def latent_attention_scaled_by_its_row(
    q: Float[Tensor, "num_tokens h d_row"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
    kv_lora_rank: int,
) -> AttentionResult:
    """BUG: takes `softmax_scale` and uses the default of an ordinary head, d^-0.5 of its own d.

    The d that it sees is 576, the width of the cached row. The model was trained with 192 or 256,
    the numbers that a head compared before the rewriting. Right for a row that sees one key.
    """
    del softmax_scale
    return latent_attention(
        q,
        kv_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        softmax_scale=q.shape[-1] ** -0.5,
        kv_lora_rank=kv_lora_rank,
    )

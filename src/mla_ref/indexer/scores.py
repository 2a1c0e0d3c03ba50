"""Lightning-indexer scores: a cheap guess at which keys a row will attend to.

    I[t, s] = sum over heads j of  w[t, j] * ReLU(q[t, j] · k[s])

(DeepSeek-V3.2 paper, eq. 1.) One index key of 128 numbers serves all index heads. The ReLU stands
before the weighted sum and the weights may be negative, so it changes the ranking: without it the
wrong key can win (transformers#44360), and a score may be below 0, so padding must be -inf.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float, require_same_device, require_size
from mla_ref.numerics import compute_dtype


def index_scores(
    q: Float[Tensor, "rows index_heads d_i"],
    k: Float[Tensor, "s_kv d_i"],
    weights: Float[Tensor, "rows index_heads"],
) -> Float[Tensor, "rows s_kv"]:
    """Score of every key for every row, no mask applied.

    2 * index_heads * 128 operations a key and row, and 132 bytes a key. For GLM-5.2 that is 8,192
    operations, a seventeenth of the 2 * 64 * 1,088 of attending to the key.

    Args:
        q: Index queries, turned by RoPE; dequantised if they were FP8.
        k: Index keys, likewise.
        weights: One factor a head, with index_heads^-0.5 * d_i^-0.5 already in it. float32: in
            bfloat16 keys that differ by 1e-4 change places (sglang#13459).

    Returns:
        float32, or float64 if an input is.
    """
    require_scoring(q, k, weights)
    dtype = compute_dtype(q, k, weights)
    products = torch.relu(q.to(dtype) @ k.to(dtype).T)  # [rows, index_heads, s_kv]
    return torch.einsum("rhs,rh->rs", products, weights.to(dtype))


def require_scoring(q: Tensor, k: Tensor, weights: Tensor) -> None:
    """Raise unless these are arguments of `index_scores`."""
    require_float("q", q, "rows index_heads d_i")
    require_float("k", k, "s_kv d_i")
    require_float("weights", weights, "rows index_heads")
    require_size("k", k, 1, q.shape[2], "as q")
    for dim in (0, 1):
        require_size("weights", weights, dim, q.shape[dim], "as q")
    require_same_device({"q": q, "k": k, "weights": weights})

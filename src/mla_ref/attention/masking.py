"""Who sees what: causal lengths, and sums that a masked value cannot touch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_float,
    require_same_device,
    require_scale,
    require_size,
)


def causal_lens(s_q: int, s_kv: int, device: torch.device | None = None) -> Int[Tensor, " s_q"]:
    """How many keys each query row sees when the last row is the newest token.

    Row i sees the keys 0 .. s_kv - s_q + i: the mask is aligned at the bottom right. Aligned at
    the top left, a one-token decode would see key 0 alone (pytorch#108108). Rows that come before
    the first key see nothing.
    """
    return (torch.arange(s_q, device=device) + (s_kv - s_q + 1)).clamp(min=0)


def visible_mask(
    visible_lens: Int[Tensor, "*rows"], first_key: int, num_keys: int
) -> Bool[Tensor, "*rows num_keys"]:
    """True where a row sees the key, for the keys first_key .. first_key + num_keys - 1."""
    keys = torch.arange(first_key, first_key + num_keys, device=visible_lens.device)
    return keys < visible_lens[..., None]


def grouped(
    x: Float[Tensor, "*batch s h_q d"], h_kv: int
) -> Float[Tensor, "*batch s h_kv group d"]:
    """Split query heads into the groups that share a KV head: head h belongs to h // group."""
    return x.unflatten(-2, (h_kv, x.shape[-2] // h_kv))


def weighted_values(
    weights: Float[Tensor, "*batch s h_kv group t"],
    values: Float[Tensor, "*batch t h_kv d_v"],
    visible: Bool[Tensor, "*batch s t"],
) -> Float[Tensor, "*batch s h_kv group d_v"]:
    """Sum of weight times value, in which a value that a row may not see is never multiplied.

    Its weight is 0, but 0 * NaN is NaN: one uninitialised row of a cache would poison every query
    before it (flash-attention#1745, flashinfer#941). It shows in the result. Only then finite
    values go through one product, and a token with a value that is not finite is added to the rows
    that see it alone.
    """
    out = torch.einsum("...shgt,...thd->...shgd", weights, values)
    if out.isfinite().all():
        return out
    dirty = ~values.isfinite().all(dim=-1).all(dim=-1)
    clean = torch.where(dirty[..., None, None], 0.0, values)
    out = torch.einsum("...shgt,...thd->...shgd", weights, clean)
    for token in dirty.reshape(-1, dirty.shape[-1]).any(dim=0).nonzero().flatten().tolist():
        held_back = torch.where(dirty[..., token, None, None], values[..., token, :, :], 0.0)
        product = weights[..., token, None] * held_back[..., None, :, None, :]
        seen = visible[..., token, None, None, None]
        out = out + torch.where(seen, product, 0.0)
    return out


def require_qkv(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, batch: str = "") -> None:
    """Raise unless q [s_q, h_q, d_qk], k [s_kv, h_kv, d_qk] and v [s_kv, h_kv, d_v] fit."""
    require_float("q", q, f"{batch} s_q h_q d_qk".strip())
    require_float("k", k, f"{batch} s_kv h_kv d_qk".strip())
    require_float("v", v, f"{batch} s_kv h_kv d_v".strip())
    require_same_device({"q": q, "k": k, "v": v})
    require_scale("softmax_scale", softmax_scale)
    require_size("k", k, -1, q.shape[-1], "as q")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the tokens and heads of k, got {describe(v)} beside {describe(k)}"
        )
    if batch:
        require_size("k", k, 0, q.shape[0], "the batch of q")
    require_heads(q.shape[-2], k.shape[-2])


def require_heads(h_q: int, h_kv: int) -> None:
    """Raise a ValueError unless each KV head serves the same number of query heads."""
    if h_q == 0 or h_kv == 0 or h_q % h_kv:
        raise ValueError(f"q has {h_q} heads, which must be a multiple of the {h_kv} KV heads")


def require_visible_lens(
    visible_lens: Tensor | None, shape: tuple[int, ...], s_kv: int, device: torch.device
) -> Int[Tensor, "*rows"]:
    """The causal lengths, or the caller's own, which must lie in 0 .. s_kv."""
    if visible_lens is None:
        return causal_lens(shape[-1], s_kv, device).expand(shape)
    if not isinstance(visible_lens, Tensor) or visible_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"visible_lens must be an int32 or int64 tensor, got {describe(visible_lens)}"
        )
    if visible_lens.shape != shape:
        raise ValueError(
            f"visible_lens must have the shape {list(shape)}, one length a query row, "
            f"got {describe(visible_lens)}"
        )
    if visible_lens.numel() and (visible_lens.min() < 0 or visible_lens.max() > s_kv):
        raise ValueError(
            f"visible_lens must lie in 0 .. {s_kv} (the keys there are), got "
            f"{int(visible_lens.min())} .. {int(visible_lens.max())}"
        )
    return visible_lens

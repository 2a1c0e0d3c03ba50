"""Wrong answers to the exercises of lesson 06, each with the case that must catch it."""

import math

import torch


def _parts(kv_rows, kv_b, num_heads):
    d_c = kv_b.shape[1]
    both = (kv_rows[:, :d_c] @ kv_b.T).unflatten(-1, (num_heads, -1))
    return both, kv_rows[:, None, d_c:].expand(-1, num_heads, -1)


def value_first(kv_rows, kv_b, num_heads, nope_dim):
    both, k_pe = _parts(kv_rows, kv_b, num_heads)
    v, k_nope = both.tensor_split([both.shape[-1] - nope_dim], dim=-1)
    return torch.cat([k_nope, k_pe], dim=-1), v


def rotary_key_first(kv_rows, kv_b, num_heads, nope_dim):
    both, k_pe = _parts(kv_rows, kv_b, num_heads)
    return torch.cat([k_pe, both[..., :nope_dim]], dim=-1), both[..., nope_dim:]


def row_read_from_the_wrong_end(kv_rows, kv_b, num_heads, nope_dim):
    d_r = kv_rows.shape[1] - kv_b.shape[1]
    moved = torch.cat([kv_rows[:, d_r:], kv_rows[:, :d_r]], dim=1)
    both, k_pe = _parts(moved, kv_b, num_heads)
    return torch.cat([both[..., :nope_dim], k_pe], dim=-1), both[..., nope_dim:]


def no_rotary_part(kv_rows, kv_b, num_heads, nope_dim):
    both, _ = _parts(kv_rows, kv_b, num_heads)
    return both[..., :nope_dim], both[..., nope_dim:]


def keys_of_all_heads_first(kv_rows, kv_b, num_heads, nope_dim):
    d_c = kv_b.shape[1]
    both = kv_rows[:, :d_c] @ kv_b.T
    k_nope, v = (
        part.unflatten(-1, (num_heads, -1))
        for part in both.tensor_split([num_heads * nope_dim], dim=-1)
    )
    return torch.cat([k_nope, _parts(kv_rows, kv_b, num_heads)[1]], dim=-1), v


def as_wide_as_the_key(kv_rows, kv_b, num_heads, nope_dim):
    both, k_pe = _parts(kv_rows, kv_b, num_heads)
    return torch.cat([both[..., :nope_dim], k_pe], dim=-1), both[..., nope_dim : 2 * nope_dim]


def counts_from_the_end(kv_rows, kv_b, num_heads, nope_dim):
    """A width of 0 counted from the end is the whole row."""
    d_r = kv_rows.shape[1] - kv_b.shape[1]
    both, _ = _parts(kv_rows, kv_b, num_heads)
    k_pe = kv_rows[:, None, -d_r:].expand(-1, num_heads, -1)
    return torch.cat([both[..., :nope_dim], k_pe], dim=-1), both[..., nope_dim:]


def token_by_token(kv_rows, kv_b, num_heads, nope_dim):
    rows = []
    for row in kv_rows:
        both, k_pe = _parts(row[None], kv_b, num_heads)
        rows.append((torch.cat([both[..., :nope_dim], k_pe], dim=-1), both[..., nope_dim:]))
    k, v = zip(*rows, strict=True)
    return torch.cat(k), torch.cat(v)


def mscale(factor, weight):
    return 0.1 * weight * math.log(factor) + 1


def without_positions(nope_dim, rope_dim, factor, mscale_all_dim):
    return nope_dim**-0.5 * mscale(factor, mscale_all_dim) ** 2


def left_out(nope_dim, rope_dim, factor, mscale_all_dim):
    return (nope_dim + rope_dim) ** -0.5


def not_squared(nope_dim, rope_dim, factor, mscale_all_dim):
    return (nope_dim + rope_dim) ** -0.5 * mscale(factor, mscale_all_dim)


def weight_of_1(nope_dim, rope_dim, factor, mscale_all_dim):
    return (nope_dim + rope_dim) ** -0.5 * mscale(factor, 1.0) ** 2


def negative_logarithm(nope_dim, rope_dim, factor, mscale_all_dim):
    return (nope_dim + rope_dim) ** -0.5 * mscale(factor, mscale_all_dim) ** 2


def a_tensor(nope_dim, rope_dim, factor, mscale_all_dim):
    return torch.tensor(left_out(nope_dim, rope_dim, factor, mscale_all_dim))


WRONG_06 = [
    ("06-up-project", value_first, "one token and head", "k at [0, 0, 0] is 10, expected 3"),
    ("06-up-project", rotary_key_first, "one token and head", "is 7, expected 3"),
    ("06-up-project", row_read_from_the_wrong_end, "one token and head", "k at"),
    ("06-up-project", no_rotary_part, "one token and head", "of shape [1, 1, 2]"),
    ("06-up-project", keys_of_all_heads_first, "five tokens, three heads", "head"),
    ("06-up-project", as_wide_as_the_key, "values wider than keys", "of shape [5, 2, 6]"),
    ("06-up-project", counts_from_the_end, "no rotary key", "of shape [4, 2, 3]"),
    ("06-up-project", token_by_token, "no tokens", "it raised ValueError"),
    ("06-softmax-scale", without_positions, "GLM-5.2", "0.0721688, expected 0.0625"),
    ("06-softmax-scale", left_out, "DeepSeek-V3.2", "0.0721688, expected 0.135234"),
    ("06-softmax-scale", not_squared, "DeepSeek-V3.2", "expected 0.135234"),
    ("06-softmax-scale", weight_of_1, "DeepSeek-V2-Lite", "0.135234, expected 0.114721"),
    ("06-softmax-scale", negative_logarithm, "a factor of 0.5", "expected 0.0721688"),
    ("06-softmax-scale", a_tensor, "GLM-5.2", "expected a float"),
]

# A case that repeats what others prove, in the words of attention.
REPEATS_06 = {("06-up-project", "attention equals that of merged weights")}

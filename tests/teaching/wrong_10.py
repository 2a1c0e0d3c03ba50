"""Wrong answers to the exercise of lesson 10, each with the case that must catch it."""

import torch

from mla_ref.teaching import planted


def attend(q, kv, indices, scale, d_v, valid=None, zero=True):
    """The right answer, with one thing changed by each of its callers."""
    if kv.shape[0] == 0 or indices.shape[1] == 0:
        return q.new_zeros(*q.shape[:2], d_v), q.new_full(q.shape[:2], -torch.inf)
    inside = (indices >= 0) & (indices < kv.shape[0])
    valid = inside if valid is None else valid
    rows = kv[torch.where(inside, indices, 0).long()]
    rows = torch.where(valid[..., None], rows, 0.0) if zero else rows
    scores = (torch.einsum("rhd,rkd->rhk", q, rows) * scale).masked_fill(
        ~valid[:, None], -torch.inf
    )
    lse = scores.logsumexp(dim=-1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.einsum("rhk,rkd->rhd", (scores - anchor[..., None]).exp(), rows[..., :d_v]), lse


def value_as_wide_as_the_key(q, kv, indices, softmax_scale, d_v):
    return attend(q, kv, indices, softmax_scale, kv.shape[1])


def base_2(q, kv, indices, softmax_scale, d_v):
    out, lse = attend(q, kv, indices, softmax_scale, d_v)
    return out, lse / torch.log(torch.tensor(2.0))


def first_list_for_all(q, kv, indices, softmax_scale, d_v):
    return attend(q, kv, indices[:1].expand_as(indices), softmax_scale, d_v)


def minus_one_is_a_row(q, kv, indices, softmax_scale, d_v):
    """Python's kv[-1], with its weight."""
    return attend(q, kv, indices % kv.shape[0], softmax_scale, d_v)


def none_is_0(q, kv, indices, softmax_scale, d_v):
    return attend(q, kv, indices.clamp(min=0), softmax_scale, d_v)


def ends_at_the_first_none(q, kv, indices, softmax_scale, d_v):
    inside = (indices >= 0) & (indices < kv.shape[0])
    return attend(q, kv, indices, softmax_scale, d_v, inside.int().cumprod(1).bool())


def plain_softmax(q, kv, indices, softmax_scale, d_v):
    rows = kv[indices.clamp(min=0).long()]
    scores = (torch.einsum("rhd,rkd->rhk", q, rows) * softmax_scale).masked_fill(
        (indices < 0)[:, None], -torch.inf
    )
    out = torch.einsum("rhk,rkd->rhd", scores.softmax(dim=-1), rows[..., :d_v])
    return out, scores.logsumexp(dim=-1)


def as_a_mask(q, kv, indices, softmax_scale, d_v):
    rows, slots = indices.shape[0], kv.shape[0]
    column = torch.where((indices < 0) | (indices >= slots), slots, indices).long()
    mask = torch.zeros(rows, slots + 1, dtype=torch.bool).scatter_(1, column, True)[:, :slots]
    every = torch.arange(slots).expand(rows, -1)
    return attend(q, kv, every, softmax_scale, d_v, mask)


def only_minus_one_is_none(q, kv, indices, softmax_scale, d_v):
    return attend(q, kv, indices, softmax_scale, d_v, indices != -1)


def masks_the_score_only(q, kv, indices, softmax_scale, d_v):
    return attend(q, kv, indices, softmax_scale, d_v, zero=False)


def reads_before_the_cache(q, kv, indices, softmax_scale, d_v):
    inside = torch.where((indices < 0) | (indices >= len(kv)), -1, indices)
    function = planted.sparse_extend_reading_before_the_cache
    return tuple(function(q, kv[:, None], inside, softmax_scale=softmax_scale, kv_lora_rank=d_v))


def takes_the_highest_score(q, kv, indices, softmax_scale, d_v):
    """The maximum of no scores does not exist."""
    inside = (indices >= 0) & (indices < kv.shape[0])
    if len(kv) == 0:
        return attend(q, kv, indices, softmax_scale, d_v)
    rows = torch.where(inside[..., None], kv[torch.where(inside, indices, 0).long()], 0.0)
    scores = (torch.einsum("rhd,rkd->rhk", q, rows) * softmax_scale).masked_fill(
        ~inside[:, None], -torch.inf
    )
    highest = scores.amax(dim=-1)
    anchor = torch.where(highest == -torch.inf, 0.0, highest)
    weights = (scores - anchor[..., None]).exp()
    total = weights.sum(dim=-1)
    out = torch.einsum("rhk,rkd->rhd", weights, rows[..., :d_v])
    return out / torch.where(total == 0, 1.0, total)[..., None], total.log() + anchor


ID = "10-sparse-attention"
WRONG_10 = [
    (ID, value_as_wide_as_the_key, "one row, two slots", "shape [1, 1, 2]"),
    (ID, base_2, "one row, two slots", "lse at [0, 0] is 1.58496, expected 1.09861"),
    (ID, first_list_for_all, "three rows with lists", "lse at"),
    (ID, minus_one_is_a_row, "lists of all keys", "lse at"),
    (ID, none_is_0, "lists of all keys", "lse at"),
    (ID, ends_at_the_first_none, "-1 first, last and between", "lse at"),
    (ID, plain_softmax, "rows without any entry", "NaN"),
    (ID, as_a_mask, "a slot listed twice", "lse at"),
    (ID, only_minus_one_is_none, "indices beyond the cache", "lse at"),
    (ID, masks_the_score_only, "NaN and inf in the first", "NaN"),
    (ID, reads_before_the_cache, "NaN and inf in the first", "NaN"),
    (ID, takes_the_highest_score, "lists of width 0", "it raised"),
]

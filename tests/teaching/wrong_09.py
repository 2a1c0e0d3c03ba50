"""Wrong answers to the exercises of lesson 09, each with the case that must catch it."""

import torch

from mla_ref.teaching import planted


def relu_after_the_sum(q, k, weights):
    products = torch.einsum("rhd,sd->rhs", q, k)
    return torch.einsum("rhs,rh->rs", products, weights).relu()


def size_of_the_weights(q, k, weights):
    """Takes weights for positive."""
    return torch.einsum("rhs,rh->rs", (q @ k.T).relu(), weights.abs())


def weights_of_the_first_row(q, k, weights):
    return torch.einsum("rhs,h->rs", (q @ k.T).relu(), weights[0])


def in_the_dtype_of_q(q, k, weights):
    products = torch.einsum("rhd,sd->rhs", q, k).relu()
    return torch.einsum("rhs,rh->rs", products, weights).float()


def key_by_key(q, k, weights):
    columns = [((q @ key).relu() * weights).float().sum(dim=1) for key in k.float()]
    return torch.stack(columns, dim=1)


def key_by_key_in_float(q, k, weights):
    return key_by_key(q.float(), k, weights)


def topk(scores, lens, k, *, dtype=torch.int32):
    positions = torch.arange(scores.shape[1])
    unfit = (positions >= lens[:, None]) | scores.isnan()
    order = torch.sort(scores.masked_fill(unfit, -torch.inf), dim=1, descending=True, stable=True)
    best = order.indices[:, :k].masked_fill(order.values[:, :k] == -torch.inf, -1)
    return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1).to(dtype)


def in_int64(scores, visible_lens, k):
    return topk(scores, visible_lens, k, dtype=torch.int64)


def in_order_of_position(scores, visible_lens, k):
    return topk(scores, visible_lens, k).sort(dim=1).values


def not_causal(scores, visible_lens, k):
    return topk(scores, torch.full_like(visible_lens, scores.shape[1]), k)


def one_key_too_many(scores, visible_lens, k):
    return topk(scores, visible_lens + 1, k)


def cut_to_the_keys(scores, visible_lens, k):
    return topk(scores, visible_lens, min(k, scores.shape[1]))


def padded_with_0(scores, visible_lens, k):
    return topk(scores, visible_lens, k).clamp(min=0)


def ties_to_the_higher_position(scores, visible_lens, k):
    width = scores.shape[1]
    flipped = scores.masked_fill(torch.arange(width) >= visible_lens[:, None], -torch.inf).flip(1)
    found = topk(flipped, torch.full_like(visible_lens, width), k)
    return torch.where(found < 0, -1, width - 1 - found)


def positive_scores_only(scores, visible_lens, k):
    return topk(scores.masked_fill(scores <= 0, -torch.inf), visible_lens, k)


def clamps_infinities(scores, visible_lens, k):
    return topk(scores.clamp(-1e30, 1e30), visible_lens, k)


def nan_as_0(scores, visible_lens, k):
    return topk(torch.where(scores.isnan(), 0.0, scores), visible_lens, k)


def row_by_row(scores, visible_lens, k):
    lists = [topk(scores[i : i + 1], visible_lens[i : i + 1], k) for i in range(len(scores))]
    return torch.cat(lists)


BY_HAND = "two heads, two keys, by hand"
WRONG_09 = [
    ("09-index-scores", planted.index_scores_without_relu, BY_HAND, "is -4, expected 1"),
    ("09-index-scores", relu_after_the_sum, BY_HAND, "expected 1"),
    ("09-index-scores", size_of_the_weights, "a negative weight", "is 1, expected -1"),
    ("09-index-scores", weights_of_the_first_row, "three rows of four heads", "the score at [1"),
    ("09-index-scores", in_the_dtype_of_q, "bfloat16 inputs", "the score at"),
    ("09-index-scores", key_by_key, "bfloat16 inputs", "it raised"),
    ("09-index-scores", key_by_key_in_float, "no keys yet", "it raised"),
    ("09-topk", in_int64, "one row, by hand", "int64 tensor"),
    ("09-topk", positive_scores_only, "hundreds of scores", "has -1 at place 10"),
    ("09-topk", in_order_of_position, "three rows of a causal", "[0, 1], expected [1, 0]"),
    ("09-topk", not_causal, "three rows of a causal", "row 0"),
    ("09-topk", one_key_too_many, "three rows of a causal", "row 0"),
    ("09-topk", padded_with_0, "fewer visible keys than k", "[1, 0, 0], expected [1, 0, -1]"),
    ("09-topk", planted.select_topk_unchecked, "fewer visible keys than k", "row 0"),
    ("09-topk", cut_to_the_keys, "fewer keys than k", "shape [1, 2]"),
    ("09-topk", ties_to_the_higher_position, "hundreds of scores", "row 0"),
    ("09-topk", clamps_infinities, "-inf and +inf", "row 0"),
    ("09-topk", nan_as_0, "NaN among", "expected [3, 1, -1]"),
    ("09-topk", row_by_row, "no rows", "it raised"),
]

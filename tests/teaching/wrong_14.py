"""Wrong answers to the exercise of lesson 14, each with the case that must catch it."""

import torch


def step(
    highest, total, acc, codes, scales, scores, listed, *,
    mask=True, zeros=True, rescale_acc=True, sum_scaled=False, guard=True, mask_late=False,
    quotients=False,
):  # fmt: skip
    """The right answer, with parts that its callers leave out."""
    some = listed[:, None]
    if zeros:
        codes, scales = torch.where(some, codes, 0.0), torch.where(listed, scales, 0.0)
    shown = torch.where(some, scores, -torch.inf) if mask else scores
    above = torch.maximum(highest, (scores if mask_late else shown).amax(dim=0))
    anchor = torch.where(above == -torch.inf, 0.0, above) if guard else above
    shrink, weights = torch.exp(highest - anchor), torch.exp(shown - anchor)
    if quotients:
        shrink, weights = highest.exp() / anchor.exp(), shown.exp() / anchor.exp()
    scaled = weights * scales[:, None]
    total = total * shrink + (scaled if sum_scaled else weights).sum(dim=0)
    return above, total, acc * (shrink if rescale_acc else 1.0) + codes.T @ scaled


def along_the_heads(highest, total, acc, codes, scales, scores, listed):
    above = scores.amax(dim=1)
    weights = torch.exp(scores - above[:, None])
    return above, weights.sum(dim=1), codes.T @ weights


def keeps_the_old_sum_of_values(*args):
    return step(*args, rescale_acc=False)


def forgets_the_scale(highest, total, acc, codes, scales, scores, listed):
    return step(highest, total, acc, codes, torch.ones_like(scales), scores, listed)


def sums_scaled_weights(*args):
    return step(*args, sum_scaled=True)


def takes_all(*args):
    return step(*args, mask=False)


def masks_behind_the_maximum(*args):
    return step(*args, mask_late=True)


def trusts_a_weight_of_0(*args):
    return step(*args, zeros=False)


def without_a_guard(*args):
    return step(*args, guard=False)


def starts_again(highest, total, acc, codes, scales, scores, listed):
    """Takes a tile of -1 for the beginning."""
    if not listed.any() and highest.isfinite().all():
        return highest, total * 0, acc * 0
    return step(highest, total, acc, codes, scales, scores, listed)


def divides_exponentials(*args):
    return step(*args, quotients=True)


def finite_maximum(*args):
    above, total, acc = step(*args)
    return above.clamp(min=-1e30), total, acc


ID = "14-add-tile"
WRONG_14 = [
    (ID, along_the_heads, "one tile of five", "highest is a float32 tensor"),
    (ID, keeps_the_old_sum_of_values, "a second tile", "acc"),
    (ID, forgets_the_scale, "scales from", "acc"),
    (ID, sums_scaled_weights, "scales from", "total"),
    (ID, takes_all, "two entries of -1", "total"),
    (ID, masks_behind_the_maximum, "-1 with the highest", "is 0, expected"),
    (ID, trusts_a_weight_of_0, "NaN where nothing", "NaN"),
    (ID, without_a_guard, "a tile of -1 alone", "NaN"),
    (ID, starts_again, "a real tile, then", "total"),
    (ID, divides_exponentials, "scores of 1,000", "NaN"),
    (ID, finite_maximum, "a list of -1", "expected -inf"),
]

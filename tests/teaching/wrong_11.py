"""Wrong answers to the exercises of lesson 11, each with the case that must catch it."""

import torch


def counts_all(accepted):
    return accepted.long().sum(dim=1)


def counts_the_token_behind(accepted):
    return accepted.long().cumprod(dim=1).sum(dim=1) + 1


def first_that_failed(accepted):
    """argmin of a row without a False is 0."""
    return accepted.long().argmin(dim=1)


def one_at_least(accepted):
    return accepted.long().cumprod(dim=1).sum(dim=1).clamp(min=1)


def the_least_for_all(accepted):
    """A server that moves its whole batch in step."""
    lengths = accepted.long().cumprod(dim=1).sum(dim=1)
    return lengths.min().expand(len(lengths)) if len(lengths) else lengths


def needs_a_draft(accepted):
    first = accepted.long().argmin(dim=1)
    return torch.where(accepted.all(dim=1), accepted.shape[1], first)


def needs_a_request(accepted):
    return torch.stack([row.long().cumprod(dim=0).sum() for row in accepted])


def right(p, q, draft, u, e):
    """The right answer, for its callers to spoil."""
    if q[draft] > 0 and p[draft] / q[draft] >= u:
        return draft, True
    weights = (p - q).clamp(min=0)
    weights = weights if weights.any() else p
    return int((weights / e).argmax()), False


def recovered(weights, e):
    return int((weights / e).argmax()), False


def takes_p_for_the_ratio(p, q, draft, u, e):
    """Right for a drafter that does not sample."""
    return (draft, True) if p[draft] >= u else recovered((p - q).clamp(min=0), e)


def gives_a_tensor(p, q, draft, u, e):
    token, accepted = right(p, q, draft, u, e)
    return torch.tensor(token), accepted


def strictly_above(p, q, draft, u, e):
    if p[draft] / q[draft] > u:
        return draft, True
    return recovered((p - q).clamp(min=0), e)


def accepts_all(p, q, draft, u, e):
    """A constant in place of u (vllm-ascend#13766)."""
    return draft, True


def draws_from_p_again(p, q, draft, u, e):
    return (draft, True) if p[draft] / q[draft] >= u else recovered(p, e)


def residual_at_the_draft(p, q, draft, u, e):
    if p[draft] / q[draft] >= u:
        return draft, True
    weights = p.clone()
    weights[draft] = max(float(p[draft] - q[draft]), 0.0)
    return recovered(weights, e)


def the_likeliest_of_the_rest(p, q, draft, u, e):
    if p[draft] / q[draft] >= u:
        return draft, True
    return int((p - q).argmax()), False


def trusts_q(p, q, draft, u, e):
    return (draft, True) if p[draft] / q[draft] >= u else right(p, q, draft, u, e)


def nothing_left_is_token_0(p, q, draft, u, e):
    if q[draft] > 0 and p[draft] / q[draft] >= u:
        return draft, True
    return recovered((p - q).clamp(min=0), e)


def first_of_the_race_whatever_its_weight(p, q, draft, u, e):
    token, accepted = right(p, q, draft, u, e)
    if accepted or not (p > q).any():
        return token, accepted
    return int(torch.where(p > q, e, torch.inf).argmin()), False


LENGTH, JUDGE = "11-accept-length", "11-accept-or-recover"
WRONG_11 = [
    (LENGTH, counts_the_token_behind, "all four pass", "is [5], expected [4]"),
    (LENGTH, first_that_failed, "all four pass", "is [0], expected [4]"),
    (LENGTH, counts_all, "one fails, and two pass", "is [3], expected [1]"),
    (LENGTH, one_at_least, "none passes", "is [1], expected [0]"),
    (LENGTH, the_least_for_all, "four requests", "is [0, 0, 0, 0], expected [2, 1, 3, 0]"),
    (LENGTH, needs_a_draft, "nobody has a draft", "it raised"),
    (LENGTH, needs_a_request, "no request", "it raised"),
    (JUDGE, takes_p_for_the_ratio, "the target likes the draft better", "expected (0, True)"),
    (JUDGE, gives_a_tensor, "the target likes the draft better", "token is"),
    (JUDGE, strictly_above, "u exactly p / q", "expected (0, True)"),
    (JUDGE, accepts_all, "u just above p / q", "is (0, True), expected (1, False)"),
    (JUDGE, draws_from_p_again, "u just above p / q", "is (0, False), expected (1, False)"),
    (JUDGE, residual_at_the_draft, "what is recovered", "is (0, False), expected (1, False)"),
    (JUDGE, the_likeliest_of_the_rest, "a race between two", "expected (2, False)"),
    (JUDGE, trusts_q, "a draft that its own law", "is (0, True), expected (0, False)"),
    (JUDGE, nothing_left_is_token_0, "a rejection where p and q", "is (0, False)"),
    (JUDGE, first_of_the_race_whatever_its_weight, "2,000 drafts", "expected p [0.1, 0.2, 0.3"),
]

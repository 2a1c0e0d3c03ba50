"""Bugs in judging drafts, as published libraries had them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.speculative.rejection import accept_drafts, race, recovery_weights
from mla_ref.speculative.walk import Verified, by_request, first_tokens, judged_drafts, walk


def rejection_sample_counting_all(
    target_probs: Float[Tensor, "rows vocab"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    draft_ids: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"] | None,
    uniform: Float[Tensor, " rows"],
    exponential: Float[Tensor, "rows vocab"],
    max_drafts: int,
) -> Verified:
    """BUG: counts all accepted drafts, not those before the first rejection.

    Right for one draft, and wherever no draft behind a rejected one happens to pass. A draft that
    passes there followed a token that is not in the text.
    """
    drafts = judged_drafts(draft_ids, query_start_loc, max_drafts, target_probs.shape[1])
    accepted = accept_drafts(target_probs, drafts, draft_probs, uniform)
    recovered = race(recovery_weights(target_probs, drafts, draft_probs), exponential)
    num_accepted = by_request(accepted.long(), query_start_loc, max_drafts, 0).sum(dim=1)
    tokens = torch.where(accepted, drafts, recovered)
    return Verified(
        first_tokens(tokens, num_accepted + 1, query_start_loc, max_drafts), num_accepted
    )


def rejection_sample_residual_at_the_draft(
    target_probs: Float[Tensor, "rows vocab"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    draft_ids: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"],
    uniform: Float[Tensor, " rows"],
    exponential: Float[Tensor, "rows vocab"],
    max_drafts: int,
) -> Verified:
    """BUG: recovers from p less q at the drafted token only, p elsewhere.

    Right where q is one-hot, since there is no elsewhere. Else a token that the drafter likes is
    recovered as often as if it had never been drafted, and comes out too often.
    """
    drafts = judged_drafts(draft_ids, query_start_loc, max_drafts, target_probs.shape[1])
    accepted = accept_drafts(target_probs, drafts, draft_probs, uniform)
    x = drafts.clamp(min=0)[:, None]
    covered = torch.where(drafts[:, None] >= 0, draft_probs.gather(1, x), 0.0)
    weights = (target_probs.scatter_add(1, x, -covered)).clamp(min=0)
    tokens = torch.where(accepted, drafts, race(weights, exponential))
    return walk(accepted, tokens, query_start_loc, max_drafts)

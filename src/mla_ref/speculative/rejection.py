"""The rejection rule: drafts are judged so that the result has the target's law, whoever drafted.

At each place the target has a law p and the drafter drew x from a law q. x is kept with probability
min(1, p(x) / q(x)); else a token is drawn from what q covers too little, max(p - q, 0). What comes
out has the law p exactly (Leviathan et al. 2023, Chen et al. 2023). The first rejection ends the
walk: later drafts followed a token that is not there. If all stand, the last row gives one more.

Tensors in, tensors out: no value is read back to the host and no shape depends on a value, so a
step can be captured, and a GPU kernel has this to be checked against.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)
from mla_ref.speculative.walk import Verified, judged_drafts, walk


def rejection_sample(
    target_probs: Float[Tensor, "rows vocab"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    draft_ids: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"] | None,
    uniform: Float[Tensor, " rows"],
    exponential: Float[Tensor, "rows vocab"],
    max_drafts: int,
) -> Verified:
    """Judge the drafts of a batch and draw one token more for each request.

    A request has a row for each draft and one more: row i has the target's law after i drafts and
    judges draft i. A row without a draft draws from p itself, which is plain sampling and ends the
    walk: the bonus of a request whose drafts all stand, and all there is without drafts. A
    request with no rows (padding) gets -1 and 0, and rows past the last request are not looked at.

    Without drafts the token is argmax p / E. With a draft rejected at place 0 it is
    argmax max(p - q, 0) / E with the same E: the token may differ. Only together with the accepted
    drafts do the recovered ones have the law p.

    Args:
        target_probs: p of each row. One-hot rows make the rule the greedy walk. NaN and inf
            count as 0; a row without any mass gives some id of the vocabulary.
        query_start_loc: First row of each request, and the end of the last one.
        draft_ids: The draft that each row judges, -1 for none. Read as -1: a request's last row, a
            row behind max_drafts, and an id outside the vocabulary.
        draft_probs: q of each row, the law that its draft was sampled from. None: drafts were
            chosen and not sampled, so q is one-hot at the draft: x is kept with probability p(x).
            A row with NaN, inf or a negative number is no law; its draft is rejected and the token
            drawn from p. Rows without a draft are not looked at.
        uniform: In (0, 1], float64: a float32 generator gives 0 once in 2**24 draws.
        exponential: Exp(1) draws, above 0. A row each and not a request each: E belongs to the
            output position, so that it does not depend on where a step began.
        max_drafts: Most drafts a request.

    Returns:
        token_ids int64 [b, max_drafts + 1] and num_accepted int64 [b].
    """
    require_judged(
        target_probs, query_start_loc, draft_ids, draft_probs, uniform, exponential, max_drafts
    )
    p = torch.where((target_probs > 0) & (target_probs < torch.inf), target_probs, 0.0)
    drafts = judged_drafts(draft_ids, query_start_loc, max_drafts, p.shape[1])
    accepted = accept_drafts(p, drafts, draft_probs, uniform)
    recovered = race(recovery_weights(p, drafts, draft_probs), exponential)
    tokens = torch.where(accepted, drafts, recovered)
    return walk(accepted, tokens, query_start_loc, max_drafts)


def accept_drafts(
    p: Float[Tensor, "rows vocab"],
    drafts: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"] | None,
    uniform: Float[Tensor, " rows"],
) -> Bool[Tensor, " rows"]:
    """Whether q(x) > 0 and p(x) / q(x) >= u, each draft by its own row; False without a draft."""
    # Pairwise: p[:, drafts] would be rows x rows (TensorRT-LLM#6542).
    x = drafts.clamp(min=0)[:, None]
    p_x = p.gather(1, x)[:, 0].double()
    if draft_probs is None:
        return (drafts >= 0) & (p_x >= uniform)
    q_x = draft_probs.gather(1, x)[:, 0].double()
    lawful = _is_law(draft_probs) & (q_x > 0)
    return (drafts >= 0) & lawful & (p_x / torch.where(lawful, q_x, 1.0) >= uniform)


def recovery_weights(
    p: Float[Tensor, "rows vocab"],
    drafts: Int[Tensor, " rows"],
    draft_probs: Float[Tensor, "rows vocab"] | None,
) -> Float[Tensor, "rows vocab"]:
    """What a row draws from if its draft is not accepted; weights, not normalised.

    max(p - q, 0) over the whole vocabulary, or p where the row has no draft, where q is no law, and
    where nothing is left: p == q up to rounding, of which a rejection has no right answer.
    """
    drafted = (drafts >= 0)[:, None]
    if draft_probs is None:
        x = drafts.clamp(min=0)[:, None]
        weights = p.scatter(1, x, 0.0)
    else:
        # Never NaN - NaN and then argmax of nothing, which is 0 (vllm#41834).
        drafted = drafted & _is_law(draft_probs)[:, None]
        weights = (p - draft_probs).clamp(min=0)
    left = (weights > 0).any(dim=1, keepdim=True)
    return torch.where(drafted & left, weights, p)


def race(
    weights: Float[Tensor, "rows vocab"], exponential: Float[Tensor, "rows vocab"]
) -> Int[Tensor, " rows"]:
    """The argmax of weights / E: who arrives first at time E / w, v with probability w_v / sum w.

    A token of weight 0 is never first, not even where all quotients underflow to 0. Equal quotients
    go to the lower id. Without any weight it is id 0.
    """
    return torch.where(weights > 0, weights / exponential, -1.0).argmax(dim=1)


def _is_law(draft_probs: Float[Tensor, "rows vocab"]) -> Bool[Tensor, " rows"]:
    return ((draft_probs >= 0) & (draft_probs < torch.inf)).all(dim=1)


def require_judged(
    target_probs: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    uniform: Tensor,
    exponential: Tensor,
    max_drafts: int,
) -> None:
    """Raise unless these are arguments of `rejection_sample`."""
    require_count("max_drafts", max_drafts)
    require_float("target_probs", target_probs, "rows vocab")
    require_integer("query_start_loc", query_start_loc, "b_plus_1")
    require_integer("draft_ids", draft_ids, "rows")
    require_float("uniform", uniform, "rows")
    require_float("exponential", exponential, "rows vocab")
    rows, vocab = target_probs.shape
    if not query_start_loc.numel():
        raise ValueError("query_start_loc must have one entry more than requests, got none")
    if not vocab:
        raise ValueError(f"target_probs must have at least one token, got {describe(target_probs)}")
    if uniform.dtype != torch.float64:
        raise TypeError(f"uniform must be float64, got {describe(uniform)}")
    tensors = {"draft_ids": draft_ids, "uniform": uniform, "exponential": exponential}
    if draft_probs is not None:
        tensors["draft_probs"] = require_float("draft_probs", draft_probs, "rows vocab")
    for name, tensor in tensors.items():
        require_size(name, tensor, 0, rows, "one a row of target_probs")
        if tensor.ndim == 2:
            require_size(name, tensor, 1, vocab, "as target_probs")
    require_same_device(
        {"target_probs": target_probs, "query_start_loc": query_start_loc} | tensors
    )

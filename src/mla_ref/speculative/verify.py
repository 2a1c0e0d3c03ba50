"""One step of the verifier as an engine calls it: logits and lists in, new tokens out."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mla_ref.checks import describe, require_count, require_float, require_size
from mla_ref.speculative.noise import position_noise
from mla_ref.speculative.rejection import rejection_sample
from mla_ref.speculative.sampling import (
    SamplingParams,
    require_finite,
    require_params,
    require_vocabulary,
    target_probs,
)
from mla_ref.speculative.walk import Verified


class NewTokens(NamedTuple):
    """What a step adds to the requests.

    Attributes:
        token_ids: Of each request: its accepted drafts and one token more.
        num_accepted: Of each request: the drafts among them.
    """

    token_ids: list[list[int]]
    num_accepted: list[int]


def verify(
    logits: Float[Tensor, "rows vocab"],
    draft_ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    draft_probs: Float[Tensor, "rows vocab"] | None = None,
    *,
    validate: bool = True,
    sampler: Callable[..., Verified] = rejection_sample,
) -> NewTokens:
    """Judge the drafts of each request and draw one token more; without drafts, plain sampling.

    What a request gets depends on its own logits, drafts, seed and positions: not on its
    neighbours, nor on its place in the batch. If all are greedy, no noise is made; the result is
    that of the rejection rule, and the host waits for the device once, for all that it has to know.
    If somebody samples, it also waits with each list that it sends: noise, drafts, parameters.

    Args:
        logits: Rows of the requests one after the other, 1 + len(draft_ids[r]) for request r: row i
            was run on draft i - 1 (row 0: on the newest token) and judges draft i.
        draft_ids: Drafts of each request; an empty list where there are none.
        params: One a request, not one a row.
        positions: Output position of each request's first new token, from 0: the tokens that it has
            put out so far.
        draft_probs: As in `rejection_sample`, on the rows of logits; a draft that was chosen among
            others that were sampled has a one-hot row. None: all were chosen.
        validate: As in `target_probs`.
        sampler: Who judges, where not all are greedy: `rejection_sample`, or a backend's part
            "sampler".

    Raises:
        ValueError: A list or tensor has another length, a draft lies outside the vocabulary, or a
            row of logits gives no law.
    """
    vocab = require_float("logits", logits, "rows vocab").shape[1]
    _require_drafts(draft_ids, vocab)
    counts = [1 + len(drafts) for drafts in draft_ids]
    require_size("logits", logits, 0, sum(counts), "1 + the number of drafts of each request")
    require_params("params", params, len(counts), "one a request")
    if not isinstance(positions, Sequence):
        raise TypeError(f"positions must be a sequence of ints, got {describe(positions)}")
    if len(positions) != len(counts):
        raise ValueError(f"positions must have {len(counts)} entries, got {len(positions)}")
    for position in positions:
        require_count("positions", position)
    if draft_probs is not None:
        require_float("draft_probs", draft_probs, "rows vocab")
        for dim, size in enumerate(logits.shape):
            require_size("draft_probs", draft_probs, dim, size, "as logits")
    if not counts:
        return NewTokens([], [])
    require_vocabulary(logits)
    if draft_probs is None and all(p.is_greedy for p in params):
        return _greedy(logits, draft_ids, validate)

    row_params = [p for p, count in zip(params, counts, strict=True) for _ in range(count)]
    row_positions = [
        first + i for first, count in zip(positions, counts, strict=True) for i in range(count)
    ]
    # Greedy rows need no noise: their law has one token, which any noise draws.
    uniform = torch.ones(len(row_params), dtype=torch.float64)
    exponential = torch.ones(len(row_params), vocab)
    for row, (p, position) in enumerate(zip(row_params, row_positions, strict=True)):
        if not p.is_greedy:
            uniform[row], exponential[row] = position_noise(p.seed, position, vocab)
    verified = sampler(
        target_probs(logits, row_params, validate=False),
        torch.tensor([0, *accumulate(counts)], device=logits.device),
        torch.tensor([x for drafts in draft_ids for x in (*drafts, -1)], device=logits.device),
        draft_probs,
        uniform.to(logits.device),
        exponential.to(logits.device),
        max(counts) - 1,
    )
    # float64 holds every id, so that numbers of both kinds come in one copy.
    highest, accepted, tokens = _read(
        logits.amax(dim=1), verified.num_accepted, verified.token_ids.flatten()
    )
    if validate:
        require_finite(highest)
    width, new = max(counts), [int(token_id) for token_id in tokens]
    kept = [int(count) for count in accepted]
    return NewTokens([new[r * width : r * width + a + 1] for r, a in enumerate(kept)], kept)


def _greedy(
    logits: Float[Tensor, "rows vocab"], draft_ids: Sequence[Sequence[int]], validate: bool
) -> NewTokens:
    """The highest logit of each row as long as the drafts were just that, and of one row more."""
    highest, found = _read(logits.amax(dim=1), logits.argmax(dim=1))
    if validate:
        require_finite(highest)
    best = [int(token_id) for token_id in found]
    result = NewTokens([], [])
    first = 0
    for drafts in draft_ids:
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == best[first + accepted]:
            accepted += 1
        result.token_ids.append(best[first : first + accepted + 1])
        result.num_accepted.append(accepted)
        first += 1 + len(drafts)
    return result


def _read(*tensors: Shaped[Tensor, " _"]) -> list[list[float]]:
    """The numbers of all these tensors, by one copy to the host."""
    numbers = torch.cat([tensor.double() for tensor in tensors]).tolist()
    ends = list(accumulate((len(tensor) for tensor in tensors), initial=0))
    return [numbers[first:end] for first, end in pairwise(ends)]


def _require_drafts(draft_ids: object, vocab: int) -> None:
    if not isinstance(draft_ids, Sequence):
        raise TypeError(f"draft_ids must hold a list a request, got {describe(draft_ids)}")
    for request, drafts in enumerate(draft_ids):
        name = f"draft_ids[{request}]"
        if not isinstance(drafts, Sequence):
            raise TypeError(f"{name} must be a list of token ids, got {describe(drafts)}")
        for token_id in drafts:
            if require_count(name, token_id) >= vocab:
                raise ValueError(
                    f"{name} must hold ids below {vocab}, the vocabulary, got {token_id}"
                )

"""Top-k of index scores, the same list every time.

Scores tie in earnest: the ReLU makes thousands of exact zeros. `torch.topk` breaks ties as it
likes, and differently for rows of different length, so a prefill and a decode step of one model can
disagree; a kernel's buffer for ties has overflowed on them too (sglang#30645). Here ties go to the
lower position.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)


def select_topk(
    scores: Float[Tensor, "rows s_kv"], visible_lens: Int[Tensor, " rows"], k: int
) -> Int[Tensor, "rows k"]:
    """Positions of the k highest scores among the first visible_lens[row] keys.

    Args:
        scores: One row a query.
        visible_lens: Causal length of each row; keys at and beyond are never selected.
        k: Width of the result.

    Returns:
        int32 positions, highest score first, the lower position first among equals. A row with
        fewer than k selectable keys ends in -1. NaN and -inf are never selected: a NaN that ranks
        as the greatest number once made a kernel return uninitialised memory (vllm#50201).
    """
    require_selection(scores, visible_lens, k)
    positions = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    masked = _unselectable_to_minus_inf(scores, positions, visible_lens)
    return _best(masked, positions.expand_as(masked), k)[1]


def require_selection(scores: Tensor, visible_lens: Tensor, k: int) -> None:
    """Raise unless these are arguments of `select_topk`."""
    require_float("scores", scores, "rows s_kv")
    require_integer("visible_lens", visible_lens, "rows")
    require_size("visible_lens", visible_lens, 0, scores.shape[0], "one length a row")
    require_same_device({"scores": scores, "visible_lens": visible_lens})
    require_count("k", k)


def select_topk_chunked(
    score_chunk: Callable[[int, int], Float[Tensor, "rows count"]],
    s_kv: int,
    visible_lens: Int[Tensor, " rows"],
    k: int,
    *,
    chunk: int = 8192,
) -> Int[Tensor, "rows k"]:
    """The same list from scores that are made `chunk` keys at a time.

    Holds rows * (k + chunk) scores, whatever s_kv: 128k keys need no 128k-wide score matrix.

    Args:
        score_chunk: Gives the scores of keys first .. first + count - 1.
        s_kv: Number of keys.
        visible_lens: As in `select_topk`.
        k: As in `select_topk`.
        chunk: Keys at a time.
    """
    if not callable(score_chunk):
        raise TypeError(
            f"score_chunk must be a function (first, count), got {describe(score_chunk)}"
        )
    require_count("s_kv", s_kv)
    require_count("chunk", chunk, at_least=1)
    require_integer("visible_lens", visible_lens, "rows")
    rows, device = visible_lens.shape[0], visible_lens.device
    best: Tensor | None = None
    where = torch.full((rows, require_count("k", k)), -1, dtype=torch.int32, device=device)
    for first in range(0, s_kv, chunk):
        count = min(chunk, s_kv - first)
        positions = torch.arange(first, first + count, device=device, dtype=torch.int32)
        made = require_float("score_chunk(first, count)", score_chunk(first, count), "rows count")
        for dim, size in enumerate((rows, count)):
            require_size("score_chunk(first, count)", made, dim, size, "rows, count")
        scores = _unselectable_to_minus_inf(made, positions, visible_lens)
        chunk_positions = positions.expand_as(scores)
        if best is not None:
            # Earlier keys stand first, and the sort is stable: ties stay with the lower position.
            scores = torch.cat([best, scores], dim=1)
            chunk_positions = torch.cat([where, chunk_positions], dim=1)
        best, where = _best(scores, chunk_positions, k)
    return where


def _unselectable_to_minus_inf(
    scores: Float[Tensor, "rows n"],
    positions: Int[Tensor, " n"],
    visible_lens: Int[Tensor, " rows"],
) -> Float[Tensor, "rows n"]:
    hidden = (positions >= visible_lens[:, None]) | scores.isnan()
    return scores.masked_fill(hidden, -torch.inf)


def _best(
    scores: Float[Tensor, "rows n"], positions: Int[Tensor, "rows n"], k: int
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """The k best of each row, padded with -inf and -1 where there are fewer."""
    if 0 < k < scores.shape[1]:
        columns = _columns_of_best(scores, k)
        scores, positions = scores.gather(1, columns), positions.gather(1, columns)
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    best = order.values[:, :k]
    where = positions.gather(1, order.indices[:, :k]).masked_fill(best == -torch.inf, -1)
    short = k - best.shape[1]
    if short > 0:
        best = torch.nn.functional.pad(best, (0, short), value=-torch.inf)
        where = torch.nn.functional.pad(where, (0, short), value=-1)
    return best, where


def _columns_of_best(scores: Float[Tensor, "rows n"], k: int) -> Int[Tensor, "rows k"]:
    """Columns of the k best scores of each row, from left to right; k < n.

    A stable sort of all n scores gives them too, and spends its time on those that lose. Of
    `torch.topk` only the k-th best score is taken: which of equal ones it lists is not defined.
    """
    last = torch.topk(scores, k, dim=1).values[:, -1:]
    better, tied = scores > last, scores == last
    room = k - better.sum(dim=1, keepdim=True)
    chosen = better | (tied & (tied.cumsum(dim=1) <= room))  # k in each row
    # The i-th chosen column goes to place i, all others to a place behind the last, to be cut off.
    place = torch.where(chosen, chosen.cumsum(dim=1) - 1, k)
    columns = torch.arange(scores.shape[1], device=scores.device).expand_as(place)
    return place.new_zeros(scores.shape[0], k + 1).scatter_(1, place, columns)[:, :k]

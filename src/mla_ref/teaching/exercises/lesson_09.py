"""Exercises of lesson 09: index scores, and a top-k that gives the same list every time."""

import torch
from torch import Tensor

from mla_ref.indexer import index_scores, select_topk
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_tensor

_INF, _NAN = torch.inf, torch.nan


def _scores_case(
    name: str,
    why: str,
    given: tuple[Tensor, Tensor, Tensor],
    expected: Tensor | None = None,
) -> Case:
    def check(my_scores: Function) -> None:
        want = index_scores(*given).float() if expected is None else expected
        got = expect_tensor(my_scores(*given), torch.float32, tuple(want.shape), "the result")
        expect_close(got, want, "the score", max_abs=1e-4)

    return Case(name, why, check)


def _drawn(seed: int, rows: int, heads: int, s_kv: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, heads, d), (s_kv, d), (rows, heads)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


_TWO_HEADS = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
_TWO_KEYS = torch.tensor([[1.0, -10.0], [0.5, 0.2]])
_BFLOAT16 = tuple(x.bfloat16() for x in _drawn(3, 3, 4, 9, 128))

INDEX_SCORES = Exercise(
    id="09-index-scores",
    title="Index scores",
    task=(
        "Write `my_scores(q, k, weights)`: the index score of every key for every row, no mask, in "
        "float32. The softmax scale and the like are in `weights` already."
    ),
    signature=(
        'def my_scores(\n    q: Float[Tensor, "rows index_heads d_i"],\n'
        '    k: Float[Tensor, "s_kv d_i"],\n    weights: Float[Tensor, "rows index_heads"],\n'
        ') -> Float[Tensor, "rows s_kv"]:'
    ),
    cases=(
        _scores_case(
            "two heads, two keys, by hand",
            "The second head's -10 for key 0 counts as 0: 1 * 1 + 0.5 * 0 and 1 * 0.5 + 0.5 * 0.2. "
            "Without the ReLU key 1 would win (transformers#44360).",
            (_TWO_HEADS, _TWO_KEYS, torch.tensor([[1.0, 0.5]])),
            torch.tensor([[1.0, 0.6]]),
        ),
        _scores_case(
            "a negative weight",
            "The ReLU is on a head's product, not on the sum, and weights may be negative. So may "
            "scores: a hidden key must be -inf, never 0.",
            (_TWO_HEADS, _TWO_KEYS, torch.tensor([[-1.0, 0.5]])),
            torch.tensor([[-1.0, -0.4]]),
        ),
        _scores_case(
            "three rows of four heads",
            "Each row has weights of its own.",
            _drawn(1, 3, 4, 5, 8),
        ),
        _scores_case(
            "bfloat16 inputs",
            "Keys whose scores differ by 1e-4 change places if sums are rounded (sglang#13459).",
            _BFLOAT16,  # type: ignore[arg-type]
        ),
        _scores_case("no keys yet", "The first token of a request.", _drawn(2, 2, 3, 0, 8)),
    ),
)


def _topk_case(
    name: str,
    why: str,
    scores: list[list[float]],
    lens: list[int],
    k: int,
    expected: list[list[int]],
) -> Case:
    def check(my_topk: Function) -> None:
        given = torch.tensor(scores).reshape(len(lens), -1)
        _expect_list(my_topk, given, torch.tensor(lens), k, torch.tensor(expected))

    return Case(name, why, check)


def _expect_list(my_topk: Function, scores: Tensor, lens: Tensor, k: int, expected: Tensor) -> None:
    got = expect_tensor(
        my_topk(scores, lens, k), torch.int32, (scores.shape[0], k), "the list of positions"
    )
    for row, (found, want) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)):
        if found != want and k <= 8:
            raise Complaint(f"row {row} has the list {found}, expected {want}")
        if found != want:
            at = next(i for i in range(k) if found[i] != want[i])
            raise Complaint(
                f"row {row} of {len(scores[row])} keys has {found[at]} at place {at} of its list, "
                f"expected {want[at]}"
            )


def _check_ties(my_topk: Function) -> None:
    for rows, width in ((1, 400), (3, 2000)):
        scores = torch.zeros(rows, width)
        winners = torch.randperm(width, generator=torch.Generator().manual_seed(width))[:10]
        scores[:, winners] = torch.arange(1.0, 11.0)
        lens = torch.full((rows,), width)
        _expect_list(my_topk, scores, lens, 64, select_topk(scores, lens, 64))


def _check_no_rows(my_topk: Function) -> None:
    expect_tensor(
        my_topk(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 3), torch.int32, (0, 3),
        "the list of positions",
    )  # fmt: skip


TOPK = Exercise(
    id="09-topk",
    title="Top-k that never surprises",
    task=(
        "Write `my_topk(scores, visible_lens, k)`: for each row the positions of the `k` highest "
        "scores among its first `visible_lens[row]` keys, int32, best first. Among equal scores "
        "the lower position comes first. NaN and -inf are never chosen. Where fewer than `k` keys "
        "can be chosen, also because there are fewer keys than `k`, the list ends in -1."
    ),
    signature=(
        'def my_topk(\n    scores: Float[Tensor, "rows s_kv"], '
        'visible_lens: Int[Tensor, " rows"], k: int\n) -> Int[Tensor, "rows k"]:'
    ),
    cases=(
        _topk_case(
            "one row, by hand",
            "Positions, not scores, and the best one first.",
            [[1.0, 3.0, 2.0, -4.0]], [4], 2, [[1, 2]],
        ),
        _topk_case(
            "three rows of a causal chunk",
            "A later token's key has a score too, often a high one.",
            [[1.0, 2.0, 9.0, 9.0], [1.0, 2.0, 3.0, 9.0], [4.0, 3.0, 2.0, 1.0]], [2, 3, 4], 2,
            [[1, 0], [2, 1], [0, 1]],
        ),
        _topk_case(
            "fewer visible keys than k",
            "The first k tokens of every request. A position filled in from beyond the causal "
            "length lets a token see the future (miles#1122).",
            [[5.0, 7.0, 8.0, 9.0]], [2], 3, [[1, 0, -1]],
        ),
        _topk_case(
            "fewer keys than k",
            "The width of the list is planned before the request is known.",
            [[5.0, 7.0]], [2], 5, [[1, 0, -1, -1, -1]],
        ),
        Case(
            "hundreds of scores of exactly 0",
            "The ReLU makes them. torch.topk breaks ties as it likes, and differently for rows of "
            "another length, so prefill and decode disagree; a kernel's buffer for ties overflowed "
            "(sglang#30645).",
            _check_ties,
        ),
        _topk_case(
            "-inf and +inf among the scores",
            "-inf is how some kernels mark padding. +inf is a score, if an odd one.",
            [[-_INF, 1.0, _INF, -_INF]], [4], 3, [[2, 1, -1]],
        ),
        _topk_case(
            "NaN among the scores",
            "NaN ranks as the greatest number in a sort and as nothing in a comparison; between "
            "the two, a kernel returned uninitialised memory as positions (vllm#50201).",
            [[_NAN, 1.0, _NAN, 2.0], [_NAN] * 4], [4, 4], 3, [[3, 1, -1], [-1, -1, -1]],
        ),
        Case("no rows", "A rank without new tokens.", _check_no_rows),
    ),
)  # fmt: skip

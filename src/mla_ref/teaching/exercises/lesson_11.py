"""Exercises of lesson 11: judge one draft, and count how many of a request's drafts stand."""

from typing import Any

import torch

from mla_ref.checks import describe
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_parts, expect_tensor


def _length_case(name: str, accepted: list[list[int]], expected: list[int], why: str) -> Case:
    """Requests whose drafts passed (1) or not (0)."""

    def check(accept_length: Function) -> None:
        mask = torch.tensor(accepted, dtype=torch.bool).reshape(len(expected), -1)
        result = accept_length(mask)
        lengths = expect_tensor(result, torch.int64, (len(expected),), "the result")
        if lengths.tolist() != expected:
            raise Complaint(
                f"for accepted {accepted} the result is {lengths.tolist()}, expected {expected}"
            )

    return Case(name, why, check)


def _check_nobody(accept_length: Function) -> None:
    result = accept_length(torch.zeros(0, 3, dtype=torch.bool))
    expect_tensor(result, torch.int64, (0,), "the result for accepted of shape [0, 3]")


ACCEPT_LENGTH = Exercise(
    id="11-accept-length",
    title="How many drafts stand?",
    task=(
        "Write `accept_length(accepted)`: how many drafts of each request stand, as int64. "
        "`accepted[r, i]` says whether draft `i` of request `r` passed its own test; a request "
        "with fewer drafts has False behind them. A draft behind one that failed does not count, "
        "whatever its own test said. There may be no request, and no draft. Try to do without a "
        "Python loop."
    ),
    signature='def accept_length(accepted: Bool[Tensor, "b n"]) -> Int[Tensor, " b"]:',
    cases=(
        _length_case(
            "all four pass",
            [[1, 1, 1, 1]],
            [4],
            "The best step there is. The bonus that follows is no draft and is not counted here.",
        ),
        _length_case(
            "one fails, and two pass behind it",
            [[1, 0, 1, 1]],
            [1],
            "Drafts 2 and 3 followed a token that is not in the text (vllm#2658).",
        ),
        _length_case(
            "none passes",
            [[0, 0, 0]],
            [0],
            "The step still gives a token, the recovered one. It is no draft either.",
        ),
        _length_case(
            "four requests, ragged",
            [[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]],
            [2, 1, 3, 0],
            "Each request goes on from where its own drafts ended.",
        ),
        _length_case(
            "nobody has a draft",
            [[], []],
            [0, 0],
            "An n-gram drafter finds nothing in a fresh text: the step is plain decoding.",
        ),
        Case("no request", "A step of chunks of prompts: nobody judges anything.", _check_nobody),
    ),
)


def _judge(answer: Function, p: Any, q: Any, draft: int, u: float, e: Any) -> tuple[int, bool]:
    result = expect_parts(answer(p, q, draft, u, e), ("token", "accepted"))
    for value, kind, what in zip(result, (int, bool), ("token", "accepted"), strict=True):
        if type(value) is not kind:
            raise Complaint(f"{what} is {describe(value)}, expected {kind.__name__}")
    token, accepted = result
    return token, accepted


def _judge_case(
    name: str,
    p: list[float],
    q: list[float],
    draft: int,
    u: float,
    e: list[float],
    expected: tuple[int, bool],
    why: str,
) -> Case:
    def check(answer: Function) -> None:
        laws = [torch.tensor(law, dtype=torch.float64) for law in (p, q, e)]
        result = _judge(answer, laws[0], laws[1], draft, u, laws[2])
        if result != expected:
            raise Complaint(
                f"for p {p}, q {q}, draft {draft}, u {u} and e {e} the result is {result}, "
                f"expected {expected}"
            )

    return Case(name, why, check)


_DRAWS = 2000


def _check_law(answer: Function) -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    drafts = torch.multinomial(q, _DRAWS, replacement=True, generator=generator).tolist()
    uniform = (1 - torch.rand(_DRAWS, generator=generator, dtype=torch.float64)).tolist()
    noise = torch.empty(_DRAWS, 4, dtype=torch.float64).exponential_(generator=generator)
    tokens = [
        _judge(answer, p, q, draft, u, e)[0]
        for draft, u, e in zip(drafts, uniform, noise, strict=True)
    ]
    law = torch.bincount(torch.tensor(tokens), minlength=4) / _DRAWS
    # Four standard deviations of a share of one half.
    if len(law) != 4 or float((law - p).abs().max()) > 4 * (0.25 / _DRAWS) ** 0.5:
        shares = [round(share, 3) for share in law.tolist()]
        raise Complaint(
            f"of {_DRAWS:,} drafts drawn from q {q.tolist()} came tokens with the shares {shares}, "
            f"expected p {p.tolist()} up to chance"
        )


ACCEPT_OR_RECOVER = Exercise(
    id="11-accept-or-recover",
    title="Judge one draft",
    task=(
        "Write `accept_or_recover(p, q, draft, u, e)`: judge one draft. `p` is the target's law at "
        "this place and `q` the law from which the token `draft` was drawn. Keep the draft if "
        "`q[draft]` is above 0 and `p[draft] / q[draft]` is at least `u`, which is uniform in "
        "(0, 1]. Else draw from the weights `max(p - q, 0)`: the token with the highest weight "
        "over `e`, which holds independent draws of Exp(1). If rounding has left no weight, take "
        "`p` for the weights. Return the tuple `(token, accepted)`, an int and a bool."
    ),
    signature=(
        'def accept_or_recover(\n    p: Float[Tensor, " vocab"],\n'
        '    q: Float[Tensor, " vocab"],\n    draft: int,\n    u: float,\n'
        '    e: Float[Tensor, " vocab"],\n) -> tuple[int, bool]:'
    ),
    cases=(
        _judge_case(
            "the target likes the draft better than the drafter did",
            [0.5, 0.3, 0.2],
            [0.3, 0.5, 0.2],
            0,
            1.0,
            [1.0, 1.0, 1.0],
            (0, True),
            "p / q is above 1: it is kept whatever u is. The test is of p / q, not of p.",
        ),
        _judge_case(
            "u exactly p / q",
            [0.25, 0.75],
            [0.5, 0.5],
            0,
            0.5,
            [1.0, 1.0],
            (0, True),
            "u lies in (0, 1], so >= keeps a draft of ratio r with probability r, and one of "
            "ratio 1 always.",
        ),
        _judge_case(
            "u just above p / q",
            [0.25, 0.75],
            [0.5, 0.5],
            0,
            0.51,
            [0.1, 1.0],
            (1, False),
            "The drafter proposes it twice as often as the target would write it, so half of its "
            "proposals must fall, and then it is not drawn again.",
        ),
        _judge_case(
            "what is recovered, and from what",
            [0.2, 0.4, 0.4],
            [0.2, 0.1, 0.7],
            2,
            0.9,
            [0.1, 0.5, 0.1],
            (1, False),
            "Token 0 is drafted as often as it should be, so nothing is missing there. To subtract "
            "q at the draft alone would recover it (xllm#2175).",
        ),
        _judge_case(
            "a race between two tokens",
            [0.1, 0.4, 0.5],
            [0.7, 0.1, 0.2],
            0,
            1.0,
            [1.0, 6.0, 1.0],
            (2, False),
            "The weights are equal, 0.3 and 0.3; chance decides, and chance is e.",
        ),
        _judge_case(
            "a draft that its own law excludes",
            [0.6, 0.4],
            [0.0, 1.0],
            0,
            0.5,
            [9.0, 1.0],
            (0, False),
            "p / q is infinite, and infinity passes every test. Such a draft did not come from q.",
        ),
        _judge_case(
            "a rejection where p and q are equal but for rounding",
            [0.5, 0.5],
            [0.5 + 1e-12, 0.5],
            0,
            1.0,
            [2.0, 1.0],
            (1, False),
            "max(p - q, 0) is 0 everywhere, and the argmax of nothing is token 0 (TorchCode#16).",
        ),
        Case(
            "2,000 drafts",
            "The only thing that was promised: what comes out has the law p, whatever q is.",
            _check_law,
        ),
    ),
)

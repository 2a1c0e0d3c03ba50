"""Exercises of lesson 12: is this a verifier batch, and how far does each of its rows see?"""

import torch

from mla_ref.batching import is_verifier_batch
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_tensor


def _batch_case(
    name: str,
    query_lens: tuple[int, ...],
    flags: tuple[bool, ...] | None,
    why: str,
    *,
    n: int = 3,
    num_reqs: int | None = None,
) -> Case:
    """A batch; without `num_reqs` all of its requests are real."""
    real = len(query_lens) if num_reqs is None else num_reqs

    def check(is_verifier: Function) -> None:
        given = None if flags is None else list(flags)
        expected = is_verifier_batch(list(query_lens), given, n, num_reqs=real)
        result = is_verifier(list(query_lens), given, real, n)
        if not isinstance(result, bool) or result != expected:
            raise Complaint(
                f"for query_lens {list(query_lens)}, is_prefilling {given}, num_reqs {real} and "
                f"n = {n} the result is {result!r}, expected {expected}"
            )

    return Case(name, why, check)


def _check_host_tensor(is_verifier: Function) -> None:
    for flags, expected in (([False, False], True), ([False, True], False)):
        result = is_verifier([4, 4], torch.tensor(flags), 2, 3)
        if not isinstance(result, bool) or result != expected:
            raise Complaint(
                f"for is_prefilling {torch.tensor(flags)!r} the result is {result!r}, expected "
                f"{expected}"
            )


def _check_device_tensor(is_verifier: Function) -> None:
    # "meta" stands for a GPU here: a device whose numbers the host cannot read at once.
    flags = torch.zeros(2, dtype=torch.bool, device="meta")
    for query_lens in ([4, 4], [1, 1]):
        try:
            is_verifier(query_lens, flags, 2, 3)
        except Complaint as complaint:
            if isinstance(complaint.__cause__, TypeError):
                continue
            raise
        except NotImplementedError:
            pass  # it returned: grade cannot compare the numbers of such a tensor either
        raise Complaint(
            f"for query_lens {query_lens} and flags on a device there was no error, expected a "
            "TypeError"
        )


IS_VERIFIER = Exercise(
    id="12-is-verifier",
    title="Is this a verifier batch?",
    task=(
        "Write `is_verifier(query_lens, is_prefilling, num_reqs, n)`: `True` if this batch "
        "verifies drafts. `query_lens` are the new tokens of each request; `is_prefilling` says of "
        "each whether it still runs its prompt, as a list of bools or a tensor, or is None if "
        "nobody has said. The first `num_reqs` requests are real and the others padding, which may "
        "hold anything in `is_prefilling`; a real request may have no token, and then decides "
        "nothing either. `n` drafts a request are configured, 0 for none. A batch in which no "
        "request has more than one token is plain decoding: `False`. Flags in a tensor that is not "
        "on the CPU are a TypeError, whatever the lengths."
    ),
    signature=(
        "def is_verifier(\n    query_lens: list[int],\n"
        "    is_prefilling: list[bool] | Tensor | None,\n    num_reqs: int,\n    n: int,\n"
        ") -> bool:"
    ),
    cases=(
        _batch_case(
            "three requests with all drafts",
            (4, 4, 4),
            (False,) * 3,
            "The batch that the question is about: n is 3, and everyone brings 1 + 3 tokens.",
        ),
        _batch_case(
            "a request with fewer drafts, and one with none",
            (4, 1, 3),
            (False,) * 3,
            "A drafter may give up early. Each row has a length of its own, so a ragged batch is "
            "no harder.",
        ),
        _batch_case("one token each", (1, 1, 1), (False,) * 3, "Plain decoding."),
        _batch_case(
            "several tokens, but no drafts are configured",
            (4, 4),
            (False,) * 2,
            "Whatever these tokens are, nobody verifies them.",
            n=0,
        ),
        _batch_case(
            "five tokens with n = 3",
            (4, 5),
            (False,) * 2,
            "More than a verifier can bring.",
        ),
        _batch_case(
            "a short chunk of a prompt",
            (4, 4, 4),
            (False, False, True),
            "The same shape as a verifier's. Only the scheduler knows (vllm-ascend#5583).",
        ),
        _batch_case(
            "a chunk of one token",
            (4, 1),
            (False, True),
            "The last token of a long prompt, alone. It is prefill, too.",
        ),
        _batch_case(
            "nobody has said who is prefilling",
            (4, 4),
            None,
            "Not knowing is no permission: extend is right for every batch.",
        ),
        _batch_case(
            "a stale flag in padding",
            (4, 4, 0),
            (False, False, True),
            "The request that was here has finished, and its flag was left behind (vllm#41841).",
            num_reqs=2,
        ),
        _batch_case(
            "a stale flag, and num_reqs counts the padding",
            (4, 4, 0, 0),
            (False, False, True, True),
            "In a replayed graph vLLM's num_reqs is the padded count, so cutting there does not "
            "help. Who runs no token is not prefilling now.",
        ),
        _batch_case(
            "nobody",
            (0, 0),
            (True, True),
            "Warm-up.",
            num_reqs=0,
        ),
        Case("flags in a host tensor", "As a server holds them.", _check_host_tensor),
        Case(
            "flags on a device",
            "Reading them makes the host wait for all that the device has queued, every step, and "
            "is illegal while a graph is captured. A TypeError is found in the first test.",
            _check_device_tensor,
        ),
    ),
)


def _rows_case(name: str, requests: tuple[tuple[int, int], ...], num_rows: int, why: str) -> Case:
    """A batch of (tokens in the cache, new tokens) per request, padded to `num_rows`."""

    def check(row_lens: Function) -> None:
        # Token by token, so that nothing here gives the formula away to the reader.
        expected = []
        for computed, new in requests:
            seen = computed
            for _ in range(new):
                seen += 1
                expected.append(seen)
        expected += [0] * (num_rows - len(expected))
        computed_lens = torch.tensor([c for c, _ in requests], dtype=torch.int64)
        query_lens = torch.tensor([q for _, q in requests], dtype=torch.int64)
        result = row_lens(computed_lens, query_lens, num_rows)
        lens = expect_tensor(result, torch.int64, (num_rows,), "the result")
        if lens.tolist() != expected:
            raise Complaint(
                f"for computed_lens {computed_lens.tolist()}, query_lens {query_lens.tolist()} and "
                f"{num_rows} rows the result is {lens.tolist()}, expected {expected}"
            )

    return Case(name, why, check)


ROW_LENS = Exercise(
    id="12-row-lens",
    title="A length for each row",
    task=(
        "Write `row_lens(computed_lens, query_lens, num_rows)`: how many keys each row of a step "
        "may see, as int64. Request `r` has `computed_lens[r]` tokens in the cache and brings "
        "`query_lens[r]` new ones, whose rows are written before the attention reads. The rows of "
        "a batch lie request by request, and rows behind them, up to `num_rows`, are padding: they "
        "see 0. A request may bring no token. Try to do without a Python loop."
    ),
    signature=(
        'def row_lens(\n    computed_lens: Int[Tensor, " b"],\n'
        '    query_lens: Int[Tensor, " b"],\n    num_rows: int,\n) -> Int[Tensor, " rows"]:'
    ),
    cases=(
        _rows_case("one token each", ((9, 1), (4, 1)), 2, "Plain decoding: each sees itself, too."),
        _rows_case(
            "one verifier, three drafts",
            ((6, 4),),
            4,
            "Draft after draft sees one key more. One length for the whole request would hide "
            "drafts from the later ones, or show them to the earlier.",
        ),
        _rows_case(
            "ragged",
            ((6, 4), (9, 3), (4, 1)),
            8,
            "The row number counts within the request, and requests have different numbers.",
        ),
        _rows_case(
            "a fresh prompt beside verifiers",
            ((5, 4), (0, 7)),
            11,
            "The same rule: kernels know no kinds of request.",
        ),
        _rows_case(
            "a request without a token",
            ((5, 2), (8, 0), (3, 2)),
            4,
            "It owns no row and shifts nobody.",
        ),
        _rows_case(
            "padded to a graph's rows",
            ((6, 4), (9, 2)),
            12,
            "A padded row must not go on counting: it belongs to nobody, and its list is empty.",
        ),
        _rows_case("a graph of nobody", (), 4, "The capture itself."),
    ),
)

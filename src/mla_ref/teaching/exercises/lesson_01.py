"""Exercises of lesson 01: who sees whom, in one request and in a batch of many."""

import torch
from torch import Tensor

from mla_ref.attention import causal_attention
from mla_ref.numerics import oracle_attention
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_tensor


def _keys(row: Tensor) -> str:
    return str(row.nonzero().flatten().tolist())


def _mask_case(name: str, s_q: int, s_kv: int, why: str) -> Case:
    def check(offset_mask: Function) -> None:
        mask = expect_tensor(offset_mask(s_q, s_kv), torch.bool, (s_q, s_kv), "the mask")
        # The definition, row by row, so that nothing here gives the formula away to the reader.
        expected = torch.zeros(s_q, s_kv, dtype=torch.bool)
        for row in range(s_q):
            for key in range(s_kv):
                expected[row, key] = (s_kv - 1 - key) >= (s_q - 1 - row)
        if mask.numel() and torch.equal(mask, ~expected):
            raise Complaint(
                "True and False are the wrong way round: True marks a key that the row may see"
            )
        for row in range(s_q):
            if not torch.equal(mask[row], expected[row]):
                raise Complaint(
                    f"row {row} sees the keys {_keys(mask[row])}, expected {_keys(expected[row])}"
                )

    return Case(f"{name}, s_q {s_q}, s_kv {s_kv}", why, check)


def _check_mask_against_loop(offset_mask: Function) -> None:
    generator = torch.Generator().manual_seed(1)
    for s_q, s_kv in ((1, 9), (3, 8), (7, 7), (6, 4)):
        q = torch.randn(s_q, 2, 8, generator=generator)
        k = torch.randn(s_kv, 2, 8, generator=generator)
        v = torch.randn(s_kv, 2, 8, generator=generator)
        mask = expect_tensor(offset_mask(s_q, s_kv), torch.bool, (s_q, s_kv), "the mask")
        masked = oracle_attention(q, k, v, mask, softmax_scale=8**-0.5)
        loop = causal_attention(q, k, v, softmax_scale=8**-0.5)
        what = f"with your mask at s_q {s_q} and s_kv {s_kv}, out"
        expect_close(masked.out.float(), loop.out, what, max_abs=1e-5)


OFFSET_MASK = Exercise(
    id="01-offset-mask",
    title="The offset mask",
    task=(
        "Write `offset_mask(s_q, s_kv)`. It returns a bool tensor `[s_q, s_kv]` that is `True` "
        "where query row `i` may see key `j`, when the last row is the newest token. Both sizes "
        "may be 0, and `s_q` may be larger than `s_kv`. Try to do without a Python loop."
    ),
    signature='def offset_mask(s_q: int, s_kv: int) -> Bool[Tensor, "s_q s_kv"]:',
    cases=(
        _mask_case(
            "square prefill",
            4,
            4,
            "A prompt in one call: every row sees itself and what came before it.",
        ),
        _mask_case(
            "one-token decode",
            1,
            5,
            "Every step of plain decoding. The only row is the newest token: nothing is hidden.",
        ),
        _mask_case(
            "two new tokens after three",
            2,
            5,
            "A chunk of a prompt, or a verifier batch: each row is one token further than the "
            "row above it.",
        ),
        _mask_case(
            "more rows than keys",
            5,
            2,
            "Rows that stand before the first key see nothing. Padding makes such rows.",
        ),
        _mask_case("no keys at all", 3, 0, "A padded request of length 0."),
        _mask_case("no rows", 0, 3, "A request that has nothing to compute in this step."),
        Case(
            "attention with the mask equals the loop",
            "The mask is right only if rung 1, which uses none, gives the same result.",
            _check_mask_against_loop,
        ),
    ),
)


def _lens_case(name: str, requests: tuple[tuple[int, int], ...], why: str) -> Case:
    """A batch of (query rows, keys) per request."""

    def check(ragged_lens: Function) -> None:
        rows = torch.tensor([0, *(s_q for s_q, _ in requests)])
        query_start_loc = rows.cumsum(0)
        seq_lens = torch.tensor([s_kv for _, s_kv in requests], dtype=torch.int64)
        expected = torch.tensor(
            [s_kv - (s_q - 1 - row) for s_q, s_kv in requests for row in range(s_q)],
            dtype=torch.int64,
        )
        lens = expect_tensor(
            ragged_lens(query_start_loc, seq_lens), torch.int64, tuple(expected.shape), "the result"
        )
        if not torch.equal(lens, expected):
            raise Complaint(
                f"for query_start_loc {query_start_loc.tolist()} and seq_lens "
                f"{seq_lens.tolist()} the result is {lens.tolist()}, expected "
                f"{expected.tolist()}"
            )

    return Case(name, why, check)


RAGGED_LENS = Exercise(
    id="01-ragged-lens",
    title="Many requests in one call",
    task=(
        "Write `ragged_lens(query_start_loc, seq_lens)`. A server lays the new rows of `b` "
        "requests one after the other: request `r` owns the rows `query_start_loc[r]` to "
        "`query_start_loc[r + 1] - 1`, and has `seq_lens[r]` keys, those of its new rows included. "
        "Return, for each of the `num_tokens` rows, how many keys of its own request it sees, as "
        "int64. A request may have no rows. Try to do without a Python loop: "
        "`torch.repeat_interleave` helps."
    ),
    signature=(
        'def ragged_lens(\n    query_start_loc: Int[Tensor, " b_plus_1"], seq_lens: Int[Tensor, '
        '" b"]\n) -> Int[Tensor, " num_tokens"]:'
    ),
    cases=(
        _lens_case("one prompt", ((4, 4),), "Row 0 sees itself only, and so on."),
        _lens_case("one decode step", ((1, 9),), "The newest token sees all keys."),
        _lens_case(
            "three decode steps",
            ((1, 9), (1, 2), (1, 5)),
            "The usual batch of a server: one row a request, each with its own length.",
        ),
        _lens_case(
            "decode, chunk, verifier",
            ((1, 6), (4, 10), (3, 8)),
            "Requests of all kinds share a call; the row number within the batch means nothing, "
            "only the row number within the request.",
        ),
        _lens_case(
            "a request without rows",
            ((2, 5), (0, 7), (1, 3)),
            "Its prompt was found in the prefix cache, or it is paused: it owns no row, and must "
            "not shift those of its neighbours.",
        ),
        _lens_case("an empty batch", (), "Warm-up and capture call with nothing."),
    ),
)

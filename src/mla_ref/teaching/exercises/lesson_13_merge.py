"""The second exercise of lesson 13: the merge that all ranks end with."""

import torch
from torch import Tensor

from mla_ref.numerics import AttentionResult, apply_sink, oracle_attention
from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import (
    expect_close,
    expect_parts,
    expect_same_bits,
    expect_tensor,
)

_ROWS, _HEADS, _D = 3, 2, 4


def _shares(seed: int, world: int, lse: float | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(world, _ROWS, _HEADS, _D, generator=generator)
    lses = torch.randn(world, _ROWS, _HEADS, generator=generator)
    return outs, lses if lse is None else lses + lse


def _sink(value: float) -> Tensor:
    return torch.full((_HEADS,), value)


def _merged(merge: Function, outs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    out, lse = expect_parts(merge(outs, lses, sink), ("out", "lse"))
    return AttentionResult(
        expect_tensor(out, outs.dtype, tuple(outs.shape[1:]), "out"),
        expect_tensor(lse, lses.dtype, tuple(lses.shape[1:]), "lse"),
    )


def _problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(_ROWS, _HEADS, 8, generator=generator)
    k = torch.randn(22, _HEADS, 8, generator=generator)
    return q, k, torch.randn(22, _HEADS, _D, generator=generator)


def _attend(problem: tuple[Tensor, Tensor, Tensor], keys: slice) -> AttentionResult:
    q, k, v = problem
    seen = torch.ones(_ROWS, len(k[keys]), dtype=torch.bool)
    out, lse = oracle_attention(q, k[keys], v[keys], seen, softmax_scale=8**-0.5)
    return AttentionResult(out.float(), lse.float())


def _check_by_hand(merge: Function) -> None:
    # Sums of exponentials 2 and 8, outputs 0 and 10: (2 * 0 + 8 * 10) / (2 + 8) = 8.
    outs = torch.tensor([0.0, 10.0]).view(2, 1, 1, 1)
    lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
    got = _merged(merge, outs, lses, None)
    expect_close(got.lse, torch.tensor([[10.0]]).log(), "lse", max_abs=1e-5)
    expect_close(got.out, torch.tensor([[[8.0]]]), "out", max_abs=1e-5)


def _check_dealt(merge: Function) -> None:
    problem = _problem(2)
    whole = _attend(problem, slice(None))
    for world in (1, 2, 3, 8):
        parts = [_attend(problem, slice(rank, None, world)) for rank in range(world)]
        outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
        got = _merged(merge, outs, lses, None)
        expect_close(got.lse, whole.lse, f"lse of {world} ranks", max_abs=1e-5)
        expect_close(got.out, whole.out, f"out of {world} ranks", max_abs=1e-5)


def _check_range(merge: Function) -> None:
    for shift in (300.0, -300.0):
        outs, lses = _shares(3, 4, shift)
        near = lses - shift
        total = torch.logsumexp(near, 0)
        expected = (torch.exp(near - total)[..., None] * outs).sum(0)
        got = _merged(merge, outs, lses, None)
        expect_close(got.lse, total + shift, "lse", max_abs=1e-4)
        expect_close(got.out, expected, "out", max_abs=1e-4)


def _check_rank_without_keys(merge: Function) -> None:
    outs, lses = _shares(4, 2)
    expected = _merged(merge, outs, lses, None)
    for filler in (0.0, torch.nan):
        more_outs = torch.cat([outs, torch.full_like(outs[:1], filler)])
        more_lses = torch.cat([lses, torch.full_like(lses[:1], -torch.inf)])
        got = _merged(merge, more_outs, more_lses, None)
        expect_same_bits(got.lse, expected.lse, "lse with a rank that holds no key")
        expect_same_bits(got.out, expected.out, "out with a rank that holds no key")


def _check_nobody(merge: Function) -> None:
    outs, lses = _shares(5, 3)
    outs[:, 0], lses[:, 0] = torch.nan, -torch.inf
    got = _merged(merge, outs, lses, None)
    zeros = torch.zeros(_HEADS, _D)
    expect_same_bits(
        got.lse[0], torch.full((_HEADS,), -torch.inf), "row 0 of lse (no rank has a key)"
    )
    expect_same_bits(got.out[0], zeros, "row 0 of out (no rank has a key)")
    others = torch.softmax(lses[:, 1:], 0)[..., None] * outs[:, 1:]
    expect_close(got.out[1:], others.sum(0), "rows 1 and 2 of out", max_abs=1e-5)


def _check_sink(merge: Function) -> None:
    for world in (1, 2, 4):
        outs, lses = _shares(6, world)
        without = _merged(merge, outs, lses, None)
        for value in (-1.0, 2.0):
            got = _merged(merge, outs, lses, _sink(value))
            expect_close(got.lse, without.lse, "lse, which is without the sink", max_abs=0.0)
            expected = without.out * torch.sigmoid(without.lse - value)[..., None]
            expect_close(got.out, expected, f"out of {world} ranks, sink {value}", max_abs=1e-5)


def _check_sinks_by_head(merge: Function) -> None:
    outs, lses = _shares(7, 2)
    sink = torch.tensor([0.5, -1.5])
    expected = apply_sink(_merged(merge, outs, lses, None), sink)
    expect_close(_merged(merge, outs, lses, sink).out, expected, "out", max_abs=1e-5)


def _check_large_sink(merge: Function) -> None:
    outs, lses = _shares(8, 2)
    lses[:, 0] = -torch.inf
    got = _merged(merge, outs, lses, _sink(1e5))
    expect_close(got.out, torch.zeros_like(got.out), "out beside a sink of 1e5", max_abs=0.0)
    got = _merged(merge, outs, lses, _sink(0.0))
    expect_same_bits(got.out[0], torch.zeros(_HEADS, _D), "row 0 of out (only the sink)")


MERGE_RANKS = Exercise(
    id="13-merge-ranks",
    title="The merge that all ranks end with",
    task=(
        "Write `merge_ranks(outs, lses, sink)`: the attention over the keys of all ranks, as the "
        "tuple `(out, lse)` in the dtypes of `outs` and `lses`. LSEs are natural logarithms. A "
        "rank that holds no key of a row has the LSE -inf there, changes nothing, to the last bit, "
        "and may have anything in `outs`; a row of which no rank holds a key is 0 with LSE -inf. "
        "`sink` is None or, for each head, the score of one more key with value 0, which counts "
        "once, not once a rank; the returned LSE is without it. LSEs of ±300 must not overflow."
    ),
    signature=(
        'def merge_ranks(\n    outs: Float[Tensor, "world rows h d_c"],\n'
        '    lses: Float[Tensor, "world rows h"],\n    sink: Float[Tensor, " h"] | None,\n'
        ') -> tuple[Float[Tensor, "rows h d_c"], Float[Tensor, "rows h"]]:'
    ),
    cases=(
        Case(
            "by hand: sums 2 and 8, outputs 0 and 10",
            "8. The mean would be 5; LSEs read in base 2 would give 7.23 (sglang#33064).",
            _check_by_hand,
        ),
        Case(
            "keys dealt to 1, 2, 3 and 8 ranks",
            "The same answer whatever the number of ranks. That is what the lesson is about.",
            _check_dealt,
        ),
        Case(
            "LSEs near 300 and -300",
            "exp(300) is inf in float32 and exp(-300) is 0.",
            _check_range,
        ),
        Case(
            "a rank without a key of the row",
            "The row's list has no key that the rank holds. What the rank's kernel left in its "
            "output may be NaN, and 0 * NaN is NaN (sglang#33325).",
            _check_rank_without_keys,
        ),
        Case(
            "a row of which no rank holds a key",
            "A padded row of the batch. -inf minus -inf is NaN.",
            _check_nobody,
        ),
        Case(
            "a sink counts once",
            "Applied by every rank it counts `world` times, and the answer depends on how many "
            "GPUs there are.",
            _check_sink,
        ),
        Case("each head has its own sink", "It is a learnt number a head.", _check_sinks_by_head),
        Case(
            "a very large sink, and nothing but a sink",
            "exp(1e5) is infinite; the output beside it is 0, not NaN (flashinfer#5119).",
            _check_large_sink,
        ),
    ),
)

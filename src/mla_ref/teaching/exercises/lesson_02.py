"""The first exercise of lesson 02: merge two partial results."""

import torch
from torch import Tensor

from mla_ref.numerics import AttentionResult, oracle_attention
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import (
    expect_close,
    expect_parts,
    expect_same_bits,
    expect_tensor,
)

_ROWS, _HEADS, _D_V = 3, 2, 4
_INF = torch.inf


def _part(seed: int, lse: float | None = None) -> AttentionResult:
    """A partial result with random output; its LSE is random too, or the same in every row."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(_ROWS, _HEADS, _D_V, generator=generator)
    lses = torch.randn(_ROWS, _HEADS, generator=generator)
    return AttentionResult(out, lses if lse is None else torch.full_like(lses, lse))


def _empty() -> AttentionResult:
    return AttentionResult(torch.zeros(_ROWS, _HEADS, _D_V), torch.full((_ROWS, _HEADS), -_INF))


def _merged(merge: Function, a: AttentionResult, b: AttentionResult) -> AttentionResult:
    out, lse = expect_parts(merge(*a, *b), ("out", "lse"))
    return AttentionResult(
        expect_tensor(out, a.out.dtype, tuple(a.out.shape), "out"),
        expect_tensor(lse, a.lse.dtype, tuple(a.lse.shape), "lse"),
    )


def _expect(got: AttentionResult, out: Tensor, lse: Tensor) -> None:
    expect_close(got.lse, lse, "lse", max_abs=1e-5)
    expect_close(got.out, out, "out", max_abs=1e-5)


def _check_by_hand(merge: Function) -> None:
    # Sums of exponentials 2 and 8, outputs 0 and 10: (2 * 0 + 8 * 10) / (2 + 8) = 8.
    a = AttentionResult(torch.tensor([[[0.0]]]), torch.tensor([[2.0]]).log())
    b = AttentionResult(torch.tensor([[[10.0]]]), torch.tensor([[8.0]]).log())
    got = _merged(merge, a, b)
    _expect(got, torch.tensor([[[8.0]]]), torch.tensor([[10.0]]).log())


def _check_union(merge: Function) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(_ROWS, _HEADS, 8, generator=generator)
    k = torch.randn(11, _HEADS, 8, generator=generator)
    v = torch.randn(11, _HEADS, _D_V, generator=generator)
    everything = torch.ones(_ROWS, 11, dtype=torch.bool)

    def part(first: int, last: int) -> AttentionResult:
        keys = slice(first, last)
        out, lse = oracle_attention(q, k[keys], v[keys], everything[:, keys], softmax_scale=8**-0.5)
        return AttentionResult(out.float(), lse.float())

    whole = part(0, 11)
    for cut in (1, 5, 10):
        _expect(_merged(merge, part(0, cut), part(cut, 11)), *whole)


def _check_range(merge: Function) -> None:
    for lse_a, lse_b in ((300.0, 299.0), (-300.0, -301.0)):
        a, b = _part(3, lse_a), _part(4, lse_b)
        share = 1 / (1 + torch.tensor(lse_b - lse_a).exp())
        total = torch.tensor(lse_b - lse_a).exp().log1p() + lse_a
        got = _merged(merge, a, b)
        expect_close(got.lse, torch.full_like(a.lse, total.item()), "lse", max_abs=1e-4)
        expect_close(got.out, share * a.out + (1 - share) * b.out, "out", max_abs=1e-5)


def _check_identity(merge: Function) -> None:
    part = _part(5)
    for a, b in ((part, _empty()), (_empty(), part)):
        got = _merged(merge, a, b)
        expect_same_bits(got.lse, part.lse, "lse")
        expect_same_bits(got.out, part.out, "out")


def _check_two_empty(merge: Function) -> None:
    got = _merged(merge, _empty(), _empty())
    expect_same_bits(got.lse, _empty().lse, "lse")
    expect_same_bits(got.out, _empty().out, "out")


def _check_some_rows_empty(merge: Function) -> None:
    a, b = _part(6), _part(7)
    lse_a, lse_b = a.lse.clone(), b.lse.clone()
    lse_a[0], lse_b[0], lse_b[1] = -_INF, -_INF, -_INF
    got = _merged(merge, AttentionResult(a.out, lse_a), AttentionResult(b.out, lse_b))
    expect_close(
        got.out[0], torch.zeros_like(a.out[0]), "row 0 of out (empty in both parts)", max_abs=0.0
    )
    expect_close(got.out[1], a.out[1], "row 1 of out (empty in b)", max_abs=0.0)
    shares = torch.sigmoid(a.lse[2] - b.lse[2])[:, None]
    expect_close(
        got.out[2],
        shares * a.out[2] + (1 - shares) * b.out[2],
        "row 2 of out (full in both parts)",
        max_abs=1e-5,
    )


def _check_garbage(merge: Function) -> None:
    part = _part(8)
    garbage = AttentionResult(torch.full_like(part.out, torch.nan), _empty().lse)
    for a, b in ((part, garbage), (garbage, part)):
        expect_same_bits(_merged(merge, a, b).out, part.out, "out")
    expect_same_bits(_merged(merge, garbage, garbage).out, _empty().out, "out")


def _check_algebra(merge: Function) -> None:
    a, b, c = _part(9), _part(10, 2.0), _part(11, -3.0)
    _expect(_merged(merge, b, a), *_merged(merge, a, b))
    left = _merged(merge, _merged(merge, a, b), c)
    right = _merged(merge, a, _merged(merge, b, c))
    _expect(right, *left)


def _check_bfloat16(merge: Function) -> None:
    a, b = (AttentionResult(part.out.bfloat16(), part.lse) for part in (_part(12), _part(13)))
    shares = torch.sigmoid(a.lse - b.lse)[..., None]
    exact = shares * a.out.float() + (1 - shares) * b.out.float()
    got = _merged(merge, a, b)
    expect_close(got.lse, torch.logaddexp(a.lse, b.lse), "lse", max_abs=1e-5)
    # bfloat16 keeps 8 bits: one rounding errs by at most 2**-8 of the number.
    excess = (got.out.float() - exact).abs() / exact.abs()
    if bool((excess > 1.01 * 2.0**-8).any()):
        raise Complaint(
            f"out is off by up to {excess.max():.1e} of its size, expected at most "
            f"{2.0**-8:.1e}, which is one rounding to bfloat16"
        )


MERGE = Exercise(
    id="02-merge",
    title="Merge two partial results",
    task=(
        "Write `my_merge(out_a, lse_a, out_b, lse_b)`: attention over the union of two disjoint "
        "sets of keys. It returns `(out, lse)` in the dtypes of `out_a` and `lse_a`. LSEs are "
        "natural logarithms. `(0, -inf)` is an empty part: merging it changes nothing, to the "
        "last bit, and what lies in the `out` of an empty part may be uninitialised memory. "
        "LSEs of ±300 must not overflow."
    ),
    signature=(
        'def my_merge(\n    out_a: Float[Tensor, "*rows d_v"],\n'
        '    lse_a: Float[Tensor, "*rows"],\n'
        '    out_b: Float[Tensor, "*rows d_v"],\n    lse_b: Float[Tensor, "*rows"],\n'
        ') -> tuple[Float[Tensor, "*rows d_v"], Float[Tensor, "*rows"]]:'
    ),
    cases=(
        Case(
            "by hand: sums 2 and 8, outputs 0 and 10",
            "The heavier part must win, by exactly its share. Half and half would be 5, shares in "
            "base 2 would give 7.23, swapped shares 2.",
            _check_by_hand,
        ),
        Case(
            "the two halves of a cut equal the whole",
            "This is what merging is for.",
            _check_union,
        ),
        Case(
            "LSE of 300 and of -300",
            "exp(300) is inf in float32 and exp(-300) is 0. Scores like these are rare but legal.",
            _check_range,
        ),
        Case(
            "an empty part changes no bit",
            "A split beyond the end of a short request, a rank that owns none of its keys. If "
            "merging it rounds, then the result depends on how many splits there were.",
            _check_identity,
        ),
        Case(
            "two empty parts",
            "-inf minus -inf is NaN. Padded rows of a batch meet here, and one NaN is enough to "
            "spoil a whole tensor's quantisation scale.",
            _check_two_empty,
        ),
        Case(
            "some rows empty, some not",
            "Requests of different lengths are merged in one call.",
            _check_some_rows_empty,
        ),
        Case(
            "NaN in the output of an empty part",
            "A kernel that had nothing to do may not have written its output at all. 0 * NaN is "
            "NaN.",
            _check_garbage,
        ),
        Case(
            "the order and the grouping do not matter",
            "Splits finish in any order, and ranks are reduced in a tree.",
            _check_algebra,
        ),
        Case(
            "bfloat16 outputs, float32 LSEs",
            "Partial outputs are often stored in bfloat16. The arithmetic should not be.",
            _check_bfloat16,
        ),
    ),
)

"""merge: attention over disjoint key sets, put together."""

import math

import pytest
import torch
from tests.support import NothingReadBack, assert_agrees, assert_same_bits, bits, random_qkv, raw

from mla_ref.numerics import AttentionResult, merge, merge_many, oracle_attention

INF, NAN = math.inf, math.nan
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


def part(seed: int, rows=(5, 3), d=4, dtype=torch.float64, lse_dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return AttentionResult(
        torch.randn(*rows, d, generator=g, dtype=torch.float64).to(dtype),
        (3 * torch.randn(*rows, generator=g, dtype=torch.float64)).to(lse_dtype),
    )


def empty_like(result: AttentionResult, garbage: float = 0.0) -> AttentionResult:
    return AttentionResult(torch.full_like(result.out, garbage), torch.full_like(result.lse, -INF))


def test_two_parts_by_hand() -> None:
    """Sums 1 and 3: weights 1/4 and 3/4, so outputs 8 and 4 give 2 + 3 = 5; the sum is 4."""
    out, lse = merge(
        torch.tensor([[8.0]], dtype=torch.float64),
        torch.tensor([math.log(1)], dtype=torch.float64),
        torch.tensor([[4.0]], dtype=torch.float64),
        torch.tensor([math.log(3)], dtype=torch.float64),
    )
    assert out.item() == pytest.approx(5.0, abs=1e-15)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


@pytest.mark.parametrize(("dtype", "lse_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("garbage", [0.0, -0.0, NAN, INF, -INF, 1e30], ids=str)
def test_B066_the_empty_part_is_the_identity_bit_for_bit(dtype, lse_dtype, garbage) -> None:
    x = part(1, dtype=dtype, lse_dtype=lse_dtype)
    x.out[0, 0] = torch.tensor([0.0, -0.0, 1.0, -1e-30]).to(dtype)
    x.lse[0] = torch.tensor([0.0, -0.0, 1e4], dtype=lse_dtype)
    x.out[1, 1, 2] = INF  # what the other part really holds is kept, too
    nothing = empty_like(x, min(garbage, torch.finfo(dtype).max) if garbage == 1e30 else garbage)
    assert_same_bits(merge(*x, *nothing), x)
    assert_same_bits(merge(*nothing, *x), x)
    stack = [nothing, nothing, x, nothing]
    assert_same_bits(
        merge_many(torch.stack([s.out for s in stack]), torch.stack([s.lse for s in stack])), x
    )


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("garbage", [0.0, NAN, INF], ids=str)
def test_B066_nothing_but_empty_parts(count: int, garbage: float) -> None:
    """-inf minus -inf is NaN in a naive merge."""
    out, lse = merge_many(torch.full((count, 2, 3, 4), garbage), torch.full((count, 2, 3), -INF))
    assert torch.equal(bits(out), bits(torch.zeros(2, 3, 4)))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_no_part_at_all() -> None:
    out, lse = merge_many(torch.empty(0, 2, 3, 4), torch.empty(0, 2, 3))
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_one_part_is_itself() -> None:
    x = part(2)
    assert_same_bits(merge_many(x.out[None], x.lse[None]), x)


def test_rows_are_merged_on_their_own() -> None:
    """A row that one part left empty takes the other's, next to rows that have both."""
    a, b = part(3), part(4)
    a.lse[0], a.out[0] = -INF, NAN
    b.lse[1], b.out[1] = -INF, NAN
    a.lse[2], b.lse[2] = -INF, -INF
    a.out[2], b.out[2] = NAN, NAN
    out, lse = merge(*a, *b)
    assert torch.equal(out[0], b.out[0]) and torch.equal(lse[0], b.lse[0])
    assert torch.equal(out[1], a.out[1]) and torch.equal(lse[1], a.lse[1])
    assert (out[2] == 0).all() and (lse[2] == -INF).all()
    alone = merge(a.out[3:], a.lse[3:], b.out[3:], b.lse[3:])
    assert torch.equal(out[3:], alone.out) and torch.equal(lse[3:], alone.lse)


def test_order_changes_rounding_only() -> None:
    a, b, c = part(5), part(6), part(7)
    left = merge(*merge(*a, *b), *c)
    right = merge(*a, *merge(*b, *c))
    assert_agrees(left, right, rel_l2=1e-15, lse_abs=1e-14)
    assert_agrees(merge(*a, *b), merge(*b, *a), rel_l2=1e-15, lse_abs=1e-14)
    at_once = merge_many(torch.stack([a.out, b.out, c.out]), torch.stack([a.lse, b.lse, c.lse]))
    assert_agrees(at_once, left, rel_l2=1e-15, lse_abs=1e-14)


def attention_over(q, k, v, keys: slice, visible) -> AttentionResult:
    return oracle_attention(q, k[keys], v[keys], visible[:, keys], softmax_scale=0.4)


@pytest.mark.parametrize("cut", range(10))
def test_attention_split_at_any_cut_merges_to_the_whole(cut: int) -> None:
    q, k, v = random_qkv(4, 9)
    visible = torch.arange(9) <= torch.arange(4)[:, None] + 5
    visible[3] = False  # a row that sees nothing in either part
    whole = attention_over(q, k, v, slice(None), visible)
    left = attention_over(q, k, v, slice(cut), visible)
    right = attention_over(q, k, v, slice(cut, None), visible)
    assert_agrees(merge(*left, *right), whole, rel_l2=1e-15, lse_abs=1e-14)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 6, 16, 64])
def test_B072_more_splits_than_keys(splits: int) -> None:
    """Five keys in 16 splits: most are empty, and hold what the memory held before."""
    q, k, v = random_qkv(3, 5)
    visible = torch.ones(3, 5, dtype=torch.bool)
    size = -(-5 // splits)
    outs = torch.full((splits, 3, 4, 6), NAN, dtype=torch.float64)
    lses = torch.full((splits, 3, 4), -INF, dtype=torch.float64)
    for i in range(splits):
        if i * size < 5:
            outs[i], lses[i] = attention_over(q, k, v, slice(i * size, (i + 1) * size), visible)
    whole = attention_over(q, k, v, slice(None), visible)
    assert_agrees(merge_many(outs, lses), whole, rel_l2=1e-15, lse_abs=1e-14)


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16, 32])
def test_B074_the_same_call_gives_the_same_bits(splits: int) -> None:
    parts = [part(i, dtype=torch.float32, lse_dtype=torch.float32) for i in range(splits)]
    outs, lses = torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])
    lses[splits // 2, 0] = -INF
    first = merge_many(outs, lses)
    assert first.out.isfinite().all()
    for _ in range(50):
        assert_same_bits(merge_many(outs, lses), first)


def test_far_apart_and_far_out() -> None:
    """LSEs of +-1e4 neither overflow nor lose the part that matters."""
    a, b = part(8), part(9)
    heavy = AttentionResult(a.out, torch.full_like(a.lse, 1e4))
    light = AttentionResult(b.out, torch.full_like(b.lse, -1e4))
    assert_same_bits(merge(*heavy, *light), heavy)
    twice = merge(*heavy, *heavy)
    assert torch.equal(twice.out, a.out)
    assert twice.lse.flatten().tolist() == pytest.approx([1e4 + math.log(2)] * 15, rel=1e-15)


def test_nan_stays_visible() -> None:
    a, b = part(10), part(11)
    a.lse[0, 0] = NAN
    b.out[1, 1, 0] = NAN
    out, lse = merge(*a, *b)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan()
    assert out[1, 1, 0].isnan() and out[1, 1, 1:].isfinite().all()
    assert int(out.isnan().sum()) == 4 + 1


def test_low_precision_outputs_keep_their_dtype() -> None:
    a = part(12, dtype=torch.bfloat16, lse_dtype=torch.float32)
    b = part(13, dtype=torch.bfloat16, lse_dtype=torch.float32)
    got = merge(*a, *b)
    assert (got.out.dtype, got.lse.dtype) == (torch.bfloat16, torch.float32)
    exact = merge(a.out.double(), a.lse.double(), b.out.double(), b.lse.double())
    # Rounded once, at the end: half a unit of bfloat16 and float32's own error.
    limit = exact.out.abs() * 2**-8 + 1e-6
    assert ((got.out.double() - exact.out).abs() <= limit).all()


@pytest.mark.parametrize("function", [merge, merge_many])
def test_B073_an_lse_in_bfloat16_is_refused(function) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = part(14, dtype=dtype, lse_dtype=dtype)
        arguments = (*x, *x) if function is merge else (x.out[None], x.lse[None])
        with pytest.raises(TypeError, match="lse"):
            raw(function)(*arguments)


def test_plus_inf_is_refused_and_can_be_let_through() -> None:
    x = part(15)
    marked = AttentionResult(x.out, x.lse.clone())
    marked.lse[0, 0] = INF
    with pytest.raises(ValueError, match=r"\+inf"):
        merge(*x, *marked)
    # Without the check (a captured GPU step) the row becomes NaN: wrong input stays visible.
    out, lse = merge(*x, *marked, validate=False)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan()
    assert out[1:].isfinite().all()


def test_without_validation_nothing_is_read_back() -> None:
    a, b = part(19), part(20)
    b.lse[0] = -INF
    stacked = torch.stack([a.out, b.out]), torch.stack([a.lse, b.lse])
    with NothingReadBack():
        two = merge(*a, *b, validate=False)
        many = merge_many(*stacked, validate=False)
    assert_same_bits(two, merge(*a, *b))
    assert_same_bits(many, two)
    with NothingReadBack(), pytest.raises(AssertionError, match="reads back"):
        merge(*a, *b)  # the check itself does


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"out_b": torch.zeros(5, 3, 3)}, "out_b"),
        ({"out_b": torch.zeros(5, 3, 4)}, "out_b"),  # another dtype
        ({"lse_b": torch.zeros(5, 1, dtype=torch.float64)}, "lse_b"),
        ({"lse_a": torch.zeros(5), "lse_b": torch.zeros(5)}, "lse"),
        ({"out_a": None}, "out_a"),
        ({"lse_a": 0.0}, "lse_a"),
    ],
    ids=["d", "dtype", "lse shape", "both lse", "none", "number"],
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    x = part(16)
    good = {"out_a": x.out, "lse_a": x.lse, "out_b": x.out, "lse_b": x.lse}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(merge)(**(good | changed))


def test_many_names_bad_input() -> None:
    for outs, lses, name in [
        (None, torch.zeros(2, 3), "out"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3), "out"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), "lse"),
        (torch.zeros(4), torch.zeros(()), "lse"),
        (torch.zeros(2, 3, 4), None, "lse"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(merge_many)(outs, lses)


def test_inputs_stay_as_they_are() -> None:
    a, b = part(17), part(18)
    a.lse[0] = -INF
    before = [x.clone() for x in (*a, *b)]
    merge(*a, *b)
    for x, old in zip((*a, *b), before, strict=True):
        assert torch.equal(bits(x), bits(old))


@pytest.mark.parametrize("parts", [2, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(
    parts: int, dtype: torch.dtype
) -> None:
    """A sum over 16 parts that is left to torch takes an order by the place of the number."""
    outs, lses = torch.randn(parts, 20, 3, 6, dtype=dtype), torch.randn(parts, 20, 3, dtype=dtype)
    whole, order = merge_many(outs, lses), torch.randperm(20)
    some = AttentionResult(whole.out[order], whole.lse[order])
    assert_same_bits(merge_many(outs[:, order], lses[:, order]), some)
    for rows in (1, 2, 3, 7, 19):
        alone = AttentionResult(whole.out[:rows], whole.lse[:rows])
        assert_same_bits(merge_many(outs[:, :rows], lses[:, :rows]), alone)

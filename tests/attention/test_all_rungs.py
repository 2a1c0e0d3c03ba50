"""What all rungs keep alike: every one of 1 to 4 gets the same hostile queries, keys and values."""

import math

import pytest
import torch
from tests.support import (
    DENSE_RUNGS,
    assert_agrees,
    assert_same_bits,
    bits,
    causal_oracle,
    random_qkv,
)

from mla_ref.numerics import AttentionResult, compare, merge, precision_rule

NAN, INF = math.nan, math.inf
rungs = pytest.mark.parametrize("rung", DENSE_RUNGS.values(), ids=DENSE_RUNGS.keys())


@rungs
@pytest.mark.parametrize(
    ("s_q", "s_kv"), [(1, 1), (6, 6), (1, 17), (4, 17), (7, 3), (0, 5), (5, 0), (0, 0)]
)
def test_against_the_oracle(rung, s_q: int, s_kv: int) -> None:
    q, k, v = random_qkv(s_q, s_kv, h_q=6, h_kv=2)
    if rung is DENSE_RUNGS["paged"] and s_q > s_kv:
        # A request's new tokens are in the cache before they attend: fewer keys is an error there.
        with pytest.raises(ValueError, match=r"seq_lens\[0\] is .*, fewer"):
            rung(q, k, v, 0.35)
        return
    assert_agrees(rung(q, k, v, 0.35), causal_oracle(q, k, v, 0.35), rel_l2=1e-14)


@rungs
def test_B077_bottom_right(rung) -> None:
    """2 rows over 5 equal keys see 4 and 5 of them; of 5 rows over 2 keys the first 3 see none."""
    q, k, v = random_qkv(2, 5)
    _, lse = rung(q, torch.zeros_like(k), v, 1.0)
    assert lse.exp().tolist() == [pytest.approx([4.0] * 4), pytest.approx([5.0] * 4)]
    if rung is DENSE_RUNGS["paged"]:
        return  # refuses more rows than keys, see above
    q, k, v = random_qkv(5, 2)
    out, lse = rung(q, k, v, 1.0)
    assert (out[:3] == 0).all() and (lse[:3] == -INF).all()
    assert lse[3:].isfinite().all()


@rungs
def test_B083_key_and_value_of_different_width(rung) -> None:
    q, k, v = random_qkv(3, 9, d_qk=24, d_v=16)
    result = rung(q, k, v, 0.2)
    assert result.out.shape == (3, 4, 16)
    assert_agrees(result, causal_oracle(q, k, v, 0.2), rel_l2=1e-14)


@rungs
def test_B084_two_groups_of_24_heads(rung) -> None:
    """One KV head hides a wrong divisor, two show it."""
    q, k, v = random_qkv(2, 6, h_q=48, h_kv=2)
    assert_agrees(rung(q, k, v, 0.35), causal_oracle(q, k, v, 0.35), rel_l2=1e-14)


@rungs
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 24, 40, 128])
def test_B085_any_number_of_heads(rung, heads: int) -> None:
    for h_kv in {1, heads}:
        q, k, v = random_qkv(2, 5, h_q=heads, h_kv=h_kv)
        result = rung(q, k, v, 0.35)
        assert result.out.shape == (2, heads, 6)
        assert_agrees(result, causal_oracle(q, k, v, 0.35), rel_l2=1e-14)


@rungs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_the_precision_rule(rung, dtype: torch.dtype) -> None:
    """The twin rounds scores, weights and products to the inputs' dtype."""
    q, k, v = random_qkv(16, 40, d_qk=32, d_v=32, dtype=dtype)
    result = rung(q, k, v, 0.2)
    assert (result.out.dtype, result.lse.dtype) == (dtype, torch.float32)
    scores = torch.einsum("shd,thd->sht", q, k.repeat_interleave(2, 1)) * 0.2
    late = torch.arange(40) > torch.arange(16)[:, None] + 24
    weights = scores.masked_fill(late[:, None], -INF).softmax(-1)
    twin = torch.einsum("sht,thd->shd", weights, v.repeat_interleave(2, 1))
    oracle = causal_oracle(q, k, v, 0.2)
    verdict = precision_rule(result.out, oracle.out, twin)
    assert verdict.passed, verdict
    # float32 inside: the LSE is as exact as from float32 inputs, far beyond bfloat16.
    assert compare(result.lse, oracle.lse).agrees(max_abs=1e-5)


@rungs
@pytest.mark.parametrize("magnitude", [1e4, 1e6, 1e30])
def test_large_scores_do_not_overflow(rung, magnitude: float) -> None:
    """exp(89) is inf in float32. Scores of +-magnitude, exact in float32: the highest one wins."""
    k = magnitude * torch.tensor([1.0, -1.0, 0.5, 1.0, -0.5, 0.0, -1.0]).reshape(-1, 1, 1)
    v = torch.tensor([3.0, 9.0, 9.0, 5.0, 9.0, 9.0, 9.0]).reshape(-1, 1, 1)
    for sign, out, lse in ((1.0, 4.0, math.log(2)), (-1.0, 9.0, math.log(2))):
        result = rung(torch.full((1, 1, 1), sign), k, v, 1.0)
        assert result.out.item() == out
        assert result.lse.item() == pytest.approx(magnitude + lse, rel=1e-6)


@rungs
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["key", "value", "both"])
def test_masked_means_untouched(rung, bad: float, what: str) -> None:
    """A token that only the last row sees: the other rows keep their numbers."""
    q, k, v = random_qkv(4, 12, dtype=torch.float32)
    clean = rung(q, k, v, 0.35)
    if what != "value":
        k[11] = bad
    if what != "key":
        v[11] = bad
    dirty = rung(q, k, v, 0.35)
    assert torch.equal(dirty.out[:3], clean.out[:3])
    assert torch.equal(dirty.lse[:3], clean.lse[:3])


@rungs
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_query_that_is_no_number_spoils_its_own_row_and_head(rung, bad: float) -> None:
    """Such as a padded row of uninitialised memory."""
    q, k, v = random_qkv(4, 12, dtype=torch.float32)
    clean = rung(q, k, v, 0.35)
    q[1, 2] = bad
    dirty = rung(q, k, v, 0.35)
    assert dirty.out[1, 2].isnan().all() and dirty.lse[1, 2].isnan()
    dirty.out[1, 2], dirty.lse[1, 2] = clean.out[1, 2], clean.lse[1, 2]
    assert torch.equal(dirty.out, clean.out) and torch.equal(dirty.lse, clean.lse)


@rungs
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("token", [0, 4, 9, 11])
def test_what_is_seen_has_one_pattern_in_all_rungs(rung, bad: float, what: str, token: int) -> None:
    """One number of one KV head is bad: the oracle says which outputs are NaN, which inf."""
    q, k, v = random_qkv(4, 12)
    (k if what == "key" else v)[token, 1, 3] = bad
    actual, expected = rung(q, k, v, 0.35), causal_oracle(q, k, v, 0.35)
    assert not expected.out.isfinite().all() or bad == -INF or what == "key"
    assert_agrees(actual, expected, rel_l2=1e-14)


@rungs
def test_a_score_of_minus_inf_that_is_seen_weighs_nothing(rung) -> None:
    """Also where it is the only key: a row whose scores are all -inf is like an empty one."""
    k = torch.tensor([-INF, 0.0, -INF, 1.0]).reshape(4, 1, 1)
    v = torch.tensor([7.0, 2.0, 7.0, 4.0]).reshape(4, 1, 1)
    out, lse = rung(torch.ones(4, 1, 1), k, v, 1.0)
    assert out[0].item() == 0 and lse[0].item() == -INF
    assert out[1].item() == out[2].item() == 2.0
    e = math.e
    assert out[3].item() == pytest.approx((2 + 4 * e) / (1 + e), rel=1e-6)


@rungs
def test_B088_strides_of_any_kind(rung) -> None:
    """Head-major tensors, every second token, parts of one fused projection."""
    q, k, v = random_qkv(5, 9)
    expected = rung(q, k, v, 0.35)
    fused = torch.cat([k, v], dim=-1)
    doubled = torch.full((18, 2, 6), NAN, dtype=torch.float64)
    doubled[::2] = v
    views = [
        (q.transpose(0, 1).contiguous().transpose(0, 1), fused[..., :8], fused[..., 8:]),
        (q.flip(0).contiguous().flip(0), k.permute(2, 0, 1).contiguous().permute(1, 2, 0), v),
        (q, k, doubled[::2]),
    ]
    for q_view, k_view, v_view in views:
        assert_agrees(rung(q_view, k_view, v_view, 0.35), expected, rel_l2=1e-14)
    # A value shared by all tokens, without memory of its own for each.
    same = v[:1].expand(9, 2, 6)
    assert_agrees(rung(q, k, same, 0.35), rung(q, k, same.contiguous(), 0.35), rel_l2=1e-14)


@rungs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_inputs_stay_as_they_are_and_bits_repeat(rung, dtype: torch.dtype) -> None:
    q, k, v = random_qkv(5, 13, dtype=dtype)
    v[2, 0, 1] = NAN
    before = [bits(x).clone() for x in (q, k, v)]
    first = rung(q, k, v, 0.35)
    for _ in range(3):
        assert_same_bits(rung(q, k, v, 0.35), first)
    for x, old in zip((q, k, v), before, strict=True):
        assert torch.equal(bits(x), old)


@rungs
@pytest.mark.parametrize("cut", range(1, 12))
def test_attention_split_at_any_cut_merges_to_the_whole(rung, cut: int) -> None:
    """The last row over the keys before and after the cut; LSEs of every rung fit one merge."""
    q, k, v = random_qkv(1, 12)
    left = rung(q, k[:cut], v[:cut], 0.35)
    right = rung(q, k[cut:], v[cut:], 0.35)
    assert_agrees(merge(*left, *right), rung(q, k, v, 0.35), rel_l2=1e-14)


@rungs
def test_B151_one_step_at_a_time_is_the_whole(rung) -> None:
    """With the keys cached, token by token gives what one call over all tokens gives."""
    q, k, v = random_qkv(11, 11)
    steps = [rung(q[i : i + 1], k[: i + 1], v[: i + 1], 0.35) for i in range(11)]
    at_once = rung(q, k, v, 0.35)
    together = AttentionResult(torch.cat([s.out for s in steps]), torch.cat([s.lse for s in steps]))
    assert_agrees(together, at_once, rel_l2=1e-14)


@rungs
def test_B151_the_future_does_not_matter(rung) -> None:
    q, k, v = random_qkv(9, 9, dtype=torch.float32)
    before = rung(q, k, v, 0.35)
    k[5:], v[5:] = 1e5, -1e5
    after = rung(q, k, v, 0.35)
    assert torch.equal(after.out[:5], before.out[:5]) and torch.equal(after.lse[:5], before.lse[:5])
    assert not torch.equal(after.out[5:], before.out[5:])

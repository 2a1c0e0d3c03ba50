"""Log-sum-exp conventions: bases, empty rows, the sink."""

import math

import pytest
import torch
from tests.support import bits, raw

from mla_ref.numerics import (
    AttentionResult,
    apply_sink,
    blank_empty_rows,
    compute_dtype,
    lse_dtype,
    merge,
    oracle_attention,
    to_natural_lse,
)

INF, NAN = math.inf, math.nan
LN2 = math.log(2)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_B076_the_lse_of_two_keys_is_ln_4() -> None:
    """Logits 0 and ln 3: exp gives 1 + 3 = 4. A stray log2(e) would make it log2(4) = 2."""
    q = torch.ones(1, 1, 1)
    k = t(0.0, math.log(3)).reshape(2, 1, 1)
    out, lse = oracle_attention(
        q, k, t(0, 4).reshape(2, 1, 1), torch.ones(1, 2, dtype=torch.bool), softmax_scale=1.0
    )
    assert lse.item() == pytest.approx(1.3862943611, abs=1e-10)
    assert out.item() == pytest.approx(3.0, abs=1e-15)  # 0 * 1/4 + 4 * 3/4


def merged(lse_a: float, lse_b: float) -> float:
    """Outputs 0 and 10 of two parts, merged with these LSEs."""
    return float(merge(t(0.0)[None], t(lse_a), t(10.0)[None], t(lse_b)).out)


def test_B110_natural_lse_read_as_base_two() -> None:
    """Sums 2 and 8: the weights are 1/5 and 4/5, so outputs 0 and 10 give 8."""
    assert merged(math.log(2), math.log(8)) == pytest.approx(8.0, abs=1e-12)
    # The bug: 2^lse in place of e^lse, that is the natural LSE shrunk by ln 2.
    assert merged(math.log(2) * LN2, math.log(8) * LN2) == pytest.approx(7.2330317, abs=1e-7)
    # The opposite bug: log2 sums 1 and 3 taken as natural ones.
    assert merged(1.0, 3.0) == pytest.approx(8.8079708, abs=1e-7)
    # The cure.
    lse = to_natural_lse(t(1.0, 3.0), base="2")
    assert merged(float(lse[0]), float(lse[1])) == pytest.approx(8.0, abs=1e-12)


def test_B111_the_newest_tokens_lose_their_weight() -> None:
    """Equal scores, 3072 cached and 64 new tokens: the new ones weigh 64 / 3136."""

    def new_tokens_weight(lse_prefix: float, lse_suffix: float) -> float:
        return merged(lse_prefix, lse_suffix) / 10

    assert new_tokens_weight(math.log(3072), math.log(64)) == pytest.approx(0.0204082, abs=1e-7)
    assert new_tokens_weight(math.log2(3072), math.log2(64)) == pytest.approx(0.0037399, abs=1e-7)
    lse = to_natural_lse(t(math.log2(3072), math.log2(64)), base="2")
    assert new_tokens_weight(*lse.tolist()) == pytest.approx(64 / 3136, abs=1e-12)
    # The two bases of one sum differ by this factor.
    assert math.log2(64) / math.log(64) == pytest.approx(1.442695, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversions(dtype: torch.dtype) -> None:
    lse = torch.tensor([0.0, 3.0, -2.0, -INF, NAN], dtype=dtype)
    assert torch.equal(bits(to_natural_lse(lse, base="e")), bits(lse))
    converted = to_natural_lse(lse, base="2")
    assert converted.dtype == dtype
    assert converted[:3].tolist() == pytest.approx([0.0, 3 * LN2, -2 * LN2], rel=1e-6)
    assert converted[3] == -INF and converted[4].isnan()


def test_B067_a_peer_that_marks_empty_rows_with_plus_inf() -> None:
    """FlashMLA's empty rows: +inf is not a weight. It is converted by name, else refused."""
    x, l_x = torch.randn(1, 3, dtype=torch.float64), t(0.7)
    garbage = torch.full((1, 3), NAN, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"lse_a and lse_b must not hold \+inf"):
        merge(garbage, t(INF), x, l_x)
    lse = to_natural_lse(t(INF), base="e", empty="+inf")
    assert lse.tolist() == [-INF]
    result = merge(garbage, lse, x, l_x)
    assert torch.equal(result.out, x) and torch.equal(result.lse, l_x)
    assert to_natural_lse(t(INF, 2.0, -INF), base="2", empty="+inf").tolist() == [
        -INF,
        pytest.approx(2 * LN2),
        -INF,
    ]
    # Not asked for, nothing is converted: a +inf elsewhere is an error that must stay visible.
    assert to_natural_lse(t(INF), base="e").tolist() == [INF]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_B073_a_narrow_lse_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="lse"):
        raw(to_natural_lse)(torch.ones(3, dtype=dtype), base="e")


def test_B073_what_bfloat16_would_lose() -> None:
    """Near 8.7 bfloat16 steps by 1/16, so an LSE errs by up to 0.03: a factor of exp(0.03)."""
    lse = torch.linspace(8.70, 8.73, 31, dtype=torch.float64)
    error = (lse.to(torch.bfloat16).double() - lse).abs().max().item()
    assert 0.02 < error <= 1 / 32
    assert lse_dtype(torch.bfloat16) == torch.float32
    assert lse_dtype(torch.float64) == torch.float64
    assert compute_dtype(torch.ones(1, dtype=torch.bfloat16)) == torch.float32
    assert compute_dtype(torch.ones(1), torch.ones(1, dtype=torch.float64)) == torch.float64


def test_conversion_asks_for_known_words() -> None:
    for arguments in ({"base": "10"}, {"base": 2}, {"base": "e", "empty": "inf"}):
        name = "empty" if "empty" in arguments else "base"
        with pytest.raises(ValueError, match=name):
            raw(to_natural_lse)(t(1.0), **arguments)
    with pytest.raises(TypeError, match="lse"):
        raw(to_natural_lse)([1.0], base="e")


def test_B068_an_empty_row_with_a_finite_lse() -> None:
    """Chunk lengths 64 and 0: whatever the kernel left in row 1 becomes (0, -inf)."""
    out = torch.randn(2, 3, 4)
    lse = torch.randn(2, 3)
    out[1], lse[1] = 7.0, 0.3
    blank = blank_empty_rows(AttentionResult(out, lse), torch.tensor([64, 0]))
    assert torch.equal(blank.out[0], out[0]) and torch.equal(blank.lse[0], lse[0])
    assert torch.equal(blank.out[1], torch.zeros(3, 4))
    assert torch.equal(blank.lse[1], torch.full((3,), -INF))
    assert (out[1] == 7.0).all()  # the caller's tensors stay as they are


def test_blanking_removes_nan_and_keeps_the_rest() -> None:
    out, lse = torch.full((3, 1, 2), NAN), torch.full((3, 1), NAN)
    out[2], lse[2] = 5.0, 1.0
    blank = blank_empty_rows(AttentionResult(out, lse), torch.tensor([0, -1, 1], dtype=torch.int32))
    assert blank.out[:2].tolist() == [[[0.0, 0.0]]] * 2
    assert blank.lse.flatten().tolist() == [-INF, -INF, 1.0]
    assert (blank.out[2] == 5.0).all()


@pytest.mark.parametrize("name", ["result", "visible_lens"])
def test_blanking_names_bad_input(name: str) -> None:
    good = {
        "result": AttentionResult(torch.zeros(2, 3, 4), torch.zeros(2, 3)),
        "visible_lens": torch.tensor([1, 0]),
    }
    wrong = {
        "result": [
            None,
            AttentionResult(torch.zeros(2, 3, 4), torch.zeros(2, 1)),
            AttentionResult(torch.zeros(2, 3), torch.zeros(2)),
            AttentionResult(torch.zeros(2, 3, 4), torch.zeros(2, 3).bfloat16()),
        ],
        "visible_lens": [None, torch.tensor([1]), torch.tensor([1.0, 0.0]), torch.tensor(1)],
    }
    for value in wrong[name]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(blank_empty_rows)(**(good | {name: value}))


def sunk(lse: float, sink: float) -> float:
    """An output of 1 with this LSE, after a sink of this score."""
    result = AttentionResult(torch.ones(1, 1, 1), torch.tensor([[lse]]))
    return float(apply_sink(result, torch.tensor([sink])))


@pytest.mark.parametrize(
    ("lse", "sink", "factor"),
    [
        (0.0, 1e5, 0.0),
        (0.0, -1e5, 1.0),
        (1e4, 1e4, 0.5),
        (3.0, -INF, 1.0),
        (math.log(3), 0.0, 0.75),  # sums 3 and 1
        (math.log(1), math.log(4), 0.2),  # sums 1 and 4
        (3.0, INF, 0.0),
    ],
)
def test_B075_the_sink_is_a_sigmoid(lse: float, sink: float, factor: float) -> None:
    assert sunk(lse, sink) == pytest.approx(factor, abs=1e-7)


@pytest.mark.parametrize("sink", [0.0, -INF, 1e5])
def test_B075_an_empty_row_stays_empty(sink: float) -> None:
    result = AttentionResult(torch.zeros(1, 1, 2), torch.full((1, 1), -INF))
    assert apply_sink(result, torch.tensor([sink])).tolist() == [[[0.0, 0.0]]]


def test_the_sink_is_one_more_key_of_value_zero() -> None:
    q, k, v = torch.randn(3, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    visible = torch.ones(3, 5, dtype=torch.bool)
    result = oracle_attention(q, k, v, visible, softmax_scale=0.5)
    sink = torch.tensor([0.3, -1.2], dtype=torch.float64)
    scores = torch.einsum("shd,thd->sht", q.double(), k.double()) * 0.5
    with_sink = torch.cat([scores, sink[None, :, None].expand(3, 2, 1)], dim=-1).softmax(-1)
    expected = torch.einsum("sht,thd->shd", with_sink[..., :5], v.double())
    assert torch.allclose(apply_sink(result, sink), expected, rtol=0, atol=1e-14)


def test_a_bfloat16_output_is_rounded_once() -> None:
    out = torch.randn(64, 4, 8, dtype=torch.float64)
    lse, sink = torch.randn(64, 4), torch.randn(4)
    exact = out.bfloat16().double() * torch.sigmoid(lse.double() - sink.double())[..., None]
    got = apply_sink(AttentionResult(out.bfloat16(), lse), sink)
    assert got.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16 is at most 2^-8 of a number; float32 adds its own.
    assert ((got.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()


@pytest.mark.parametrize("name", ["result", "sink"])
def test_the_sink_names_bad_input(name: str) -> None:
    good = {
        "result": AttentionResult(torch.zeros(2, 3, 4), torch.zeros(2, 3)),
        "sink": torch.zeros(3),
    }
    wrong = {
        "result": [None, AttentionResult(torch.zeros(2, 3, 4), torch.zeros(2, 2))],
        "sink": [None, 0.0, torch.zeros(1), torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)],
    }
    for value in wrong[name]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(apply_sink)(**(good | {name: value}))

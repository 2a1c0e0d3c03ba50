"""The rejection rule: its law exactly, its walk, and the ways in which others got it wrong."""

import itertools
import math

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
import hypothesis
import torch
from hypothesis import strategies as st
from tests.support import NothingReadBack, bits, raw
from torch import Tensor

from mla_ref.speculative import Verified, position_noise, rejection_sample
from mla_ref.speculative.rejection import accept_drafts, race, recovery_weights

ALWAYS, NEVER = 1e-300, 1.0  # uniforms: any p(x) > 0 passes the first, p(x) < q(x) fails the second


def one_request(
    p: Tensor,
    drafts: list[int],
    q: Tensor | None = None,
    *,
    uniform: list[float] | None = None,
    exponential: Tensor | None = None,
) -> Verified:
    """One request; without noise named, every draft with p > 0 passes and E is 1."""
    rows = len(drafts) + 1
    return rejection_sample(
        p,
        torch.tensor([0, rows]),
        torch.tensor([*drafts, -1]),
        q,
        torch.tensor(uniform or [ALWAYS] * rows, dtype=torch.float64),
        torch.ones_like(p) if exponential is None else exponential,
        len(drafts),
    )


def law(*weights: float) -> Tensor:
    tensor = torch.tensor(weights, dtype=torch.float64)
    return tensor / tensor.sum()


def acceptance(p: Tensor, x: int, q: Tensor | None) -> float:
    """P(u <= threshold), and that the rule's threshold is there, to the last bit of u."""
    probability = min(1.0, float(p[x] / (1.0 if q is None else q[x])))

    def accepted(u: float) -> bool:
        uniform = torch.tensor([u], dtype=torch.float64)
        rows = None if q is None else q[None]
        return bool(accept_drafts(p[None], torch.tensor([x]), rows, uniform))

    if probability > 0:
        assert accepted(probability)
    if probability < 1:
        assert not accepted(math.nextafter(probability, 2))
    return probability


def emitted_law(p: Tensor, q: Tensor, *, chosen: bool = False) -> Tensor:
    """The law of the token at one place, over all drafts, uniforms and exponentials."""
    result = torch.zeros_like(p)
    given = None if chosen else q
    for x in range(len(p)):
        if q[x] == 0:
            continue
        kept = acceptance(p, x, given)
        rows = None if given is None else given[None]
        weights = recovery_weights(p[None], torch.tensor([x]), rows)[0]
        result += q[x] * (1 - kept) * weights / weights.sum()
        result[x] += q[x] * kept
    return result


EXAMPLES = {
    "crossing": (law(5, 3, 2), law(2, 3, 5)),
    "q zero where p is not": (law(5, 3, 2), law(0, 7, 3)),
    "p zero where q is not": (law(0, 1, 1), law(1, 1, 0)),
    "nothing in common": (law(1, 0, 1, 0), law(0, 1, 0, 3)),
    "p one-hot": (law(0, 1, 0), law(1, 1, 1)),
    "q one-hot": (law(1, 1, 2), law(0, 0, 1)),
    "both one-hot, equal": (law(0, 0, 1), law(0, 0, 1)),
    "both one-hot, unequal": (law(0, 1, 0), law(0, 0, 1)),
    "p == q": (law(1, 2, 3, 4), law(1, 2, 3, 4)),
    "one token": (law(1), law(1)),
}


@pytest.mark.parametrize("p, q", EXAMPLES.values(), ids=EXAMPLES)
def test_the_law_is_the_targets(p: Tensor, q: Tensor) -> None:
    assert emitted_law(p, q).tolist() == pytest.approx(p.tolist(), abs=1e-15)
    for x in range(len(p)):
        one_hot = torch.eye(len(p), dtype=torch.float64)[x]
        for chosen in (True, False):
            got = emitted_law(p, one_hot, chosen=chosen)
            assert got.tolist() == pytest.approx(p.tolist(), abs=1e-15)


weights = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        *[st.lists(st.sampled_from([0, 0, 1, 2, 5, 1e-6]), min_size=n, max_size=n).filter(any)] * 2
    )
)


@hypothesis.given(weights)
@hypothesis.settings(max_examples=60)
def test_the_law_is_the_targets_for_any_pair(pair: tuple[list[float], list[float]]) -> None:
    p, q = law(*pair[0]), law(*pair[1])
    assert emitted_law(p, q).tolist() == pytest.approx(p.tolist(), abs=1e-12)


def test_the_law_of_two_tokens_is_the_targets() -> None:
    """x1 from q1, x2 from q2 given x1; where x1 falls, the second token comes in the next step."""
    p1, q1 = law(5, 3, 2), law(1, 1, 8)
    p2 = torch.stack([law(1, 2, 3), law(0, 1, 1), law(7, 2, 1)])
    q2 = torch.stack([law(3, 2, 1), law(1, 1, 0), law(0, 0, 1)])
    joint = torch.zeros(3, 3, dtype=torch.float64)
    for x in range(3):
        kept = acceptance(p1, x, q1)
        joint[x] += q1[x] * kept * emitted_law(p2[x], q2[x])
        weights = recovery_weights(p1[None], torch.tensor([x]), q1[None])[0]
        joint += (q1[x] * (1 - kept) * weights / weights.sum())[:, None] * p2
    expected = p1[:, None] * p2
    assert joint.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-15)


def test_the_race_is_won_by_the_greatest_quotient() -> None:
    w = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    for e, winner in (
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([1.0, 0.5, 1.0, 1e-9], 1),
        ([5.0, 3.0, 2.0, 1.0], 0),  # three equal quotients: the lower id
        ([9.0, 9.0, 0.1, 0.1], 2),
    ):
        assert race(w, torch.tensor([e])).tolist() == [winner]


def test_a_token_without_weight_never_wins() -> None:
    # 1e-45 / 30 is 0 in float32, as is the quotient of a token of weight 0.
    assert race(torch.tensor([[0.0, 0.0, 1e-45]]), torch.full((1, 3), 30.0)).tolist() == [2]
    assert race(torch.tensor([[0.0, 1e-45, 0.0]]), torch.ones(1, 3)).tolist() == [1]


def test_B090_a_draft_of_probability_a_tenth_passes_a_tenth_of_the_time(
    plain_calls: None,
) -> None:
    n = 20_000
    p = torch.tensor([0.1, 0.6, 0.3]).repeat(2 * n, 1)
    drafts = torch.tensor([0, -1]).repeat(n)
    uniform = torch.tensor(
        [u for seed in range(n) for u in (position_noise(seed, 0, 0).uniform, ALWAYS)],
        dtype=torch.float64,
    )
    got = rejection_sample(
        p, torch.arange(0, 2 * n + 1, 2), drafts, None, uniform, torch.ones_like(p), 1
    )
    assert got.num_accepted.double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert bool((got.token_ids[got.num_accepted == 0, 0] == 1).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
@pytest.mark.parametrize("where", ["everywhere", "beside the draft"])
def test_B092_a_drafters_row_that_is_no_law_recovers_from_p(bad: float, where: str) -> None:
    p = torch.full((2, 10), 0.01)
    p[:, 7] = 0.91
    q = torch.full((2, 10), 0.1)
    q[0, slice(None) if where == "everywhere" else 3] = bad
    got = one_request(p, [0], q)
    assert got.token_ids.tolist() == [[7, -1]]
    assert got.num_accepted.tolist() == [0]
    # The whole of p, the draft too: a draft that is never accepted takes nothing from the law.
    assert torch.equal(recovery_weights(p, torch.tensor([0, -1]), q)[0], p[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("given", [True, False])
def test_B093_a_target_row_without_a_law_stays_in_the_vocabulary(bad: float, given: bool) -> None:
    p = torch.full((4, 1000), bad)
    q = torch.full((4, 1000), 1e-3) if given else None
    got = one_request(p, [999, 0, 5], q)
    assert got.num_accepted.tolist() == [0]
    assert 0 <= got.token_ids[0, 0] < 1000
    # NaN in one token only: it is never emitted, and the others are as before.
    p = torch.full((2, 1000), 1e-3)
    p[:, 0] = math.nan
    assert one_request(p, [0]).token_ids.tolist() == [[1, -1]]


def test_B096_accepted_drafts_are_counted_to_the_first_rejection() -> None:
    p = torch.full((5, 3), 0.5)
    p[:, 2] = 0
    for passes, count in (
        ([1, 0, 1, 1], 1),
        ([1, 1, 1, 1], 4),
        ([0, 1, 1, 1], 0),
        ([1, 1, 1, 0], 3),
    ):
        uniform = [ALWAYS if ok else NEVER for ok in passes]
        got = one_request(p, [0] * 4, uniform=[*uniform, ALWAYS])
        assert got.num_accepted.tolist() == [count]
        recovered = 0 if count == 4 else 1  # a chosen draft is masked where it was rejected
        assert got.token_ids.tolist() == [[0] * count + [recovered] + [-1] * (4 - count)]


def test_B098_the_residual_is_taken_over_the_whole_vocabulary() -> None:
    p, q = law(2, 4, 4)[None], law(2, 1, 7)[None]
    weights = recovery_weights(p, torch.tensor([2]), q)[0]
    assert weights.tolist() == pytest.approx([0, 0.3, 0])
    # Subtracted at the draft alone: [0.2, 0.4, 0], and token 0 comes out too often.
    masked = recovery_weights(p, torch.tensor([2]), None)[0]
    assert masked.tolist() == pytest.approx([0.2, 0.4, 0])


def test_B099_nothing_left_falls_back_to_p() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5, 0.0]]).repeat(2, 1)
    for q in (p, p + 1e-9):
        for draft in range(3):
            got = one_request(p, [draft], q, uniform=[1.0, 1.0])
            assert got.num_accepted.tolist() == [1]  # p / q is 1, and u is at most 1
        # Token 3 cannot come from this q: it is rejected, and max(p - q, 0) is 0 everywhere.
        got = one_request(p, [3], q)
        assert got.token_ids.tolist() == [[2, -1]]
        assert torch.equal(recovery_weights(p, torch.tensor([3, -1]), q)[0], p[0])
    # Equal up to rounding, and a rejection that only rounding can bring about.
    close = p.double() + 1e-8
    got = one_request(p.double(), [0], close, uniform=[1.0, 1.0])
    assert (got.token_ids.tolist(), got.num_accepted.tolist()) == ([[2, -1]], [0])
    # A chosen draft that has all the mass cannot be rejected but by a u beyond 1.
    certain = torch.tensor([[0.0, 1.0]] * 2)
    assert one_request(certain, [1], uniform=[1.0, 1.0]).num_accepted.tolist() == [1]
    assert one_request(certain, [1], uniform=[1.1, 1.0]).token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_B100_a_bonus_or_a_recovered_token_never_both(k: int) -> None:
    vocab = 6
    p = torch.full((k + 1, vocab), 0.05)
    for row in range(k + 1):
        p[row, 5 - row] = 0.75  # recovered or bonus token of row i: 5 - i
    for passes in itertools.product([True, False], repeat=k):
        uniform = [ALWAYS if ok else NEVER for ok in passes]
        got = one_request(p, [0, 1, 2][:k], uniform=[*uniform, ALWAYS])
        count = passes.index(False) if False in passes else k
        expected = [0, 1, 2][:count] + [5 - count] + [-1] * (k - count)
        assert got.token_ids.tolist() == [expected]
        assert got.num_accepted.tolist() == [count]


def test_B107_each_draft_is_looked_up_in_its_own_row() -> None:
    p = torch.tensor([[0.9, 0.05, 0.05], [0.3, 0.3, 0.4], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.0, 0.8, 0.2], [1.0, 0.0, 0.0]])
    drafts = torch.tensor([0, 1, 2, -1])
    for uniform, expected in (
        ([1.0, 1.0, 0.5], [True, True, True, False]),
        ([1.0, 1.0, 0.5001], [True, True, False, False]),
    ):
        u = torch.tensor([*uniform, 1.0], dtype=torch.float64)
        assert accept_drafts(p, drafts, q, u).tolist() == expected
    for margin, passes in ((-1e-6, True), (1e-6, False)):
        u = torch.tensor([0.9, 0.3, 0.1, 0.0], dtype=torch.float64) + margin
        assert accept_drafts(p, drafts, None, u).tolist() == [passes] * 3 + [False]


def test_B155_a_greedy_target_rejects_all_but_its_highest_token() -> None:
    # One-hot after temperature 0; the softmax [0.3, 0.5, 0.2] would let draft 0 pass at times.
    p = torch.tensor([[0.0, 1.0, 0.0]] * 2)
    for u in (ALWAYS, 0.3, 1.0):
        for q in (None, torch.tensor([[0.3, 0.5, 0.2]] * 2)):
            assert one_request(p, [0], q, uniform=[u, u]).token_ids.tolist() == [[1, -1]]
            assert one_request(p, [1], q, uniform=[u, u]).token_ids.tolist() == [[1, 1]]


def test_a_uniform_of_0_does_not_exist_for_a_reason() -> None:
    p = torch.tensor([[0.0, 1.0]] * 2)
    assert one_request(p, [0], uniform=[1.0, 1.0]).num_accepted.tolist() == [0]
    assert one_request(p, [0], uniform=[2.0**-53, 1.0]).num_accepted.tolist() == [0]


@pytest.mark.parametrize("dead", [-1, -7, 6, 10**12])
def test_a_row_without_a_draft_is_a_plain_sample_and_ends_the_walk(dead: int) -> None:
    p = torch.full((4, 6), 0.1)
    for row in range(4):
        p[row, row + 2] = 0.5
    got = one_request(p, [0, dead, 1])
    assert got.token_ids.tolist() == [[0, 3, -1, -1]]
    assert got.num_accepted.tolist() == [1]


def test_the_last_row_and_rows_behind_max_drafts_judge_nothing() -> None:
    p = torch.full((4, 6), 0.1)
    for row in range(4):
        p[row, row + 2] = 0.5
    noise = torch.full((4,), ALWAYS, dtype=torch.float64), torch.ones(4, 6)
    loc, drafts = torch.tensor([0, 4]), torch.tensor([0, 1, 0, 1])
    assert rejection_sample(p, loc, drafts, None, *noise, 3).token_ids.tolist() == [[0, 1, 0, 5]]
    assert rejection_sample(p, loc, drafts, None, *noise, 1).token_ids.tolist() == [[0, 3]]
    assert rejection_sample(p, loc, drafts, None, *noise, 0).token_ids.tolist() == [[2]]
    wide = rejection_sample(p, loc, drafts, None, *noise, 5)
    assert wide.token_ids.tolist() == [[0, 1, 0, 5, -1, -1]]


def ragged(lens: list[int], vocab: int = 11, *, given: bool = True) -> dict[str, Tensor | None]:
    rows = sum(lens)
    q = torch.softmax(2 * torch.randn(rows, vocab), dim=1)
    return {
        "target_probs": torch.softmax(torch.log(q) + torch.randn(rows, vocab), dim=1),
        "query_start_loc": torch.tensor([0, *itertools.accumulate(lens)]),
        "draft_ids": torch.multinomial(q, 1)[:, 0],
        "draft_probs": q if given else None,
        "uniform": torch.rand(rows, dtype=torch.float64),
        "exponential": torch.empty(rows, vocab).exponential_(),
    }


def by_hand(batch: dict[str, Tensor | None], max_drafts: int) -> list[list[int]]:
    """The rule in Python, number by number."""
    p, q = batch["target_probs"].tolist(), batch["draft_probs"]
    e, u, x = (batch[n].tolist() for n in ("exponential", "uniform", "draft_ids"))
    loc = batch["query_start_loc"].tolist()
    result = []
    for first, end in itertools.pairwise(loc):
        tokens: list[int] = []
        for row in range(first, end):
            draft = x[row] if row < end - 1 else -1
            if draft >= 0:
                q_row = (
                    [float(v == draft) for v in range(len(p[row]))]
                    if q is None
                    else q[row].tolist()
                )
                if q_row[draft] > 0 and p[row][draft] / q_row[draft] >= u[row]:
                    tokens.append(draft)
                    continue
                w = [max(a - b, 0) for a, b in zip(p[row], q_row, strict=True)]
            else:
                w = p[row]
            scores = [a / b for a, b in zip(w, e[row], strict=True)]
            tokens.append(scores.index(max(scores)))
            break
        result.append(tokens + [-1] * (max_drafts + 1 - len(tokens)))
    return result


@hypothesis.given(st.lists(st.integers(0, 5), max_size=8), st.booleans(), st.integers(0, 99))
@hypothesis.settings(max_examples=60)
def test_is_the_rule_by_hand(lens: list[int], given: bool, seed: int) -> None:
    torch.manual_seed(seed)
    batch = ragged(lens, given=given)
    got = rejection_sample(**batch, max_drafts=4)
    assert got.token_ids.dtype == got.num_accepted.dtype == torch.int64
    assert got.token_ids.tolist() == by_hand(batch, 4)
    emitted = (got.token_ids >= 0).sum(dim=1)
    assert emitted.tolist() == [
        0 if n == 0 else a + 1 for n, a in zip(lens, got.num_accepted.tolist(), strict=True)
    ]


def test_permuted_requests_permute_the_result_bit_for_bit() -> None:
    lens = [4, 1, 3, 4, 2, 1, 4]
    batch = ragged(lens)
    whole = rejection_sample(**batch, max_drafts=3)
    assert len(set(whole.num_accepted.tolist())) > 2
    starts = batch.pop("query_start_loc").tolist()
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 0, 3, 6, 1, 5, 4]):
        rows = [row for r in order for row in range(starts[r], starts[r + 1])]
        loc = torch.tensor([0, *itertools.accumulate(lens[r] for r in order)])
        got = rejection_sample(
            **{name: value[rows] for name, value in batch.items()},
            query_start_loc=loc,
            max_drafts=3,
        )
        for part, expected in zip(got, whole, strict=True):
            assert torch.equal(bits(part), bits(expected[order]))


def test_stale_rows_and_padded_requests_change_nothing() -> None:
    batch = ragged([3, 1, 4])
    clean = rejection_sample(**batch, max_drafts=3)
    padded = {}
    for name, value in batch.items():
        if name == "query_start_loc":
            padded[name] = torch.cat([value, value[-1:], value[-1:]])
        else:
            filler = torch.full((5, *value.shape[1:]), 10**9 if name == "draft_ids" else math.nan)
            padded[name] = torch.cat([value, filler.to(value.dtype)])
    got = rejection_sample(**padded, max_drafts=3)
    assert torch.equal(got.token_ids[:3], clean.token_ids)
    assert torch.equal(got.num_accepted[:3], clean.num_accepted)
    assert bool((got.token_ids[3:] == -1).all())
    assert got.num_accepted[3:].tolist() == [0, 0]


def test_rows_without_a_draft_do_not_read_q() -> None:
    batch = ragged([3, 2])
    clean = rejection_sample(**batch, max_drafts=2)
    batch["draft_probs"][[2, 4]] = math.nan
    batch["draft_ids"][[2, 4]] = -1
    assert torch.equal(rejection_sample(**batch, max_drafts=2).token_ids, clean.token_ids)


@pytest.mark.parametrize("given", [True, False])
def test_nothing_is_read_back(given: bool) -> None:
    batch = ragged([3, 0, 1, 4], given=given)
    with NothingReadBack():
        got = rejection_sample(**batch, max_drafts=3)
    assert got.token_ids.tolist() == by_hand(batch, 3)


def test_narrow_and_wide_integers_and_floats() -> None:
    batch = ragged([3, 1, 4])
    expected = rejection_sample(**batch, max_drafts=3).token_ids
    narrow = batch | {n: batch[n].int() for n in ("query_start_loc", "draft_ids")}
    assert torch.equal(rejection_sample(**narrow, max_drafts=3).token_ids, expected)
    wide = batch | {n: batch[n].double() for n in ("target_probs", "draft_probs", "exponential")}
    assert torch.equal(rejection_sample(**wide, max_drafts=3).token_ids, expected)


def test_empty_batches() -> None:
    for lens in ([], [0, 0]):
        got = rejection_sample(**ragged(lens), max_drafts=2)
        assert got.token_ids.tolist() == [[-1] * 3] * len(lens)
        assert got.num_accepted.tolist() == [0] * len(lens)


def test_arguments_that_do_not_fit_are_named() -> None:
    batch = ragged([2, 1])
    for name, value, error in (
        ("target_probs", torch.ones(3, 11).int(), TypeError),
        ("target_probs", torch.zeros(3, 0), ValueError),
        ("query_start_loc", torch.tensor([], dtype=torch.int64), ValueError),
        ("query_start_loc", torch.tensor([0.0, 3.0]), TypeError),
        ("draft_ids", torch.zeros(2, dtype=torch.int64), ValueError),
        ("draft_probs", torch.ones(3, 10), ValueError),
        ("uniform", torch.rand(3), TypeError),
        ("uniform", torch.rand(2, dtype=torch.float64), ValueError),
        ("exponential", torch.ones(2, 11), ValueError),
    ):
        with pytest.raises(error, match=name):
            raw(rejection_sample)(**(batch | {name: value}), max_drafts=1)
    with pytest.raises(ValueError, match="max_drafts"):
        rejection_sample(**batch, max_drafts=-1)

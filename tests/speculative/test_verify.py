"""The wrapper that an engine calls: nothing but a request's own things decides its tokens."""

import importlib
import math

import pytest
import torch
from tests.support import raw

from mla_ref.speculative import AcceptanceStats, SamplingParams, position_noise, verify

VOCAB = 40
GREEDY = SamplingParams()


class Batch:
    """Requests with logits of their own, to be verified in any company."""

    def __init__(self, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = [
            SamplingParams(0.7, seed=42),
            GREEDY,
            SamplingParams(1.0, top_k=5, seed=-1),
            SamplingParams(1.5, top_p=0.8, seed=43),
            GREEDY,
            SamplingParams(0.7, seed=42),
        ]
        lens = [3, 2, 0, 4, 0, 1]
        self.logits = [3 * torch.randn(n + 1, VOCAB, generator=generator) for n in lens]
        # Likely drafts, so that walks of all lengths occur.
        self.drafts = [x[:-1].argmax(dim=1).tolist() for x in self.logits]
        self.drafts[3][2] = 0
        self.probs = [torch.softmax(x / 2, dim=1) for x in self.logits]
        self.positions = [5, 0, 9, 100, 7, 6]

    def verify(self, order: list[int], *, with_probs: bool = False) -> list[tuple[list[int], int]]:
        got = verify(
            torch.cat([self.logits[r] for r in order]),
            [self.drafts[r] for r in order],
            [self.params[r] for r in order],
            [self.positions[r] for r in order],
            torch.cat([self.probs[r] for r in order]) if with_probs else None,
        )
        return list(zip(got.token_ids, got.num_accepted, strict=True))


@pytest.mark.parametrize("with_probs", [False, True])
def test_B106_a_request_does_not_depend_on_its_neighbours(with_probs: bool) -> None:
    for seed in range(6):
        batch = Batch(seed)
        together = batch.verify([0, 1, 2, 3, 4, 5], with_probs=with_probs)
        for order in ([0], [1], [2, 0], [0, 5], [5, 4, 3, 2, 1, 0], [3, 1, 0, 4], [4, 1]):
            got = batch.verify(order, with_probs=with_probs)
            assert got == [together[r] for r in order]


def test_B106_preempted_and_resumed_or_drafted_for_or_not_a_place_keeps_its_noise() -> None:
    logits = torch.randn(1, 10)  # few tokens, so that drafts are accepted now and then
    params = [SamplingParams(1.0, seed=42)]
    plain = [verify(logits, [[]], params, [place]).token_ids[0][0] for place in range(30)]
    assert len(set(plain)) > 5
    for place in reversed(range(30)):  # in another order, as after a restart
        assert verify(logits, [[]], params, [place]).token_ids == [[plain[place]]]
    accepted = 0
    for place in range(27):
        # An accepted draft moves the walk one place on, and the bonus is what plain decoding draws.
        got = verify(logits.expand(2, -1), [[plain[place]]], params, [place])
        if got.num_accepted == [1]:
            accepted += 1
            assert got.token_ids[0][1] == plain[place + 1]
    assert accepted >= 5


def test_B105_noise_is_of_the_request_and_its_place() -> None:
    batch = Batch()
    got = batch.verify([2])
    noise = position_noise(-1, 9, VOCAB)
    top = batch.logits[2][0].topk(5)
    probs = torch.softmax(top.values, dim=0) / noise.exponential[top.indices]
    assert got == [([int(top.indices[probs.argmax()])], 0)]


def test_B105_one_entry_a_row_where_one_a_request_belongs_is_refused() -> None:
    logits, drafts = torch.zeros(5, VOCAB), [[1, 2], [3]]
    with pytest.raises(ValueError, match=r"params must have 2 entries \(one a request\), got 5"):
        verify(logits, drafts, [GREEDY] * 5, [0, 0])
    with pytest.raises(ValueError, match="positions must have 2 entries, got 5"):
        verify(logits, drafts, [GREEDY] * 2, [0] * 5)


def test_B094_greedy_requests_among_sampled_ones_walk_the_argmax() -> None:
    for seed in range(10):
        batch = Batch(seed)
        for r, (tokens, accepted) in enumerate(batch.verify([0, 1, 2, 3, 4, 5])):
            assert 0 <= accepted <= len(batch.drafts[r])
            assert len(tokens) == accepted + 1
            assert all(0 <= token < VOCAB for token in tokens)
            if batch.params[r].is_greedy:
                best = batch.logits[r].argmax(dim=1).tolist()
                assert tokens == best[: accepted + 1]
                assert accepted == len(batch.drafts[r])


def test_B095_a_tie_goes_to_the_lower_id_in_any_company() -> None:
    tied, other = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.3, 0.2, 0.1])
    assert verify(tied[None], [[]], [GREEDY], [0]).token_ids == [[0]]
    seeds = range(200)
    beside = [x for seed in seeds for x in (GREEDY, SamplingParams(1.0, seed=seed))]
    got = verify(torch.stack([tied, other] * 200), [[]] * 400, beside, [*seeds, *seeds])
    assert got.token_ids[::2] == [[0]] * 200
    assert len({tokens[0] for tokens in got.token_ids[1::2]}) == 3
    # As a draft, the other of the two is wrong.
    got = verify(torch.stack([other, tied, tied, tied]), [[], [0, 1]], beside[1::-1], [0, 0])
    assert got.token_ids[1] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_greedy_is_the_rule_without_its_noise(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("mla_ref.speculative.verify")
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(0, 5, (4,), generator=generator).tolist()
        # Few values, so that ties are common.
        logits = torch.randint(0, 4, (sum(counts) + 4, 6), generator=generator).to(dtype)
        drafts = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in counts]
        with monkeypatch.context() as patch:
            patch.setattr(module, "position_noise", None)
            patch.setattr(module, "target_probs", None)
            cheap = verify(logits, drafts, [GREEDY] * 4, [0] * 4)
        # A sampled neighbour sends the batch through the rule.
        beside = verify(
            torch.cat([logits, logits[:1]]),
            [*drafts, []],
            [*[GREEDY] * 4, SamplingParams(1.0)],
            [0] * 5,
        )
        assert beside.token_ids[:4] == cheap.token_ids
        assert beside.num_accepted[:4] == cheap.num_accepted


def test_greedy_targets_judge_sampled_drafts_by_the_rule() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    for q in ([0.2, 0.5, 0.3], [0.0, 1.0, 0.0]):
        got = verify(logits, [[1]], [GREEDY], [0], torch.tensor([q, q]))
        assert (got.token_ids, got.num_accepted) == ([[1, 0]], [1])
        got = verify(logits, [[2]], [GREEDY], [0], torch.tensor([q, q]))
        assert (got.token_ids, got.num_accepted) == ([[1]], [0])


def test_B093_a_row_of_nan_is_named_or_stays_in_the_vocabulary() -> None:
    logits = torch.zeros(3, 1000)
    logits[1] = math.nan
    for params in (GREEDY, SamplingParams(0.7, top_p=0.9), SamplingParams(1.0, top_k=7)):
        with pytest.raises(ValueError, match="logits row 1 holds nan"):
            verify(logits, [[0, 0]], [params], [0])
        got = verify(logits, [[0, 999]], [params], [0], validate=False)
        assert all(0 <= token < 1000 for token in got.token_ids[0])


def test_B109_a_perfect_drafter_and_one_that_is_always_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    right, wrong, mean = AcceptanceStats(), AcceptanceStats(), 4
    for step in range(10):
        logits = torch.randn(mean, VOCAB, generator=generator)
        best = logits.argmax(dim=1).tolist()
        for stats, drafts in ((right, best[:3]), (wrong, [(x + 1) % VOCAB for x in best[:3]])):
            got = verify(logits, [drafts], [GREEDY], [step])
            stats.add(3, got.num_accepted[0])
            assert len(got.token_ids[0]) == got.num_accepted[0] + 1
    assert right.mean_acceptance_length == 4.0
    assert wrong.mean_acceptance_length == 1.0
    # Sampled: the target's own law as q accepts everything, at any temperature.
    for temperature in (0.3, 1.0, 2.0):
        params = SamplingParams(temperature)
        q = torch.softmax(logits / temperature, dim=1)
        drafts = torch.multinomial(q[:3], 1, generator=generator)[:, 0].tolist()
        assert verify(logits, [drafts], [params], [0], q * (1 - 1e-6)).num_accepted == [3]


def test_no_requests() -> None:
    assert verify(torch.zeros(0, VOCAB), [], [], []) == ([], [])


def test_arguments_that_do_not_fit_are_named() -> None:
    good = {
        "logits": torch.zeros(3, VOCAB),
        "draft_ids": [[1], []],
        "params": [GREEDY, SamplingParams(1.0)],
        "positions": [0, 4],
        "draft_probs": None,
    }
    for name, value, error in (
        ("logits", torch.zeros(4, VOCAB), ValueError),
        ("logits", torch.zeros(3, VOCAB).int(), TypeError),
        ("draft_ids", [[VOCAB], []], ValueError),
        ("draft_ids", [[-1], []], ValueError),
        ("draft_ids", [1, 2], TypeError),
        ("draft_ids", 3, TypeError),
        ("params", [GREEDY, 0.7], TypeError),
        ("positions", [0], ValueError),
        ("positions", [0, -1], ValueError),
        ("positions", 5, TypeError),
        ("draft_probs", torch.ones(2, VOCAB), ValueError),
        ("draft_probs", torch.ones(3, VOCAB - 1), ValueError),
    ):
        with pytest.raises(error, match=name):
            raw(verify)(**(good | {name: value}))

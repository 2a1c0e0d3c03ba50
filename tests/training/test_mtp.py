"""How the MTP module is trained: the model's own text, the passes, what is counted."""

import json
import math
from importlib.resources import files

import pytest
import torch
from tests.models.test_mtp import CONFIG, small_module

from mla_ref.engine import generate
from mla_ref.models.mtp import MTPWeights
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.training.corpus import Corpus
from mla_ref.training.mtp import acceptance, frequent_tokens, mixed_batches, train_mtp
from mla_ref.training.own_text import continue_windows, temperatures
from mla_ref.training.unroll import draft_loss, matches

pytestmark = pytest.mark.usefixtures("plain_calls")


def test_the_model_goes_on_as_it_does_in_the_engine() -> None:
    model = SmolLM2.random(CONFIG, 5, attention="gqa", dtype=torch.float64)
    prompts = torch.randint(60, (3, 7), generator=torch.Generator().manual_seed(0))
    written = continue_windows(model, prompts, 9, torch.zeros(3))
    assert torch.equal(written[:, :7], prompts)
    for row in written.tolist():
        plain = list(generate(model, row[:7], max_new_tokens=9))
        assert row[7:] == plain


def test_sampled_text_is_seeded_and_has_the_models_law() -> None:
    model = SmolLM2.random(CONFIG, 5, attention="gqa")
    prompts = torch.tensor([[3, 4]]).repeat(4000, 1)
    one = continue_windows(model, prompts, 1, torch.ones(4000), seed=1)
    assert torch.equal(one, continue_windows(model, prompts, 1, torch.ones(4000), seed=1))
    assert not torch.equal(one, continue_windows(model, prompts, 1, torch.ones(4000), seed=2))
    found = torch.bincount(one[:, -1], minlength=60) / 4000
    [probability] = _next_law(model, [3, 4])
    assert float((found - probability).abs().max()) < 4 * math.sqrt(0.25 / 4000)
    assert temperatures(6).tolist() == pytest.approx([0, 0, 0.6, 1, 0, 0])


def _next_law(model: SmolLM2, token_ids: list[int]) -> torch.Tensor:
    from mla_ref.batching import Step

    step = Step.one_request(0, len(token_ids), 16)
    hidden = model.forward(torch.tensor(token_ids), step, model.new_cache(1, 16))
    return torch.softmax(model.logits(hidden[-1:]), dim=-1)


def test_matches_count_what_a_verifier_would_accept() -> None:
    #                     anchor 0  1  2  3
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]])
    first = torch.tensor([[2, 3, 0, 5, 0, 0, 0]])  # right at anchors 0, 1 and 3
    second = torch.tensor([[3, 0, 5, 6, 0, 0, 0]])  # right at 0, 2 and 3; 2 is behind a wrong one
    assert matches([first, second], tokens, 0).tolist() == [0.75, 0.5]
    assert matches([first, second], tokens, 2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("first_anchor", "message"),
    [
        (4, "first_anchor must be below 4, so that 2 guesses .* in a text of 7, got 4"),
        (9, "first_anchor must be below 4"),
        (-1, "first_anchor must be at least 0, got -1"),
    ],
)
def test_matches_of_no_anchor_are_no_rate(first_anchor: int, message: str) -> None:
    tokens = torch.arange(7)[None]
    with pytest.raises(ValueError, match=message):
        matches([tokens, tokens], tokens, first_anchor)
    assert matches([tokens + 2, tokens + 3], tokens, 3).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_a_temperature_that_gives_no_law_is_refused(bad: float) -> None:
    model = SmolLM2.random(CONFIG, 5, attention="gqa")
    with pytest.raises(ValueError, match="temperature must be finite and at least 0 in each row"):
        continue_windows(model, torch.tensor([[3, 4]] * 2), 1, torch.tensor([1.0, bad]))


def test_the_loss_is_a_divergence() -> None:
    target = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float(draft_loss(target + 7, target)) == pytest.approx(0, abs=1e-15)
    log_p, log_q = target[0, 0].log_softmax(0), torch.zeros(5).double().log_softmax(0)
    by_hand = float((log_p.exp() * (log_p - log_q)).sum())
    assert float(draft_loss(torch.zeros(1, 1, 5).double(), target[:1, :1])) == pytest.approx(
        by_hand
    )


def test_frequent_tokens_count_each_text_alike() -> None:
    long, short = torch.tensor([0] * 60 + [1] * 40), torch.tensor([[2, 2], [2, 1]])
    assert frequent_tokens([long, short], 2, 5).tolist() == [1, 2]
    assert frequent_tokens([long], 3, 5).tolist() == [0, 1, 2]  # ties go to the lower id
    # A text without a token has no say, and spoils no other's.
    empty = torch.empty(0, dtype=torch.int64)
    assert frequent_tokens([long, empty, short], 2, 5).tolist() == [1, 2]


def test_batches_take_turns_and_repeat() -> None:
    corpus = Corpus(torch.arange(100), torch.empty(0))
    own = [torch.full((5, 12), 7), torch.full((5, 12), 8)]
    first = mixed_batches(corpus, own, 3, 10, torch.device("cpu"))
    again = mixed_batches(corpus, own, 3, 10, torch.device("cpu"))
    batches = [next(first) for _ in range(4)]
    assert all(torch.equal(a, next(again)) for a in batches)
    assert [b.shape for b in batches] == [(3, 10)] * 4
    assert (batches[0] == 7).all() and (batches[2] == 8).all()
    assert (batches[1].diff(dim=1) == 1).all()
    alone = mixed_batches(corpus, [], 3, 10, torch.device("cpu"))
    assert (next(alone).diff(dim=1) == 1).all()


def test_it_learns_what_a_model_repeats() -> None:
    """A random model that goes round in a circle is easy to guess after a few steps."""
    model = SmolLM2.random(CONFIG, 5, attention="gqa")
    prompts = torch.randint(60, (16, 4), generator=torch.Generator().manual_seed(3))
    text = continue_windows(model, prompts, 28, torch.zeros(16))
    start = MTPWeights.random(CONFIG, torch.arange(60, dtype=torch.int32))
    batches = iter([text] * 30)
    *_, (trained, last) = train_mtp(model, start, batches, steps=30, learning_rate=3e-3)
    before, after = acceptance(model, start, text, 8), acceptance(model, trained, text, 8)
    assert after[0] > before[0] and after[2] > before[2] + 0.4, (before, after)
    assert len(last) == 3 and all(map(math.isfinite, last))
    assert trained.draft_tokens.dtype == torch.int32


def test_the_record_says_what_was_held_out() -> None:
    record = json.loads((files("mla_ref.models") / "data" / "smollm2_mtp.json").read_text())
    for name, rates in record["accepted_by_position"].items():
        assert rates == sorted(rates, reverse=True) and 0 < rates[-1] <= rates[0] < 1, name
    assert record["accepted_by_position"]["code"][0] > 0.8


def test_a_module_that_was_not_trained_still_gives_finite_states() -> None:
    module = small_module()
    text = torch.arange(12)[None]
    rates = acceptance(module.model, module.weights, text, 0)
    assert len(rates) == 3 and all(0 <= rate <= 1 for rate in rates)

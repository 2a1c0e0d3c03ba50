"""The law of what comes out, by drawing: each way of drafting gives the target's law.

The rule's law is checked without chance in test_rejection.py. Here noise, sampling and rule work
together. A p-value of a right sampler is uniform in 0 .. 1; of 20 seeds each, that is tested too.
"""

import pytest
import torch
from tests.speculative.chance import chi_square_p_value, noise_block, uniform_p_value
from torch import Tensor

from mla_ref.speculative import (
    SamplingParams,
    position_noise,
    rejection_sample,
    target_probs,
    verify,
)

DRAWS, SEEDS, VOCAB = 20_000, 20, 16


def first_tokens(p: Tensor, drafts: Tensor, q: Tensor | None, u: Tensor, e: Tensor) -> Tensor:
    """The first token of many requests with one draft each, or with none where it is -1."""
    rows = 2 * len(drafts)

    def beside_a_bonus_row(x: Tensor) -> Tensor:
        return torch.stack([x, x], dim=1).flatten(0, 1)

    got = rejection_sample(
        p.expand(rows, -1),
        torch.arange(0, rows + 1, 2),
        torch.stack([drafts, torch.full_like(drafts, -1)], dim=1).flatten(),
        None if q is None else q.expand(rows, -1),
        beside_a_bonus_row(u),
        beside_a_bonus_row(e),
        1,
    )
    return got.token_ids[:, 0]


@pytest.fixture(scope="module")
def noise() -> list[tuple[Tensor, Tensor]]:
    return [noise_block(seed, DRAWS, VOCAB) for seed in range(SEEDS)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("drafter", ["none", "chosen", "sampled"])
def test_the_sampling_law(
    noise: list[tuple[Tensor, Tensor]], temperature: float, drafter: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(1, VOCAB, generator=generator)
    p = target_probs(logits, [SamplingParams(temperature, top_k=14)])
    q = torch.softmax(logits / 2 + torch.randn(1, VOCAB, generator=generator), dim=1)
    draws = DRAWS if drafter == "none" else DRAWS // 4
    p_values = []
    for u, e in noise:
        sampled = torch.multinomial(q[0], draws, replacement=True, generator=generator)
        drafts, given = {
            "none": (torch.full_like(sampled, -1), None),
            "chosen": (sampled, None),  # some model's best guess, another one for each draw
            "sampled": (sampled, q),
        }[drafter]
        tokens = first_tokens(p, drafts, given, u[:draws], e[:draws])
        counts = torch.bincount(tokens, minlength=VOCAB)
        p_values.append(chi_square_p_value(counts, p[0].double() * draws))
    assert uniform_p_value(p_values) > 1e-3
    assert min(p_values) > 1e-4


def test_the_statistics_see_a_law_that_is_off_by_a_hundredth() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2])
    p_values = []
    for _ in range(SEEDS):
        tokens = torch.multinomial(p, DRAWS, replacement=True, generator=generator)
        counts = torch.bincount(tokens, minlength=3)
        assert chi_square_p_value(counts, p.double() * DRAWS) > 1e-4
        wrong = torch.tensor([0.49, 0.31, 0.2]).double() * DRAWS
        p_values.append(chi_square_p_value(counts, wrong))
    assert uniform_p_value(p_values) < 1e-6


def test_two_tokens_of_one_request_whose_second_noise_is_read_twice(plain_calls: None) -> None:
    """Where the first draft falls, the noise of place 1 has judged a dead draft, and is read again.

    Nothing may have leaked from that: the pair has the law of plain decoding.
    """
    requests, vocab = 6000, 3
    first = torch.tensor([0.5, 0.3, 0.2]).log()
    second = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.4, 0.0], [0.3, 0.3, 0.4]]).log()
    bonus = torch.zeros(vocab)
    q1, q2 = torch.tensor([0.2, 0.2, 0.6]), torch.tensor([0.4, 0.5, 0.1])
    generator = torch.Generator().manual_seed(1)
    x1 = torch.multinomial(q1, requests, replacement=True, generator=generator)
    x2 = torch.multinomial(q2, requests, replacement=True, generator=generator)
    noise = [[position_noise(r, place, vocab) for place in (0, 1)] for r in range(requests)]

    def stack(places: int) -> tuple[Tensor, Tensor]:
        # Place 2 is the bonus token, which the pair does not hold.
        rows = [n for request in noise for n in (request * 2)[:places]]
        u = torch.tensor([n.uniform for n in rows], dtype=torch.float64)
        return u, torch.stack([n.exponential for n in rows])

    logits = torch.stack([first.expand(requests, -1), second[x1], bonus.expand(requests, -1)], 1)
    drafts = torch.stack([x1, x2, torch.full_like(x1, -1)], 1).flatten()
    p = torch.softmax(logits.flatten(0, 1), dim=1)
    q = torch.stack([q1, q2, q1]).repeat(requests, 1)
    step = rejection_sample(p, torch.arange(0, 3 * requests + 1, 3), drafts, q, *stack(3), 2)
    y1, y2 = step.token_ids[:, 0], step.token_ids[:, 1]
    u, e = stack(2)
    plain = rejection_sample(
        torch.softmax(second[y1], dim=1),
        torch.arange(requests + 1),
        torch.full((requests,), -1),
        None,
        u.view(-1, 2)[:, 1].contiguous(),
        e.view(-1, 2, vocab)[:, 1],
        0,
    ).token_ids[:, 0]
    fell = step.num_accepted == 0
    assert 0.2 < fell.double().mean() < 0.6
    pairs = y1 * vocab + torch.where(fell, plain, y2)
    law = first.exp().double()[:, None] * second.exp().double()
    counts = torch.bincount(pairs, minlength=vocab * vocab)
    assert chi_square_p_value(counts, law.flatten() * requests) > 1e-3


def test_the_law_as_an_engine_draws_it(plain_calls: None) -> None:
    """`verify`, a seed a request, drafts of a greedy drafter that is right at times."""
    logits = torch.tensor([2.0, 1.0, 0.5, -torch.inf])
    law = target_probs(logits[None], [SamplingParams(0.8, top_p=0.9)])[0]
    drafts: list[list[int]] = [[], [0], [1], [2, 0], [3]] * 500
    got = verify(
        logits.expand(sum(1 + len(d) for d in drafts), -1),
        drafts,
        [SamplingParams(0.8, top_p=0.9, seed=seed) for seed in range(len(drafts))],
        [seed % 7 for seed in range(len(drafts))],
    )
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in got.token_ids]), minlength=4)
    assert chi_square_p_value(counts, law.double() * len(drafts)) > 1e-3

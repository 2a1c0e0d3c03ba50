"""The planted bugs of this floor: each shows its symptom, and hides where its docstring says."""

import itertools

import pytest
import torch
from torch import Tensor

from mla_ref.speculative import rejection_sample
from mla_ref.teaching.planted.speculative import (
    rejection_sample_counting_all,
    rejection_sample_residual_at_the_draft,
)

P, Q = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([0.2, 0.1, 0.7])


def batch(vocab: int = 5) -> dict[str, Tensor]:
    rows = [4, 1, 3, 2] * 25
    q = torch.softmax(torch.randn(sum(rows), vocab), dim=1)
    return {
        "target_probs": torch.softmax(torch.randn(sum(rows), vocab), dim=1),
        "query_start_loc": torch.tensor([0, *itertools.accumulate(rows)]),
        "draft_ids": torch.multinomial(q, 1)[:, 0],
        "draft_probs": q,
        "uniform": 1 - torch.rand(sum(rows), dtype=torch.float64),
        "exponential": torch.empty(sum(rows), vocab).exponential_(),
    }


def test_B096_counting_all_accepted_drafts_puts_out_dead_ones() -> None:
    passes = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
    call = {
        "target_probs": torch.tensor([[0.5, 0.5, 0.0]]).repeat(5, 1),
        "query_start_loc": torch.tensor([0, 5]),
        "draft_ids": torch.tensor([0, 0, 0, 0, -1]),
        "draft_probs": None,
        "uniform": torch.where(passes, 0.1, 0.9).double(),
        "exponential": torch.ones(5, 3),
        "max_drafts": 4,
    }
    assert rejection_sample(**call).token_ids.tolist() == [[0, 1, -1, -1, -1]]
    wrong = rejection_sample_counting_all(**call)
    assert wrong.num_accepted.tolist() == [3]
    assert wrong.token_ids.tolist() == [[0, 1, 0, 0, -1]]


def test_B096_hides_where_no_draft_passes_behind_a_rejected_one() -> None:
    call = batch()
    right = rejection_sample(**call, max_drafts=3)
    wrong = rejection_sample_counting_all(**call, max_drafts=3)
    same = right.num_accepted == wrong.num_accepted
    assert 0 < int((~same).sum()) < 75
    assert torch.equal(right.token_ids[same], wrong.token_ids[same])
    one = rejection_sample(**call, max_drafts=1)
    assert torch.equal(one.token_ids, rejection_sample_counting_all(**call, max_drafts=1).token_ids)


def emitted_law(function: object, n: int = 60_000) -> Tensor:
    """The law of the first token when one draft is sampled from Q."""
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(Q, n, replacement=True, generator=generator)
    got = function(
        P.repeat(2 * n, 1),
        torch.arange(0, 2 * n + 1, 2),
        torch.stack([drafts, torch.full_like(drafts, -1)], 1).flatten(),
        Q.repeat(2 * n, 1),
        1 - torch.rand(2 * n, generator=generator, dtype=torch.float64),
        torch.empty(2 * n, 3).exponential_(generator=generator),
        1,
    )
    return torch.bincount(got.token_ids[:, 0], minlength=3) / n


def test_B098_a_residual_at_the_draft_alone_has_another_law() -> None:
    # 0.3 of all drafts fall, all of them token 2. Right: token 1 takes all of it, 0.1 + 0.3. Wrong:
    # tokens 0 and 1 share it as 0.2 to 0.4.
    assert emitted_law(rejection_sample).tolist() == pytest.approx([0.2, 0.4, 0.4], abs=0.008)
    wrong = emitted_law(rejection_sample_residual_at_the_draft)
    assert wrong.tolist() == pytest.approx([0.3, 0.3, 0.4], abs=0.008)


def test_B098_hides_where_q_is_one_hot() -> None:
    call = batch()
    call["draft_probs"] = torch.nn.functional.one_hot(call["draft_ids"], 5).float()
    right = rejection_sample(**call, max_drafts=3)
    wrong = rejection_sample_residual_at_the_draft(**call, max_drafts=3)
    assert torch.equal(right.token_ids, wrong.token_ids)

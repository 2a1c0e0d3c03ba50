"""Top-k: the same list every time, and never a key that may not be selected."""

import math

import pytest
import torch
from tests.support import raw

from mla_ref.indexer import select_topk, select_topk_chunked


def by_sorting(row: list[float], length: int, k: int) -> list[int]:
    """Python's own stable sort as the oracle."""
    allowed = [
        i for i in range(min(length, len(row))) if not math.isnan(row[i]) and row[i] != -math.inf
    ]
    best = sorted(allowed, key=lambda i: -row[i])[:k]
    return best + [-1] * (k - len(best))


@pytest.mark.parametrize("k", [0, 1, 3, 7, 20])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8192])
def test_is_a_stable_sort(k: int, chunk: int) -> None:
    scores = torch.randint(-3, 4, (40, 13)).float()
    scores[torch.rand(40, 13) < 0.1] = math.nan
    scores[torch.rand(40, 13) < 0.1] = -math.inf
    scores[torch.rand(40, 13) < 0.1] = math.inf
    lens = torch.randint(0, 14, (40,))
    expected = [by_sorting(r, n, k) for r, n in zip(scores.tolist(), lens.tolist(), strict=True)]
    assert select_topk(scores, lens, k).tolist() == expected
    chunked = select_topk_chunked(lambda a, n: scores[:, a : a + n], 13, lens, k, chunk=chunk)
    assert chunked.tolist() == expected


def test_B031_a_row_shorter_than_k() -> None:
    for length in (0, 1, 2047, 2048, 2049, 249):
        scores = torch.randn(1, length)
        picked = select_topk(scores, torch.tensor([length]), 2048)
        assert picked.shape == (1, 2048)
        filled = min(length, 2048)
        assert picked[0, filled:].eq(-1).all()
        if length <= 2048:
            assert sorted(picked[0, :filled].tolist()) == list(range(length))


def test_B032_thousands_of_ties() -> None:
    scores = torch.zeros(1, 8320)
    winners = torch.randperm(8320)[:100]
    scores[0, winners] = torch.rand(100) + 1
    picked = select_topk(scores, torch.tensor([8320]), 2048)[0].tolist()
    assert set(picked[:100]) == set(winners.tolist())
    zeros = [i for i in range(8320) if i not in set(winners.tolist())]
    assert picked[100:] == zeros[:1948]


def test_B034_nan_is_never_chosen() -> None:
    scores = torch.full((2, 3000), math.nan)
    numbers = torch.randperm(3000)[:10]
    scores[0, numbers] = torch.randn(10)
    picked = select_topk(scores, torch.tensor([3000, 3000]), 64)
    assert set(picked[0, :10].tolist()) == set(numbers.tolist())
    assert picked[0, 10:].eq(-1).all()
    assert picked[1].eq(-1).all()


def test_B035_very_low_scores_are_scores() -> None:
    scores = -7e4 - torch.arange(1003.0)[None]
    assert select_topk(scores, torch.tensor([1003]), 5).tolist() == [[0, 1, 2, 3, 4]]


def test_B036_minus_infinity_is_not_selectable() -> None:
    scores = torch.full((1, 6), -math.inf)
    assert select_topk(scores, torch.tensor([6]), 4).eq(-1).all()


def test_B042_chunks_of_a_prefill_select_what_one_shot_selects() -> None:
    scores = torch.randn(100, 100)
    lens = torch.arange(1, 101)
    whole = select_topk(scores, lens, 4)
    for cut in (52, 76, 88, 96):
        parts = [select_topk(scores[a:b, :b], lens[a:b], 4) for a, b in ((0, cut), (cut, 100))]
        assert torch.equal(torch.cat(parts), whole)


def test_scores_of_128k_keys_are_never_held_at_once() -> None:
    asked = []

    def scores(first: int, count: int) -> torch.Tensor:
        asked.append(count)
        return (torch.arange(first, first + count) % 1000).float()[None]

    picked = select_topk_chunked(scores, 131_072, torch.tensor([131_072]), 5)
    assert picked.tolist() == [[999, 1999, 2999, 3999, 4999]]
    assert max(asked) == 8192


def test_the_same_list_twice_and_for_permuted_rows() -> None:
    scores, lens = torch.randint(0, 3, (8, 500)).float(), torch.randint(0, 501, (8,))
    first = select_topk(scores, lens, 64)
    order = torch.randperm(8)
    assert torch.equal(select_topk(scores, lens, 64), first)
    assert torch.equal(select_topk(scores[order], lens[order], 64), first[order])


def test_input_that_does_not_fit_is_named() -> None:
    scores, lens = torch.zeros(2, 3), torch.tensor([1, 2])
    for name, args in (
        ("scores", (torch.zeros(3), lens, 1)),
        ("scores", (scores.int(), lens, 1)),
        ("visible_lens", (scores, lens[:1], 1)),
        ("visible_lens", (scores, lens.float(), 1)),
        ("k", (scores, lens, -1)),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(select_topk)(*args)

"""Prompt look-up against a search that tries every place."""

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
import hypothesis
from hypothesis import strategies as st
from tests.support import raw

from mla_ref.speculative import propose_ngram


def by_search(tokens: list[int], num_drafts: int, max_ngram: int, min_ngram: int) -> list[int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + num_drafts]
    return []


@hypothesis.given(
    tokens=st.lists(st.integers(0, 3), max_size=40) | st.lists(st.integers(0, 2**31), max_size=9),
    num_drafts=st.integers(0, 6),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 4),
)
@hypothesis.settings(max_examples=150)
def test_is_the_search(tokens: list[int], num_drafts: int, min_ngram: int, more: int) -> None:
    sizes = {"max_ngram": min_ngram + more, "min_ngram": min_ngram}
    got = propose_ngram(tokens, num_drafts=num_drafts, **sizes)
    assert got == by_search(tokens, num_drafts, **sizes)
    assert all(type(token) is int for token in got)


@pytest.mark.parametrize(
    "tokens, num_drafts, sizes, expected",
    [
        ([1, 2, 3, 4, 2, 3], 4, (3, 2), [4, 2, 3]),  # the example in vLLM's proposer
        ([1, 2, 3, 4, 2, 3], 1, (3, 2), [4]),
        ([1, 2, 3, 4, 2, 3], 4, (3, 3), []),
        ([5, 1, 9, 5, 2, 9, 5], 2, (1, 1), [1, 9]),  # the earliest of two
        ([5, 1, 9, 5, 2, 9, 5], 2, (2, 1), [2, 9]),  # the longer end goes first
        ([7, 7, 7], 5, (3, 1), [7]),  # may overlap the end
        ([1, 2, 3], 5, (3, 1), []),
        ([1], 5, (3, 1), []),
        ([], 5, (3, 1), []),
        ([1, 1], 0, (3, 1), []),
    ],
)
def test_worked_examples(
    tokens: list[int], num_drafts: int, sizes: tuple[int, int], expected: list[int]
) -> None:
    got = propose_ngram(tokens, num_drafts=num_drafts, max_ngram=sizes[0], min_ngram=sizes[1])
    assert got == expected


def test_a_long_text() -> None:
    tokens = [*range(100_000), 17, 18, 19]
    assert propose_ngram(tokens, num_drafts=3) == [20, 21, 22]
    assert propose_ngram([4] * 100_000, num_drafts=3, max_ngram=50) == [4, 4, 4]


def test_input_that_does_not_fit_is_named() -> None:
    for error, name, call in (
        (TypeError, "token_ids", {"token_ids": 5}),
        (TypeError, "token_ids", {"token_ids": [0.5, 1.5]}),
        (TypeError, "token_ids", {"token_ids": [[1, 2], [3, 4]]}),
        (ValueError, "num_drafts", {"num_drafts": -1}),
        (ValueError, "max_ngram", {"max_ngram": 1, "min_ngram": 2}),
        (ValueError, "min_ngram", {"min_ngram": 0}),
    ):
        with pytest.raises(error, match=name):
            raw(propose_ngram)(**({"token_ids": [1, 2], "num_drafts": 2} | call))

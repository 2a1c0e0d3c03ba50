"""Acceptance in numbers, by hand and by counting."""

import math

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
import hypothesis
from hypothesis import strategies as st

from mla_ref.speculative import AcceptanceStats

steps = st.lists(
    st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30
)


def stats_of(pairs: list[tuple[int, int]]) -> AcceptanceStats:
    stats = AcceptanceStats()
    for drafted, accepted in pairs:
        stats.add(drafted, accepted)
    return stats


def test_worked_example() -> None:
    stats = stats_of([(3, 3), (3, 1), (3, 0), (1, 1), (0, 0)])
    assert stats.num_drafts == 4  # the step without a draft is not counted
    assert (stats.num_drafted, stats.num_accepted) == (10, 5)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 2.25
    assert stats.histogram == (1, 2, 0, 1)
    assert stats.per_position_rates == (0.75, 0.25, 0.25)


def test_no_draft_yet() -> None:
    for stats in (AcceptanceStats(), stats_of([(0, 0)])):
        assert stats.num_drafts == 0
        assert math.isnan(stats.acceptance_rate)
        assert math.isnan(stats.mean_acceptance_length)
        assert stats.histogram == stats.per_position_rates == ()


@hypothesis.given(steps, steps)
@hypothesis.settings(max_examples=40)
def test_is_counting(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    merged = stats_of(one) + stats_of(two)
    drafts = [pair for pair in one + two if pair[0]]
    assert merged == stats_of(one + two) == stats_of(two + one)
    assert merged.num_drafts == len(drafts) == sum(merged.histogram)
    assert merged.num_accepted == sum(a for _, a in drafts)
    rates = merged.per_position_rates
    for place, rate in enumerate(rates):
        assert rate == sum(a > place for _, a in drafts) / len(drafts)
    assert list(rates) == sorted(rates, reverse=True)
    if drafts:
        assert 1 <= merged.mean_acceptance_length <= 1 + max(d for d, _ in drafts)
        # The mean length is 1 and the rate of each position.
        assert merged.mean_acceptance_length == pytest.approx(1 + sum(rates))


def test_merging_leaves_both_as_they_were() -> None:
    one, two = stats_of([(2, 1)]), stats_of([(2, 2)])
    merged = one + two
    merged.add(2, 0)
    assert (one.num_drafts, two.num_drafts, merged.num_drafts) == (1, 1, 3)


def test_counts_that_cannot_be_are_named() -> None:
    stats = AcceptanceStats()
    for name, pair in (("accepted", (2, 3)), ("accepted", (2, -1)), ("drafted", (-1, 0))):
        with pytest.raises(ValueError, match=name):
            stats.add(*pair)
    with pytest.raises(TypeError):
        stats + 1

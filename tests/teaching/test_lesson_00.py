"""What lesson 00 says of checks: where the planted ones look away, and what the library does."""

import pytest
import torch

from mla_ref.bench import Agreement, GateError, measure
from mla_ref.numerics import compare, precision_rule
from mla_ref.teaching import planted


def test_B175_nan_passes_a_check_that_looks_for_large_differences():
    expected = torch.randn(4, 3)
    nothing_written = torch.full_like(expected, torch.nan)
    assert planted.no_difference_above(nothing_written, expected, 1e-6)
    found = compare(nothing_written, expected)
    assert found.nan_mismatches == 12
    assert not found.agrees(max_abs=1e9)


def test_B175_the_planted_check_is_right_on_finite_numbers():
    expected = torch.randn(4, 3)
    for off in (0.0, 0.5, 2.0):
        actual = expected.clone()
        actual[1, 2] -= off
        agrees = compare(actual, expected).agrees(max_abs=1.0)
        assert planted.no_difference_above(actual, expected, 1.0) == agrees == (off < 1)


def forgets_beyond_256(x):
    """Right for lists of up to 256."""
    return x[:256].sum()


def test_B176_a_check_at_shorter_lengths_never_takes_the_path_that_is_timed():
    timed = [100, 256, 300, 4096]
    assert planted.lengths_to_check(timed) == [100, 256, 256, 256]

    def wrong_at(lengths):
        lists = [torch.ones(n) for n in lengths]
        return [len(x) for x in lists if forgets_beyond_256(x) != x.sum()]

    assert wrong_at(planted.lengths_to_check(timed)) == []
    assert wrong_at(timed) == [300, 4096]


def test_B176_our_benchmark_checks_the_call_that_it_times():
    x = torch.ones(300)

    def check(result):
        return [Agreement("sum", compare(result, x.sum()), rel_l2=1e-6, max_abs=1e-3)]

    assert measure("whole", lambda: x.sum(), check, repeats=2).median_s > 0
    with pytest.raises(GateError, match="sum"):
        measure("short", lambda: forgets_beyond_256(x), check, repeats=2)


def test_torch_allclose_takes_one_row_for_four():
    """The lesson says so; ours does not."""
    assert torch.allclose(torch.ones(1, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="actual is"):
        compare(torch.ones(1, 3), torch.ones(4, 3))


def test_the_rule_allows_what_the_answer_on_paper_says():
    """Part 8 b: a row whose largest number is 3.1, a twin that errs by 0.006, in bfloat16."""
    oracle = torch.tensor([[3.1, 0.5]], dtype=torch.float64)
    twin = oracle + torch.tensor([[0.0, 0.006]])
    verdict = precision_rule(torch.tensor([[3.09375, 0.5]]).bfloat16(), oracle, twin)
    assert verdict.limit == pytest.approx(0.012 + 2**-6)
    assert verdict.passed

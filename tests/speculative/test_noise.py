"""Noise that belongs to a seed and a position."""

import math
from itertools import pairwise

import pytest
import torch
from tests.speculative.chance import chi_square_p_value, uniform_p_value

from mla_ref.speculative import position_noise


def test_is_a_function_of_seed_and_position() -> None:
    first = position_noise(42, 7, 50)
    torch.manual_seed(99)
    position_noise(1, 1, 10)
    again = position_noise(42, 7, 50)
    assert first.uniform == again.uniform
    assert torch.equal(first.exponential, again.exponential)


def test_a_larger_vocabulary_only_adds_draws() -> None:
    small, large = position_noise(3, 0, 10), position_noise(3, 0, 49_152)
    assert small.uniform == large.uniform
    assert torch.equal(small.exponential, large.exponential[:10])


def test_seed_1_at_2_and_seed_2_at_1_are_strangers() -> None:
    pairs = [(seed, position) for seed in range(-8, 8) for position in range(16)]
    noise = [position_noise(*pair, 3) for pair in pairs]
    assert len({n.uniform for n in noise}) == 256
    assert len({tuple(n.exponential.tolist()) for n in noise}) == 256
    # Nor is one stream the other shifted: float32 draws meet by chance, but not two in a row.
    a, b = (position_noise(*pair, 1000).exponential.tolist() for pair in ((1, 2), (2, 1)))
    assert not set(pairwise(a)) & set(pairwise(b))


def test_known_values() -> None:
    """Philox's words by NumPy, uniforms and exponentials by hand, for any other implementation."""
    noise = position_noise(1, 2, 3)
    assert noise.uniform == pytest.approx(0.30931491118583465, abs=1e-16)
    assert noise.exponential.tolist() == pytest.approx([1.0301421, 3.299421, 0.03884231], rel=1e-6)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_the_whole_range_of_seeds(seed: int) -> None:
    noise = position_noise(seed, 0, 100)
    assert 0 < noise.uniform <= 1
    assert noise.exponential.dtype == torch.float32
    assert bool((noise.exponential > 0).all() & (noise.exponential < 37).all())
    # All 64 bits count: a key that went through a float would lose the last.
    assert position_noise(seed ^ 1, 0, 1).uniform != noise.uniform
    assert position_noise(seed, 2**63 - 1, 1).uniform != position_noise(seed, 2**63 - 2, 1).uniform


def test_law_of_the_exponentials() -> None:
    for seed in range(3):
        draws = position_noise(seed, 0, 100_000).exponential.double()
        deciles = -torch.log1p(-torch.arange(1, 10).double() / 10)
        counts = torch.bincount(torch.bucketize(draws, deciles), minlength=10)
        assert chi_square_p_value(counts, torch.full((10,), 1e4)) > 1e-3
        assert draws.mean().item() == pytest.approx(1, abs=4 / math.sqrt(1e5))
        assert len(draws.unique()) > 99_000  # not a coarse grid
        # The smallest wins the race; of 100,000 it lies near 1e-5.
        assert 1e-7 < draws.min() < 1e-4


@pytest.mark.parametrize("along", ["seeds", "positions", "diagonal"])
def test_neighbours_are_independent(along: str) -> None:
    pairs = {
        "seeds": [(s, 0) for s in range(2000)],
        "positions": [(0, p) for p in range(2000)],
        "diagonal": [(s, 2000 - s) for s in range(2000)],
    }[along]
    noise = [position_noise(*pair, 1) for pair in pairs]
    u = torch.tensor([n.uniform for n in noise], dtype=torch.float64)
    v = torch.exp(-torch.stack([n.exponential[0] for n in noise]).double())
    for values in (u, v):
        assert uniform_p_value(values.tolist()) > 1e-3
    # Four correlations of 2000 pairs; the standard deviation of each is 1 / sqrt(2000).
    for a, b in ((u[1:], u[:-1]), (v[1:], v[:-1]), (u, v), (u[1:], v[:-1])):
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(2000)


def test_input_that_does_not_fit_is_named() -> None:
    for name, arguments in (
        ("seed", (2**63, 0, 1)),
        ("seed", (-(2**63) - 1, 0, 1)),
        ("position", (0, -1, 1)),
        ("vocab", (0, 0, -1)),
    ):
        with pytest.raises(ValueError, match=name):
            position_noise(*arguments)

"""Statistics for tests of a law: chi-square and Kolmogorov-Smirnov, and noise by the block."""

import math

import torch
from torch import Tensor

from mla_ref.speculative import position_noise


def chi_square_p_value(counts: Tensor, expected: Tensor) -> float:
    """How often a draw of the expected law is as far from it; bins under 5 expected are pooled."""
    order = torch.argsort(expected)
    counts, expected = counts.double()[order], expected.double()[order]
    assert counts[expected == 0].sum() == 0, "a token of probability 0 came out"
    # Pool from the smallest upwards until a bin holds 5.
    pooled: list[list[float]] = [[0.0, 0.0]]
    for count, mean in zip(counts.tolist(), expected.tolist(), strict=True):
        if pooled[-1][1] >= 5:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += count
        pooled[-1][1] += mean
    statistic = sum((count - mean) ** 2 / mean for count, mean in pooled)
    freedom = torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()).item()


def uniform_p_value(values: list[float]) -> float:
    """Kolmogorov-Smirnov: how often uniform numbers lie as unevenly in 0 .. 1 (Stephens 1970)."""
    n = len(values)
    distance = max(
        max((i + 1) / n - value, value - i / n) for i, value in enumerate(sorted(values))
    )
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(
        1.0,
        2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101)),
    )


def noise_block(seed: int, draws: int, vocab: int) -> tuple[Tensor, Tensor]:
    """uniform [draws] and exponential [draws, vocab], cut from the long noise of a few positions.

    A draw from a position each would take a second for 20,000.
    """
    per_call = 1000
    parts = [
        position_noise(seed, position, per_call * (vocab + 1)).exponential.view(per_call, -1)
        for position in range(-(-draws // per_call))
    ]
    block = torch.cat(parts)[:draws]
    return torch.exp(-block[:, vocab].double()), block[:, :vocab].contiguous()

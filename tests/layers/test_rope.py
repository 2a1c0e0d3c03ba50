"""Rotary positions: pairs, frequencies, YaRN, accuracy far out."""

import math

import mpmath
import pytest
import torch
from tests.support import bits, raw

from mla_ref.layers import (
    PRESETS,
    RopeConfig,
    YarnConfig,
    apply_rope,
    inverse_frequencies,
    rope_table,
    yarn_mscale,
)

DEEPSEEK_YARN = YarnConfig(40.0, 4096)


def turn(x: torch.Tensor, positions: list[int], config: RopeConfig) -> torch.Tensor:
    cos, sin = rope_table(config, torch.tensor(positions, dtype=torch.int64))
    return apply_rope(x, cos, sin, interleaved=config.interleaved)


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [
        # (1, 2) turned by 1 radian, (3, 4) by 0.01.
        (True, [-1.14264, 1.92208, 2.95985, 4.02980]),
        # (1, 3) turned by 1 radian, (2, 4) by 0.01.
        (False, [-1.98411, 1.95990, 2.46238, 4.01980]),
    ],
)
def test_B023_which_numbers_are_a_pair(interleaved: bool, expected: list[float]) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    turned = turn(x, [1], RopeConfig(4, 1e4, interleaved))
    assert turned[0].tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("name", ["v3", "v3.2", "deepseek-v2-lite", "glm-5", "glm-5.2"])
def test_B023_attention_pairs_neighbours(name: str) -> None:
    """The main attention of these models is interleaved, whatever their indexer does."""
    assert PRESETS[name].rope.interleaved


def test_one_quarter_turn_by_hand() -> None:
    """Position 1 at a frequency of 1 turns (1, 0) to (cos 1, sin 1)."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert turn(x, [1], RopeConfig(2, 1e4, True))[0].tolist() == [math.cos(1), math.sin(1)]


def permuted(x: torch.Tensor) -> torch.Tensor:
    """Interleaved order to half-split order: all first numbers of the pairs, then all second."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def test_B081_layouts_differ_by_a_permutation() -> None:
    interleaved, half = RopeConfig(8, 1e4, True), RopeConfig(8, 1e4, False)
    q, k = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 3, 8, dtype=torch.float64)
    positions = [0, 1, 7, 100, 4095]
    q_i, k_i = turn(q, positions, interleaved), turn(k, positions, interleaved)
    q_h, k_h = turn(permuted(q), positions, half), turn(permuted(k), positions, half)
    # Same numbers in another order, so the same dot products.
    assert torch.equal(permuted(q_i), q_h)
    assert torch.allclose((q_i * k_i).sum(-1), (q_h * k_h).sum(-1), rtol=0, atol=1e-14)
    # Mixed, the scores are wrong, but only where the positions differ from 0.
    mixed = (q_i[2] * k_h[3]).sum(-1)
    assert (mixed - (q_i[2] * k_i[3]).sum(-1)).abs().max() > 0.1


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rotation_keeps_lengths(interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 64, dtype=dtype)
    turned = turn(x, [0, 1, 5000, 1_000_000], RopeConfig(64, 1e4, interleaved))
    rel = 1e-14 if dtype == torch.float64 else 1e-6
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=rel, atol=0)
    assert torch.equal(turned[0], x[0])  # position 0 turns nothing


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("yarn", [None, DEEPSEEK_YARN])
def test_scores_depend_on_the_distance_only(interleaved: bool, yarn: YarnConfig | None) -> None:
    config = RopeConfig(64, 1e4, interleaved, yarn)
    q, k = torch.randn(1, 64, dtype=torch.float64), torch.randn(1, 64, dtype=torch.float64)

    def score(q_at: int, k_at: int) -> float:
        return float((turn(q, [q_at], config) * turn(k, [k_at], config)).sum())

    for shift in (1, 100, 131_072):
        assert score(17 + shift, 5 + shift) == pytest.approx(score(17, 5), abs=1e-8)
    assert abs(score(17, 5) - score(17, 6)) > 0.1


def turns(pair: int, config: RopeConfig) -> float:
    """Full turns of a pair within the original context."""
    assert config.yarn is not None
    frequency = config.theta ** (-2 * pair / config.dim)
    return config.yarn.original_max_position_embeddings * frequency / (2 * math.pi)


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(64, 1e4, True, DEEPSEEK_YARN),
        RopeConfig(64, 1e4, True, YarnConfig(4.0, 32768)),
        RopeConfig(128, 1e6, False, YarnConfig(8.0, 8192, beta_fast=16.0, beta_slow=2.0)),
        RopeConfig(16, 1e4, True, YarnConfig(2.0, 64)),  # no pair turns 32 times
        RopeConfig(8, 10.0, True, YarnConfig(3.0, 1_000_000)),  # every pair turns often
    ],
)
def test_yarn_by_counting_turns(config: RopeConfig) -> None:
    """A second formulation: find the ramp's ends by counting, without logarithms.

    The ramp starts at the last pair that turns beta_fast times or more, and ends at the first that
    turns beta_slow times or less; pairs are counted on beyond the ones there are.
    """
    yarn, dim = config.yarn, config.dim
    assert yarn is not None
    counted = range(10 * dim)
    fast = [i for i in counted if turns(i, config) >= yarn.beta_fast]
    slow = [i for i in counted if turns(i, config) <= yarn.beta_slow]
    low = min(max(fast, default=0), dim * 10)
    high = min(min(slow), dim - 1)
    expected = []
    for pair in range(dim // 2):
        plain = config.theta ** (-2 * pair / dim)
        if pair <= low:
            expected.append(plain)
        elif pair >= high:
            expected.append(plain / yarn.factor)
        else:
            share = (pair - low) / (high - low)
            expected.append(share * plain / yarn.factor + (1 - share) * plain)
    assert inverse_frequencies(config).tolist() == pytest.approx(expected, rel=1e-13)


def test_yarn_of_deepseek_v3() -> None:
    """64 ln(4096 / (2 pi 32)) / (2 ln 1e4) = 10.47 and, for one turn, 22.51: pairs 10 to 23."""
    frequencies = inverse_frequencies(RopeConfig(64, 1e4, True, DEEPSEEK_YARN))
    plain = inverse_frequencies(RopeConfig(64, 1e4, True))
    ratio = (plain / frequencies).tolist()
    assert ratio[:11] == pytest.approx([1.0] * 11, rel=1e-14)
    assert ratio[23:] == pytest.approx([40.0] * 9, rel=1e-14)
    assert all(1 < r < 40 for r in ratio[11:23])
    # Pair 16 is 6/13 along the ramp.
    assert float(frequencies[16]) == pytest.approx(0.01 * (6 / 13 / 40 + 7 / 13), rel=1e-13)


def test_B079_mscale() -> None:
    """0.1 ln(40) + 1 = 1.3688879; nothing without a stretch."""
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.3688879, abs=1e-7)
    assert yarn_mscale(40.0, 0.0) == 1.0
    assert yarn_mscale(1.0, 1.0) == yarn_mscale(0.5, 1.0) == 1.0


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "factor"),
    [(1.0, 1.0, 1.0), (0.707, 0.707, 1.0), (1.0, 0.0, 1.3688879), (1.0, 0.5, 1.1557220)],
)
def test_B079_mscale_on_cos_and_sin(mscale: float, mscale_all_dim: float, factor: float) -> None:
    """(0.1 m ln 40 + 1) / (0.1 m_all ln 40 + 1); with equal weights exactly 1."""
    yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim)
    cos, sin = rope_table(RopeConfig(64, 1e4, True, yarn), torch.tensor([0, 3]))
    assert cos[0].tolist() == pytest.approx([factor] * 32, abs=1e-7)
    assert (sin[0] == 0).all()
    assert (cos[1] ** 2 + sin[1] ** 2).tolist() == pytest.approx([factor**2] * 32, abs=1e-6)
    if mscale == mscale_all_dim:
        assert (cos[0] == 1.0).all()


def test_tables_against_fifty_digits() -> None:
    """Angle and cosine of far positions, computed with mpmath."""
    positions = torch.tensor([6143, 100_000, 1_048_575])
    cos, sin = rope_table(RopeConfig(64, 8e6, True), positions)
    with mpmath.workdps(50):
        for row, position in enumerate(positions.tolist()):
            for pair in range(32):
                angle = position * mpmath.mpf(8e6) ** (mpmath.mpf(-2 * pair) / 64)
                assert abs(float(cos[row, pair]) - float(mpmath.cos(angle))) < 1e-9
                assert abs(float(sin[row, pair]) - float(mpmath.sin(angle))) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_position_100_000_stays_accurate(dtype: torch.dtype, limit: float) -> None:
    """The activations' dtype rounds the result, never the angle."""
    x = torch.randn(2, 8, 64, dtype=torch.float64).to(dtype)
    config = RopeConfig(64, 1e4, True)
    exact = turn(x.double(), [100_000, 99_999], config)
    error = (turn(x, [100_000, 99_999], config).double() - exact).abs()
    assert (error <= exact.abs() * limit + 1e-6).all()


def test_frequencies_in_bfloat16_are_no_use() -> None:
    """What the docstring of `rope_table` says of such frequencies."""
    frequencies = inverse_frequencies(RopeConfig(64, 1e4, True))
    rounded = (6143 * frequencies.bfloat16().double()).cos()
    assert float((rounded - (6143 * frequencies).cos()).abs().max()) == pytest.approx(
        1.05, abs=5e-3
    )


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0), (3, 2, 0), (2, 4, 3, 8)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_empty_and_many_dimensions(shape: tuple[int, ...], interleaved: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    config = RopeConfig(shape[-1], 1e4, interleaved)
    turned = turn(x, list(range(shape[0])), config)
    assert turned.shape == shape
    if x.numel():
        one = torch.stack([turn(x[:, i, j], [0, 1], config) for i in range(4) for j in range(3)])
        assert torch.equal(turned, one.transpose(0, 1).reshape(shape))


def test_strided_input_gives_the_same_bits_and_stays_as_it_is() -> None:
    x = torch.randn(6, 5, 16)
    view = x.transpose(0, 1)[:, ::2, 8:]
    cos, sin = rope_table(RopeConfig(8, 1e4, True), torch.arange(5))
    before = x.clone()
    turned = apply_rope(view, cos, sin, interleaved=True)
    assert torch.equal(
        bits(turned), bits(apply_rope(view.contiguous(), cos, sin, interleaved=True))
    )
    wide = torch.cat([cos, cos], dim=1)
    strided = apply_rope(view, wide[:, 4:], sin.T.contiguous().T, interleaved=True)
    assert torch.equal(bits(turned), bits(strided))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dim", [7, 1])
def test_B082_an_odd_dimension_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="rope dim must be even"):
        RopeConfig(dim, 1e4, True)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: raw(RopeConfig)(-2, 1e4, True), "rope dim"),
        (lambda: raw(RopeConfig)(2.0, 1e4, True), "rope dim"),
        (lambda: raw(RopeConfig)(64, 1.0, True), "theta"),
        (lambda: raw(RopeConfig)(64, 0.0, True), "theta"),
        (lambda: raw(RopeConfig)(64, math.nan, True), "theta"),
        (lambda: raw(RopeConfig)(64, 1e4, "no"), "interleaved must be a bool, got 'no'"),
        (lambda: raw(RopeConfig)(64, 1e4, 1), "interleaved"),
        (lambda: raw(RopeConfig)(64, 1e4, None), "interleaved"),
        (lambda: raw(RopeConfig)(64, 1e4, True, {}), "yarn must be a YarnConfig or None"),
        (lambda: raw(RopeConfig)(64, 1e4, True, 40.0), "yarn"),
        (lambda: raw(YarnConfig)(0.0, 4096), "factor"),
        (lambda: raw(YarnConfig)(math.inf, 4096), "factor"),
        (lambda: raw(YarnConfig)(40.0, 0), "original_max_position_embeddings"),
        (lambda: raw(YarnConfig)(40.0, 4096.0), "original_max_position_embeddings"),
        (lambda: raw(YarnConfig)(40.0, 4096, beta_fast=0.0), "beta_fast"),
        (lambda: raw(YarnConfig)(40.0, 4096, beta_slow=-1.0), "beta_slow"),
        (lambda: raw(YarnConfig)(40.0, 4096, mscale=-3.0), "mscale"),
        (lambda: raw(YarnConfig)(40.0, 4096, mscale_all_dim=math.nan), "mscale_all_dim"),
    ],
)
def test_a_config_that_cannot_be(make, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        make()


def test_bad_input_is_named() -> None:
    cos, sin = rope_table(RopeConfig(8, 1e4, True), torch.arange(3))
    good = {"x": torch.randn(3, 2, 8), "cos": cos, "sin": sin}
    for name, wrong in [
        ("x", None),
        ("x", torch.randn(8)),
        ("x", torch.randn(3, 2, 7)),
        ("x", torch.ones(3, 2, 8, dtype=torch.int64)),
        ("cos", cos[:2]),
        ("cos", cos[:, :3]),
        ("cos", torch.cat([cos, cos], dim=1)),  # transformers' full-width tables
        ("cos", cos[None]),
        ("sin", None),
        ("sin", sin.long()),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(apply_rope)(**(good | {name: wrong}), interleaved=True)
    for positions in ([0, 1], torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])):
        with pytest.raises((TypeError, ValueError), match="positions"):
            raw(rope_table)(RopeConfig(8, 1e4, True), positions)

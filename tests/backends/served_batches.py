"""Batches like those that vLLM drives its sparse-MLA backends with, at an eighth of their size.

With each batch: the float64 oracle on what a profile reads, and how far the profile's rounding may
take a result from it.

Nothing here shares code with `mla_ref.backends.served`: the bytes are decoded by the definition of
`mla_ref.testing`, queries are rounded by ml_dtypes, and the bounds are worked out on paper.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tests.support import scatter_pages
from torch import Tensor

from mla_ref.backends import KINDS, AttnSpec, Plan
from mla_ref.backends.served import ServedBackend, ServedProfile
from mla_ref.cache import pack_fp8_rows
from mla_ref.indexer import positions_to_slots
from mla_ref.numerics import AttentionResult, oracle_attention
from mla_ref.testing import definition

CPU = torch.device("cpu")
ROUTES = ("decode", "extend")
# Lengths of the requests, and how many of their last tokens are this step's.
BATCHES = {
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "mixed_medium": ([64, 128, 256], [1, 1, 7]),
    "small_prefill": ([32, 40], [8, 8]),
    "medium_prefill": ([32, 64, 128, 256], [4] * 4),
    "single_prefill": ([128], [8]),
    "large_q_prefill": ([128] * 2, [8] * 2),
    "large_q_pure_prefill": ([8] * 2, [8] * 2),
    "small_decode": ([32, 40], [1, 1]),
    "medium_decode": ([16, 32, 64, 128], [1] * 4),
    "large_decode": ([256] * 8, [1] * 8),
    "spec_decode_small": ([16, 32, 64, 128], [4] * 4),
    "spec_decode_medium": ([64, 128, 256], [8] * 3),
}
TOPK, PAGE, MOST_VALID = 128, 64, 64
SCALE = 576**-0.5  # as in that test; a number, not a model's scale
BF16 = 2.0**-8  # the most that rounding to bfloat16 changes a number, relative to it
SLACK = 1.01  # products of two roundings


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and what they stand for."""

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    rows: Tensor  # as stored, token after token, without pages
    visible: Tensor  # [rows of q, tokens]

    @property
    def spec(self) -> AttnSpec:
        packed = self.kv_cache.dtype == torch.uint8
        return AttnSpec(
            num_heads=self.q.shape[1],
            topk=TOPK,
            page_size=PAGE,
            cache_format="fp8" if packed else "bf16",
            q_dtype=self.q.dtype,
        )

    def plan(self, backend: ServedBackend, kinds: tuple[str, ...] = KINDS) -> Plan:
        rows = len(self.q)
        return backend.plan(self.spec, max_rows=rows, max_requests=rows, device=CPU, kinds=kinds)

    def run(self, backend: ServedBackend, route: str, **more: Any) -> AttentionResult:
        call = getattr(self.plan(backend), route)
        return call(self.q, self.kv_cache, self.indices, softmax_scale=SCALE, **more)


@lru_cache(maxsize=64)
def batch(
    name: str, cache_format: str, *, data: str = "rand", heads: int = 8, scale_rule: str = "fp32"
) -> Batch:
    """Each row lists min(64, pos + 1) of its keys, at (arange + 7 * token) mod (pos + 1).

    Args:
        name: Of `BATCHES`.
        cache_format: Of `AttnSpec`.
        data: "rand": [0, 1) as in that test. "randn": normal, so that values cancel.
        heads: Query heads.
        scale_rule: Of 656-byte rows.
    """
    lens, query_lens = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    draw = getattr(torch, data)
    tokens = [draw(n, 576, generator=generator).to(torch.bfloat16) for n in lens]
    if cache_format == "fp8":
        tokens = [pack_fp8_rows(rows, scale_rule=scale_rule) for rows in tokens]
    poison = 255 if cache_format == "fp8" else float("nan")  # 0xFF is NaN as E4M3 and in a scale
    cache, block_table = scatter_pages(tokens, PAGE, poison=poison)

    requests = torch.tensor([r for r, n in enumerate(query_lens) for _ in range(n)])
    positions = torch.full((len(requests), TOPK), -1)
    visible = torch.zeros(len(requests), sum(lens), dtype=torch.bool)
    row = 0
    for request, (length, new) in enumerate(zip(lens, query_lens, strict=True)):
        for position in range(length - new, length):
            valid = min(MOST_VALID, position + 1)
            chosen = (torch.arange(valid) + row * 7) % (position + 1)
            positions[row, :valid] = chosen
            visible[row, sum(lens[:request]) + chosen] = True
            row += 1
    slots = positions_to_slots(positions.int(), requests.int(), block_table, PAGE)
    q = draw(row, heads, 576, generator=generator).to(torch.bfloat16)
    return Batch(q, cache, slots, torch.cat(tokens), visible)


def rows_as_read(scale_reader: str, rounded: str, rows: Tensor) -> Tensor:
    """The float64 numbers that a kernel multiplies, from the rows as stored.

    Args:
        scale_reader: As in `Arithmetic`.
        rounded: As `rows` in `Arithmetic`.
        rows: Stored rows.
    """
    if rows.dtype != torch.uint8:
        return rows.double()
    truncated = scale_reader == "truncated"
    numbers = (definition.truncated_numbers_of if truncated else definition.numbers_of)(rows)
    if rounded == "bfloat16":
        scales = rows[:, 512:528].clone().view(torch.float32).numpy().astype(np.float64)
        if truncated:
            scales = 2.0 ** np.floor(np.log2(scales))
        narrow = scales.astype(ml_dtypes.bfloat16).astype(np.float64)
        codes = definition.E4M3[rows[:, :512].long()].numpy()
        # 4 and 8 significant bits: the product is exact before it is rounded.
        product = (codes * narrow.repeat(128, axis=1)).astype(ml_dtypes.bfloat16)
        numbers[:, :512] = torch.from_numpy(product.astype(np.float64))
    return numbers


def queries_as_read(profile: ServedProfile, q: Tensor) -> Tensor:
    """The float64 queries that a profile's kernel multiplies."""
    if profile.arithmetic.queries == "as given":
        return q.double()
    wide = q.double().numpy().copy()
    for group in range(4):
        part = wide[..., group * 128 : group * 128 + 128]
        amax = np.abs(part).max(axis=-1, keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(np.maximum(amax, 1e-4) / 448))
        part[...] = (part / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return torch.from_numpy(wide)


def oracle(q: Tensor, rows: Tensor, visible: Tensor) -> AttentionResult:
    return oracle_attention(q, rows[:, None], rows[:, None, :512], visible, softmax_scale=SCALE)


@lru_cache(maxsize=64)
def expected_of(shape: str, cache_format: str, scale_reader: str, rounded: str) -> AttentionResult:
    """The oracle on queries as given and rows as read; the same for profiles that read alike."""
    given = batch(shape, cache_format)
    rows = rows_as_read(scale_reader, rounded, given.rows)
    return oracle(given.q.double(), rows, given.visible)


def score_noise(q: Tensor, rows: Tensor) -> Tensor:
    """What float32 sums of 576 products may do to a score, [rows of q, heads]."""
    return 2.0**-20 * SCALE * (q.abs() @ rows.abs().T).amax(dim=-1)


def limits(profile: ServedProfile, given: Batch) -> tuple[AttentionResult, Tensor, Tensor]:
    """The oracle on queries and rows as the profile reads them, and the largest errors beyond.

    The limits are those of a float32 output; see `rounded` for bfloat16.

    Let A be the oracle with |values|. Rounding a weight w by at most e * w changes an output by at
    most e * A; rounding the partial results by e does too, since they are weighed means. E4M3 has 3
    bits, so e is 2^-4, and 2^-8 if what is lost is rounded again. Below its normal numbers E4M3 has
    a spacing of 2^-9 of the tile's scale amax / 448: half of that, times up to 448 a value, for
    each of n keys, is 2^-10 * n * max(w * s) at most, with s the scales of the values.
    """
    a = profile.arithmetic
    q, rows = queries_as_read(profile, given.q), rows_as_read(a.scale_reader, a.rows, given.rows)
    expected = oracle(q, rows, given.visible)
    absolute = torch.cat([rows[:, :512].abs(), rows[:, 512:]], dim=1)
    size = oracle_attention(
        q, rows[:, None], absolute[:, None, :512], given.visible, softmax_scale=SCALE
    ).out
    share = {"float32": 0.0, "q dtype": BF16, "e4m3": 2.0**-4, "e4m3+residual": 2.0**-8}[a.weights]
    share += BF16 if a.partials == "bfloat16" else 0.0
    noise = score_noise(q, rows)
    out = (share + 2 * noise[..., None] + 2.0**-20) * size
    if a.weights.startswith("e4m3"):
        scores = q @ rows.T * SCALE - expected.lse[..., None]
        weights = torch.exp(scores).masked_fill(~given.visible[:, None], 0.0)
        scales = given.rows[:, 512:528].clone().view(torch.float32).double()
        highest = (weights[..., None] * scales).amax(dim=2)  # [rows, heads, groups]
        keys = given.visible.sum(dim=1)[:, None, None]
        out = out + (2.0**-10 * keys * highest).repeat_interleave(128, dim=-1)
    return expected, SLACK * out, SLACK * noise + 2.0**-22 * expected.lse.abs().clamp(max=1e30)


def rounded(
    expected: AttentionResult, out: Tensor, lse: Tensor
) -> tuple[AttentionResult, Tensor, Tensor]:
    """The same limits where the output is rounded to bfloat16 last."""
    return expected, out + SLACK * BF16 * (expected.out.abs() + out), lse


def assert_within(got: AttentionResult, expected: AttentionResult, out: Tensor, lse: Tensor):
    """NaN and infinity where they belong, and each error within its own limit."""
    for name, a, b, limit in zip(("out", "lse"), got, expected, (out, lse), strict=True):
        a = a.double()
        assert torch.equal(a.isnan(), b.isnan()), name
        assert torch.equal(a.isinf(), b.isinf()) and torch.equal(a[a.isinf()], b[b.isinf()]), name
        error = torch.where(b.isfinite(), a - b, 0.0).abs()
        excess = error - limit
        worst = float(excess.max()) if excess.numel() else 0.0
        assert worst <= 0, f"{name}: {float(error.max()):.2e}, {worst:.1e} over the limit"

"""What the tests of many folders share: calls as a user makes them, random problems, agreement.

Every paged problem here is hostile: pages lie in a random order, and every slot that no token
occupies holds NaN, as do whole pages that belong to nobody. Block tables hold garbage past a
request's last page.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jaxtyping
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_ref.attention import (
    causal_attention,
    mla_absorbed_attention,
    mla_expanded_attention,
    online_attention,
    paged_attention,
    vectorised_attention,
)
from mla_ref.numerics import AttentionResult, compare, oracle_attention

# A page number that must never be looked up: reading it is an IndexError, not a wrong number.
GARBAGE = 10**6


def raw(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a user calls it, without the shape checks that only the tests install.

    Unwrapping `fn` would not do: the functions that it calls are checked as well.
    """

    @functools.wraps(inspect.unwrap(fn))
    def call(*args: Any, **kwargs: Any) -> Any:
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            return fn(*args, **kwargs)
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    return call


def assert_agrees(
    actual: AttentionResult, expected: AttentionResult, *, rel_l2: float, lse_abs: float = 0.0
) -> None:
    """Both parts of two results agree: same NaN and inf, errors within the limits.

    An LSE lies anywhere on the number line, so its error is taken absolutely; by default it may be
    ten times `rel_l2`.
    """
    out, lse = compare(actual.out, expected.out), compare(actual.lse, expected.lse)
    assert out.agrees(rel_l2=rel_l2), f"out: {out}"
    assert lse.agrees(max_abs=lse_abs or 10 * rel_l2), f"lse: {lse}"


def assert_same_bits(actual: AttentionResult, expected: AttentionResult) -> None:
    """Both parts of two results are equal bit for bit, the sign of a zero included."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(bits(a), bits(b)), compare(a, b)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, in which NaN equals NaN and -0.0 differs from 0.0."""
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class NothingReadBack(TorchDispatchMode):
    """Fails at an operator that would wait for a GPU: one that hands numbers to the host.

    Such an operator cannot be captured in a CUDA graph. Also those whose output's size depends on
    the data, because the host must know it.
    """

    reading = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "equal.default")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, says torch's own hook: a yes imports torch._dynamo at the first operator, for 2 s."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert not any(name in str(func) for name in self.reading), f"{func} reads back"
        return func(*args, **(kwargs or {}))


def tensors_of(problem: Any) -> dict[str, Tensor]:
    """The tensors among the fields of a dataclass, by name."""
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def random_qkv(
    s_q: int,
    s_kv: int,
    *,
    h_q: int = 4,
    h_kv: int = 2,
    d_qk: int = 8,
    d_v: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one sequence, standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal(s_q, h_q, d_qk), normal(s_kv, h_kv, d_qk), normal(s_kv, h_kv, d_v)


# Keyword arguments of `random_qkv`: single tokens, rows that see nothing, nothing at all, grouped
# heads, widths that are odd or no power of two.
SHAPES: list[dict[str, int]] = [
    {"s_q": 1, "s_kv": 1},
    {"s_q": 7, "s_kv": 7},
    {"s_q": 1, "s_kv": 13},
    {"s_q": 5, "s_kv": 13, "h_q": 6, "h_kv": 3},
    {"s_q": 9, "s_kv": 4, "h_q": 3, "h_kv": 1},
    {"s_q": 0, "s_kv": 4},
    {"s_q": 4, "s_kv": 0},
    {"s_q": 0, "s_kv": 0},
    {"s_q": 6, "s_kv": 11, "d_qk": 24, "d_v": 16},
    {"s_q": 6, "s_kv": 11, "d_qk": 1, "d_v": 1, "h_q": 1, "h_kv": 1},
    {"s_q": 3, "s_kv": 5, "d_qk": 0, "d_v": 3},
    {"s_q": 3, "s_kv": 5, "h_q": 48, "h_kv": 2},
]


def causal_oracle(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> AttentionResult:
    """The oracle, its mask from the definition: row i sees key j if j <= i + s_kv - s_q."""
    s_q, s_kv = q.shape[0], k.shape[0]
    visible = [[j <= i + s_kv - s_q for j in range(s_kv)] for i in range(s_q)]
    mask = torch.tensor(visible, dtype=torch.bool).reshape(s_q, s_kv)
    return oracle_attention(q, k, v, mask, softmax_scale=softmax_scale)


def _vectorised(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> AttentionResult:
    out, lse = vectorised_attention(q[None], k[None], v[None], softmax_scale=softmax_scale)
    return AttentionResult(out[0], lse[0])


def _paged(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> AttentionResult:
    problem = lay_out([q], [k], [v], softmax_scale, page_size=5)
    return problem.attend()


# Rungs 1 to 4 with one signature: (q, k, v, softmax_scale) of one sequence.
DENSE_RUNGS: dict[str, Callable[[Tensor, Tensor, Tensor, float], AttentionResult]] = {
    "causal": lambda q, k, v, scale: causal_attention(q, k, v, softmax_scale=scale),
    "vectorised": _vectorised,
    "online": lambda q, k, v, scale: online_attention(q, k, v, softmax_scale=scale, block_size=5),
    "paged": _paged,
}


@dataclass(frozen=True)
class PagedProblem:
    """The arguments of `paged_attention`, and what each request's keys and values are."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    softmax_scale: float
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def attend(self, **changed: Any) -> AttentionResult:
        """Rung 4, with some arguments changed."""
        names = ("q", "k_cache", "v_cache", "query_start_loc", "seq_lens", "block_table")
        arguments = {name: getattr(self, name) for name in (*names, "softmax_scale")}
        return paged_attention(**(arguments | changed))

    def each(
        self, attend: Callable[[Tensor, Tensor, Tensor, float], AttentionResult]
    ) -> AttentionResult:
        """The same by any function of one sequence, request after request."""
        results = [
            attend(q, k, v, self.softmax_scale)
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return concatenate(results)


def concatenate(results: Sequence[AttentionResult]) -> AttentionResult:
    """Results of requests one after the other, as in a ragged batch."""
    return AttentionResult(torch.cat([r.out for r in results]), torch.cat([r.lse for r in results]))


def scatter_pages(
    rows: Sequence[Tensor], page_size: int, *, poison: float = math.nan, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A cache that holds the rows of each request, and the block table that finds them."""
    generator = torch.Generator().manual_seed(seed)
    needed = [math.ceil(len(r) / page_size) for r in rows]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    cache = torch.full((num_pages, page_size, *rows[0].shape[1:]), poison, dtype=rows[0].dtype)
    block_table = torch.full((len(rows), max(needed) + 2), GARBAGE, dtype=torch.int32)
    for request, (request_rows, pages) in enumerate(zip(rows, needed, strict=True)):
        for index in range(pages):
            page = order.pop()
            block_table[request, index] = page
            part = request_rows[index * page_size : (index + 1) * page_size]
            cache[page, : len(part)] = part
    return cache, block_table


def lay_out(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    softmax_scale: float,
    *,
    page_size: int,
    seed: int = 0,
) -> PagedProblem:
    """Put the keys and values of several requests into pages."""
    k_cache, block_table = scatter_pages(keys, page_size, seed=seed)
    v_cache, _ = scatter_pages(values, page_size, seed=seed)
    return PagedProblem(
        q=torch.cat(list(queries)),
        k_cache=k_cache,
        v_cache=v_cache,
        query_start_loc=torch.tensor([0, *(len(q) for q in queries)]).cumsum(0),
        seq_lens=torch.tensor([len(k) for k in keys]),
        block_table=block_table,
        softmax_scale=softmax_scale,
        queries=tuple(queries),
        keys=tuple(keys),
        values=tuple(values),
    )


def paged_problem(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    page_size: int = 4,
    seed: int = 0,
    **sizes: Any,
) -> PagedProblem:
    """A random ragged batch; `sizes` as in `random_qkv`."""
    requests = [
        random_qkv(s_q, s_kv, seed=seed + r, **sizes)
        for r, (s_q, s_kv) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]
    queries, keys, values = zip(*requests, strict=True)
    return lay_out(queries, keys, values, 0.3, page_size=page_size, seed=seed)


@dataclass(frozen=True)
class MLAProblem:
    """The arguments of rungs 5 and 6, and each request's rows."""

    q_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    softmax_scale: float
    rows: tuple[Tensor, ...]

    def attend(self, form: str, **changed: Any) -> AttentionResult:
        """Rung 5 ("expanded") or 6 ("absorbed"), with some arguments changed."""
        function = {"expanded": mla_expanded_attention, "absorbed": mla_absorbed_attention}[form]
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        return function(**(arguments | changed))

    def oracle(self) -> AttentionResult:
        """From the definition, head by head in float64: k = [W_UK c ; k_pe], v = W_UV c."""
        d_c = self.w_uk.shape[-1]
        starts = self.query_start_loc.tolist()
        results = []
        for request, rows in enumerate(self.rows):
            new = slice(starts[request], starts[request + 1])
            latent, k_pe = rows[:, :d_c].double(), rows[:, d_c:].double()
            heads = []
            for w_uk, w_uv, q_nope, q_pe in zip(
                self.w_uk.double(),
                self.w_uv.double(),
                self.q_nope[new].double().unbind(1),
                self.q_pe[new].double().unbind(1),
                strict=True,
            ):
                q = torch.cat([q_nope, q_pe], dim=-1)[:, None]
                k = torch.cat([latent @ w_uk.T, k_pe], dim=-1)[:, None]
                v = (latent @ w_uv.T)[:, None]
                heads.append(causal_oracle(q, k, v, self.softmax_scale))
            results.append(
                AttentionResult(
                    torch.cat([h.out for h in heads], dim=1),
                    torch.cat([h.lse for h in heads], dim=1),
                )
            )
        return concatenate(results)


def mla_problem(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    heads: int = 4,
    d_n: int = 8,
    d_r: int = 4,
    d_c: int = 12,
    d_v: int = 6,
    page_size: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> MLAProblem:
    """Random queries, latent rows in poisoned pages, and up-projections."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = tuple(normal(s_kv, d_c + d_r).to(dtype) for s_kv in seq_lens)
    kv_cache, block_table = scatter_pages(rows, page_size, seed=seed)
    return MLAProblem(
        q_nope=normal(sum(query_lens), heads, d_n).to(dtype),
        q_pe=normal(sum(query_lens), heads, d_r).to(dtype),
        kv_cache=kv_cache,
        w_uk=(normal(heads, d_n, d_c) / d_c**0.5).to(dtype),
        w_uv=(normal(heads, d_v, d_c) / d_c**0.5).to(dtype),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0),
        seq_lens=torch.tensor(list(seq_lens)),
        block_table=block_table,
        softmax_scale=(d_n + d_r) ** -0.5,
        rows=rows,
    )

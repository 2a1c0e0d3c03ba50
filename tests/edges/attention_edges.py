"""Attention: the right result comes from the oracle, over keys that are collected one by one."""

from itertools import pairwise

import torch
from hypothesis import strategies as st
from tests.edges.edge import FLOATS, Arguments, Draw, Edge, floats, small, some
from tests.support import causal_oracle, concatenate, mla_problem, paged_problem
from torch import Tensor

from mla_ref import attention, numerics
from mla_ref.numerics import AttentionResult


def dense_arguments(draw: Draw) -> Arguments:
    s_q, s_kv, h_kv, d_qk, d_v = draw(small), draw(small), draw(some), draw(small), draw(small)
    h_q, dtype = h_kv * draw(st.integers(1, 3)), draw(st.sampled_from(FLOATS))
    arguments = {
        "q": floats(draw, s_q, h_q, d_qk, dtype=dtype),
        "k": floats(draw, s_kv, h_kv, d_qk, dtype=dtype),
        "v": floats(draw, s_kv, h_kv, d_v, dtype=dtype),
        "softmax_scale": draw(st.sampled_from([0.3, 1, 2.0])),
    }
    if draw(st.booleans()):
        lens = draw(st.lists(st.integers(0, s_kv), min_size=s_q, max_size=s_q))
        arguments["visible_lens"] = torch.tensor(lens, dtype=torch.int64)
    return arguments


def dense_right(a: Arguments) -> AttentionResult:
    q, k, v = a["q"], a["k"], a["v"]
    lens = a.get("visible_lens")
    if lens is None:
        return causal_oracle(q, k, v, float(a["softmax_scale"]))
    visible = torch.arange(len(k)) < lens[:, None]
    return numerics.oracle_attention(q, k, v, visible, softmax_scale=a["softmax_scale"])


def batch_arguments(draw: Draw) -> Arguments:
    one = dense_arguments(draw)
    b = draw(st.integers(0, 3))
    lens = one.get("visible_lens")
    more = {} if lens is None else {"visible_lens": lens.expand(b, -1)}
    return {n: x.expand(b, *x.shape) if n in "qkv" else x for n, x in (one | more).items()}


def batch_right(a: Arguments) -> AttentionResult:
    each = [
        dense_right({n: x[i] if isinstance(x, Tensor) else x for n, x in a.items()})
        for i in range(len(a["q"]))
    ]
    if not each:
        q, v = a["q"], a["v"]
        return AttentionResult(q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3]))
    return AttentionResult(torch.stack([r.out for r in each]), torch.stack([r.lse for r in each]))


def lengths(draw: Draw) -> tuple[list[int], list[int]]:
    """New tokens and lengths of one to three requests."""
    new = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    return new, [n + draw(st.integers(0, 6)) for n in new]


def paged_arguments(draw: Draw) -> Arguments:
    h_kv = draw(some)
    problem = paged_problem(
        *lengths(draw),
        page_size=draw(some),
        h_kv=h_kv,
        h_q=h_kv * draw(some),
        d_qk=draw(some),
        d_v=draw(some),
        dtype=draw(st.sampled_from(FLOATS)),
        seed=draw(st.integers(0, 99)),
    )
    names = ("q", "k_cache", "v_cache", "query_start_loc", "seq_lens", "block_table")
    return {name: getattr(problem, name) for name in (*names, "softmax_scale")}


def rows_of(a: Arguments, name: str, request: int) -> Tensor:
    """The rows of a request, token by token. A page that does not exist is an IndexError."""
    pages = a[name]
    size, table, length = pages.shape[1], a["block_table"][request], int(a["seq_lens"][request])
    numbers = [int(table[p // size]) for p in range(length)]
    if length < 0 or any(number < 0 for number in numbers):
        raise ValueError("no such page")
    rows = [pages[number, p % size] for p, number in enumerate(numbers)]
    return torch.stack(rows) if rows else pages.new_zeros(0, *pages.shape[2:])


def new_rows(a: Arguments, name: str) -> list[Tensor]:
    starts = a["query_start_loc"].tolist()
    if starts[0] != 0 or starts[-1] != len(a[name]) or sorted(starts) != starts:
        raise ValueError("no such rows")
    return [a[name][i:j] for i, j in pairwise(starts)]


def paged_right(a: Arguments) -> AttentionResult:
    results = []
    for request, q in enumerate(new_rows(a, "q")):
        k, v = rows_of(a, "k_cache", request), rows_of(a, "v_cache", request)
        if len(q) > len(k):
            raise ValueError("more new tokens than tokens")
        results.append(causal_oracle(q, k, v, a["softmax_scale"]))
    return concatenate(results)


def latent_arguments(draw: Draw) -> Arguments:
    a = mla_arguments(draw)
    d_c = a["w_uk"].shape[-1]
    q = torch.cat([floats(draw, *a["q_nope"].shape[:2], d_c).to(a["q_pe"].dtype), a["q_pe"]], -1)
    names = ("kv_cache", "query_start_loc", "seq_lens", "block_table", "softmax_scale")
    return {"q": q} | {name: a[name] for name in names} | {"kv_lora_rank": d_c}


def latent_right(a: Arguments) -> AttentionResult:
    keys = {**a, "k_cache": a["kv_cache"][:, :, None]}
    return paged_right({**keys, "v_cache": keys["k_cache"][..., : a["kv_lora_rank"]]})


def mla_arguments(draw: Draw) -> Arguments:
    problem = mla_problem(
        *lengths(draw),
        heads=draw(some),
        d_n=draw(some),
        d_r=draw(st.integers(0, 3)),
        d_c=draw(some),
        d_v=draw(some),
        page_size=draw(some),
        dtype=draw(st.sampled_from(FLOATS)),
        seed=draw(st.integers(0, 99)),
    )
    return {n: getattr(problem, n) for n in problem.__dataclass_fields__ if n != "rows"}


def mla_right(a: Arguments) -> AttentionResult:
    if not len(a["q_nope"]) == len(a["q_pe"]):
        raise ValueError("other rows")
    w_uk, w_uv = a["w_uk"].double(), a["w_uv"].double()
    d_c, results = w_uk.shape[-1], []
    new = zip(new_rows(a, "q_nope"), new_rows(a, "q_pe"), strict=True)
    for request, (q_nope, q_pe) in enumerate(new):
        rows = rows_of(a, "kv_cache", request).double()
        k_nope = torch.einsum("tc,hnc->thn", rows[:, :d_c], w_uk)
        k_pe = rows[:, None, d_c:].expand(-1, len(w_uk), -1)
        q, k = torch.cat([q_nope, q_pe], -1).double(), torch.cat([k_nope, k_pe], -1)
        v = torch.einsum("tc,hvc->thv", rows[:, :d_c], w_uv)
        if len(q) > len(k):
            raise ValueError("more new tokens than tokens")
        results.append(causal_oracle(q, k, v, a["softmax_scale"]))
    return concatenate(results)


# The building blocks of MLA: one number at a time.


def absorb_arguments(draw: Draw) -> Arguments:
    tokens, heads, d_n, dtype = draw(small), draw(some), draw(small), draw(st.sampled_from(FLOATS))
    return {
        "q_nope": floats(draw, tokens, heads, d_n, dtype=dtype),
        "q_pe": floats(draw, tokens, heads, draw(small), dtype=dtype),
        "w_uk": floats(draw, heads, d_n, draw(some), dtype=dtype),
    }


def absorb_right(a: Arguments) -> Tensor:
    q, w_uk = a["q_nope"].double(), a["w_uk"].double()
    latent = (q[..., None] * w_uk[None]).sum(2)
    return torch.cat([latent, a["q_pe"].double()], dim=-1)


def project_arguments(draw: Draw) -> Arguments:
    heads, d_c, dtype = draw(some), draw(small), draw(st.sampled_from(FLOATS))
    return {
        "latent_out": floats(draw, draw(small), heads, d_c, dtype=dtype),
        "w_uv": floats(draw, heads, draw(small), d_c, dtype=dtype),
    }


def project_right(a: Arguments) -> Tensor:
    return (a["latent_out"].double()[:, :, None] * a["w_uv"].double()[None]).sum(-1)


def expand_arguments(draw: Draw) -> Arguments:
    heads, d_c, dtype = draw(some), draw(some), draw(st.sampled_from(FLOATS))
    return {
        "kv_rows": floats(draw, draw(small), d_c + draw(small), dtype=dtype),
        "w_uk": floats(draw, heads, draw(small), d_c, dtype=dtype),
        "w_uv": floats(draw, heads, draw(small), d_c, dtype=dtype),
    }


def expand_right(a: Arguments) -> AttentionResult:
    rows, d_c = a["kv_rows"].double(), a["w_uk"].shape[-1]
    if a["w_uv"].shape[::2] != a["w_uk"].shape[::2]:
        raise ValueError("other heads or latents")
    latent = rows[:, None, None, :d_c]
    k_pe = rows[:, None, d_c:].expand(-1, len(a["w_uk"]), -1)
    k = torch.cat([(latent * a["w_uk"].double()).sum(-1), k_pe], dim=-1)
    return AttentionResult(k, (latent * a["w_uv"].double()).sum(-1))


ATTENTION = {
    "causal_attention": Edge(attention.causal_attention, dense_arguments, dense_right),
    "online_attention": Edge(
        attention.online_attention,
        lambda draw: dense_arguments(draw) | {"block_size": draw(some)},
        dense_right,
    ),
    "vectorised_attention": Edge(attention.vectorised_attention, batch_arguments, batch_right),
    "paged_attention": Edge(attention.paged_attention, paged_arguments, paged_right),
    "latent_attention": Edge(attention.latent_attention, latent_arguments, latent_right),
    "mla_expanded_attention": Edge(attention.mla_expanded_attention, mla_arguments, mla_right),
    "mla_absorbed_attention": Edge(attention.mla_absorbed_attention, mla_arguments, mla_right),
    "absorb_query": Edge(attention.absorb_query, absorb_arguments, absorb_right),
    "project_values": Edge(attention.project_values, project_arguments, project_right),
    "expand_kv": Edge(
        lambda **a: AttentionResult(*attention.expand_kv(**a)), expand_arguments, expand_right
    ),
}

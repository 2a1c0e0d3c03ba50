"""Bad input at every public edge: an error that names an argument, or the right result.

Each edge says how good arguments are drawn and what the result must be, from the definition and
not from this library. Then one or two arguments are spoiled at random: another type, dtype, shape
or value. What happens next must be one of two things. The call raises a ValueError or a TypeError
whose message holds the name of an argument, and has changed nothing. Or it returns, and then the
result is the right one for those arguments, with no NaN from finite input.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support import bits, causal_oracle, concatenate, mla_problem, paged_problem
from torch import Tensor

from mla_ref import attention, batching, cache, layers, numerics
from mla_ref.numerics import AttentionResult

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

# As a user calls, without the shape checks that only the tests install.
pytestmark = pytest.mark.usefixtures("plain_calls")

Draw = Callable[[st.SearchStrategy[Any]], Any]
Arguments = dict[str, Any]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
small = st.integers(0, 5)
some = st.integers(1, 4)


@dataclass(frozen=True)
class Edge:
    """A public function, arguments that it takes, and its right result for any good arguments.

    `right` may raise: then the arguments were not good, and returning at all is the error.
    """

    call: Callable[..., Any]
    arguments: Callable[[Draw], Arguments]
    right: Callable[[Arguments], Any]


def floats(draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers; the seed is drawn, so that a failing case can be repeated."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return numbers.to(dtype or draw(st.sampled_from(FLOATS)))


# Attention: the right result comes from the oracle, over keys that are collected one by one.


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


# Numerics.


def parts_arguments(draw: Draw) -> Arguments:
    rows = draw(st.lists(some, max_size=2))
    shape = (draw(st.integers(0, 3)), *rows)
    lses = floats(draw, *shape, dtype=draw(st.sampled_from(FLOATS[:2])))
    if lses.numel() and draw(st.booleans()):
        lses.view(-1)[draw(st.integers(0, lses.numel() - 1))] = -math.inf
    return {"outs": floats(draw, *shape, draw(small)), "lses": lses}


def parts_right(a: Arguments) -> AttentionResult:
    outs, lses = a["outs"].double(), a["lses"].double()
    if not len(outs):
        return AttentionResult(outs.sum(0), lses.sum(0) - math.inf)
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(lse.isinf(), 0.0, lse)).exp()
    return AttentionResult((weights[..., None] * outs).sum(0), lse)


def two_arguments(draw: Draw) -> Arguments:
    rows = draw(st.lists(some, min_size=1, max_size=2))
    dtype, lse_dtype = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS[:2]))
    d = draw(small)
    return {
        "out_a": floats(draw, *rows, d, dtype=dtype),
        "lse_a": floats(draw, *rows, dtype=lse_dtype),
        "out_b": floats(draw, *rows, d, dtype=dtype),
        "lse_b": floats(draw, *rows, dtype=lse_dtype),
    }


def two_right(a: Arguments) -> AttentionResult:
    return parts_right(
        {
            "outs": torch.stack([a["out_a"], a["out_b"]]),
            "lses": torch.stack([a["lse_a"], a["lse_b"]]),
        }
    )


def sunk_arguments(draw: Draw) -> Arguments:
    rows, h = draw(small), draw(some)
    lse = floats(draw, rows, h, dtype=draw(st.sampled_from(FLOATS[:2])))
    return {
        "result": AttentionResult(floats(draw, rows, h, draw(small)), lse),
        "sink": floats(draw, h),
    }


def sunk_right(a: Arguments) -> Tensor:
    out, lse = (x.double() for x in a["result"])
    return out * (1 / (1 + (a["sink"].double() - lse).exp()))[..., None]


def blank_arguments(draw: Draw) -> Arguments:
    result = sunk_arguments(draw)["result"]
    rows = len(result.out)
    lens = draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))
    return {"result": result, "visible_lens": torch.tensor(lens, dtype=torch.int64)}


def blank_right(a: Arguments) -> AttentionResult:
    out, lse = (x.double().clone() for x in a["result"])
    for row, seen in enumerate(a["visible_lens"].tolist()):
        if seen <= 0:
            out[row], lse[row] = 0.0, -math.inf
    return AttentionResult(out, lse)


# Layers.


def rope_arguments(draw: Draw) -> Arguments:
    s, half = draw(small), draw(small)
    between = draw(st.lists(st.integers(0, 2), max_size=2))
    angles = floats(draw, s, half, dtype=torch.float64)
    return {
        "x": floats(draw, s, *between, 2 * half),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "interleaved": draw(st.booleans()),
    }


def rope_right(a: Arguments) -> Tensor:
    """Pair by pair as complex numbers, on a copy with the token's dimension last but one."""
    x, half = a["x"].double(), a["x"].shape[-1] // 2
    turned = x.clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if a["interleaved"] else (i, i + half)
        shape = (-1,) + (1,) * (x.ndim - 2) if len(x) else x[..., 0].shape
        turn = torch.complex(a["cos"][:, i].double(), a["sin"][:, i].double()).reshape(shape)
        pair = torch.complex(x[..., first], x[..., second]) * turn
        turned[..., first], turned[..., second] = pair.real, pair.imag
    return turned


def norm_arguments(draw: Draw) -> Arguments:
    d = draw(small)
    x = floats(draw, *draw(st.lists(small, max_size=2)), d)
    return {"x": x, "weight": floats(draw, d), "eps": draw(st.sampled_from([1e-6, 1e-5, 1]))}


def norm_right(a: Arguments) -> Tensor:
    x = a["x"].double()
    return (
        a["weight"].double()
        * x
        / (x.square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + a["eps"]).sqrt()
    )


def positions_arguments(draw: Draw) -> Arguments:
    yarn = layers.YarnConfig(4.0, 64) if draw(st.booleans()) else None
    config = layers.RopeConfig(2 * draw(small), 100.0, draw(st.booleans()), yarn)
    positions = draw(st.lists(st.integers(0, 2**20), max_size=4))
    return {"config": config, "positions": torch.tensor(positions, dtype=torch.int64)}


def positions_right(a: Arguments) -> AttentionResult:
    angles = a["positions"].double()[:, None] * layers.inverse_frequencies(a["config"])
    return AttentionResult(angles.cos(), angles.sin())


# Cache and batching: the right result is a list of Python integers.


def batch_of(draw: Draw) -> Arguments:
    new, seq_lens = lengths(draw)
    size = draw(some)
    width = -(-max(seq_lens) // size) + draw(st.integers(0, 1))
    table = draw(st.lists(st.integers(0, 99), min_size=len(new) * width, max_size=len(new) * width))
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    return {
        "block_table": torch.tensor(table, dtype=integers).reshape(len(new), width),
        "query_start_loc": torch.tensor([0, *new]).cumsum(0).to(integers),
        "seq_lens": torch.tensor(seq_lens, dtype=integers),
        "page_size": size,
    }


def slots_right(a: Arguments) -> Tensor:
    starts, size = a["query_start_loc"].tolist(), a["page_size"]
    if starts[0] != 0 or len(starts) != len(a["seq_lens"]) + 1:
        raise ValueError("no such batch")
    slots = []
    for request, length in enumerate(a["seq_lens"].tolist()):
        new = starts[request + 1] - starts[request]
        if not 0 <= new <= length <= a["block_table"].shape[1] * size:
            raise ValueError("no such request")
        for position in range(length - new, length):
            page = int(a["block_table"][request, position // size])
            if page < 0:
                raise ValueError("no such page")
            slots.append(page * size + position % size)
    return torch.tensor(slots, dtype=torch.int64)


def step_arguments(draw: Draw) -> Arguments:
    batch = batch_of(draw)
    new = batch["query_start_loc"].diff().tolist()
    done = (batch["seq_lens"] - batch["query_start_loc"].diff()).tolist()
    return {
        "computed_lens": done,
        "query_lens": new,
        "block_table": batch["block_table"],
        "page_size": batch["page_size"],
    }


def step_right(a: Arguments) -> Tensor:
    done, new = list(a["computed_lens"]), list(a["query_lens"])
    if min([0, *done, *new]) < 0:
        raise ValueError("no such step")
    return slots_right(
        {
            **a,
            "query_start_loc": torch.tensor([0, *new]).cumsum(0),
            "seq_lens": torch.tensor([d + n for d, n in zip(done, new, strict=True)]),
        }
    )


def written_arguments(draw: Draw) -> Arguments:
    pages, size = draw(small), draw(some)
    row = draw(st.lists(st.integers(0, 2), max_size=2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    free = list(range(pages * size)) + [-1] * 3
    slots = draw(st.permutations(free))[: draw(small)]
    rows = floats(draw, len(slots), *row, dtype=torch.float32).abs().to(dtype)
    return {
        "cache": torch.zeros(pages, size, *row, dtype=dtype),
        "rows": rows,
        "slots": torch.tensor(slots, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
    }


def written(**a: Any) -> Tensor:
    """`write_rows` on a copy, so that the arguments can be looked at afterwards."""
    a["cache"] = a["cache"].clone() if isinstance(a["cache"], Tensor) else a["cache"]
    cache.write_rows(**a)
    return a["cache"]


def written_right(a: Arguments) -> Tensor:
    flat = {}
    size = a["cache"].shape[1]
    expected = a["cache"].clone()
    for row, slot in zip(a["rows"], a["slots"].tolist(), strict=True):
        if slot in flat or slot < -1 or slot >= expected.shape[0] * size:
            raise ValueError("no such slot, or twice")
        if slot >= 0:
            flat[slot] = row
            expected[slot // size, slot % size] = row.to(expected.dtype)
    return expected


def gathered_arguments(draw: Draw) -> Arguments:
    pages, size = draw(some), draw(some)
    table = draw(st.lists(st.integers(0, pages - 1), min_size=1, max_size=3))
    row = draw(st.lists(st.integers(0, 2), max_size=2))
    return {
        "cache": floats(draw, pages, size, *row),
        "block_table_row": torch.tensor(table),
        "seq_len": draw(st.integers(0, len(table) * size)),
    }


def gathered_right(a: Arguments) -> Tensor:
    table = a["block_table_row"][None]
    rows = {"c": a["cache"], "block_table": table, "seq_lens": torch.tensor([a["seq_len"]])}
    return rows_of(rows, "c", 0)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The exact value of a function without tensors in between."""
    return lambda a: function(
        **{n: v.double() if isinstance(v, Tensor) else v for n, v in a.items()}
    )


EDGES = {
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
    "merge": Edge(numerics.merge, two_arguments, two_right),
    "merge_many": Edge(numerics.merge_many, parts_arguments, parts_right),
    "apply_sink": Edge(numerics.apply_sink, sunk_arguments, sunk_right),
    "blank_empty_rows": Edge(numerics.blank_empty_rows, blank_arguments, blank_right),
    "apply_rope": Edge(layers.apply_rope, rope_arguments, rope_right),
    "rope_table": Edge(
        lambda **a: AttentionResult(*layers.rope_table(**a)), positions_arguments, positions_right
    ),
    "rms_norm": Edge(layers.rms_norm, norm_arguments, norm_right),
    "slot_mapping": Edge(cache.slot_mapping, batch_of, slots_right),
    "write_rows": Edge(written, written_arguments, written_right),
    "gather_rows": Edge(cache.gather_rows, gathered_arguments, gathered_right),
    "Step.build": Edge(
        lambda **a: batching.Step.build(**a).slot_mapping, step_arguments, step_right
    ),
}

NOT_A_TENSOR = st.sampled_from([None, "q", 3, 0.5, [1.0], (), math.nan])
NUMBERS = st.sampled_from(
    [None, "1", True, 0, -1, 0.0, -0.5, 2, 7, 1e-50, 1e300, 10**400, math.nan, math.inf, 1.5]
)
DTYPES = st.sampled_from(
    [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64]
)


def spoiled_tensor(draw: Draw, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x  # spoiled already
    integers = not x.is_floating_point()
    kind = draw(
        st.sampled_from(
            ["type", "dtype", "shorter", "longer", "more dims", "fewer dims", "strides"]
            + (["value"] if integers else ["device"])
        )
    )
    dim = draw(st.integers(0, max(x.ndim - 1, 0)))
    if kind == "type":
        return draw(NOT_A_TENSOR)
    if kind == "dtype":
        return x.to(draw(DTYPES))
    if kind == "device":
        return x.to("meta")
    if kind == "more dims":
        return x.unsqueeze(dim)
    if kind == "strides" and x.ndim:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.ndim == 0 or x.shape[dim] == 0:
        return None
    if kind == "shorter":
        return x.narrow(dim, 0, x.shape[dim] - 1)
    if kind == "longer":
        return torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if kind == "fewer dims":
        return x.select(dim, 0)
    changed = x.clone()
    if x.dtype in (torch.int32, torch.int64) and x.numel():
        value = draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 5, 100, 2**31 - 1]))
        changed.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    return changed


def spoiled(draw: Draw, value: Any) -> Any:
    if isinstance(value, AttentionResult):
        out, lse = value
        if draw(st.booleans()):
            return AttentionResult(spoiled_tensor(draw, out), lse)
        return AttentionResult(out, spoiled_tensor(draw, lse))
    if isinstance(value, Tensor):
        return spoiled_tensor(draw, value)
    if isinstance(value, list):
        return draw(
            st.sampled_from([None, 3, [], [*value, 1], value[:-1], [-1] * len(value), [0.5]])
        )
    return draw(NUMBERS)


def tolerance(arguments: Arguments) -> float:
    """By the narrowest float among the arguments and what they hold."""
    dtypes = [x.dtype for x in flat(arguments.values()) if x.is_floating_point()]
    eps = max([torch.finfo(d).eps for d in dtypes], default=2**-52)
    return 8 * eps


def flat(values: Any) -> list[Tensor]:
    """All tensors among the values and inside their tuples."""
    found = []
    for value in values:
        found += flat(value) if isinstance(value, tuple) else []
        found += [value] if isinstance(value, Tensor) else []
    return found


def check(edge: Edge, arguments: Arguments) -> bool:
    """The promise of this file for one call; True if it returned a result."""
    tensors = [x for x in flat(arguments.values()) if x.device.type != "meta"]
    before = [bits(x).clone() for x in tensors]
    try:
        result = edge.call(**arguments)
    except (ValueError, TypeError) as error:
        names = "|".join(re.escape(name) for name in arguments)
        assert re.search(rf"\b({names})\b", str(error)), f"names no argument: {error}"
        result = None
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(x), old), "an argument has been changed"
    if result is None:
        return False
    expected = edge.right(arguments)
    pairs = (
        zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
    )
    for actual, right in pairs:
        comparison = numerics.compare(actual, right)
        limit = tolerance(arguments)
        scale = max(1.0, float(torch.where(right.isfinite(), right, 0).double().norm()))
        assert comparison.agrees(max_abs=limit * scale), comparison
        assert not actual.isnan().any() or not actual.is_floating_point()
    return True


@pytest.mark.parametrize("name", EDGES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_good_arguments_give_the_right_result(name: str, data: st.DataObject) -> None:
    edge = EDGES[name]
    arguments = edge.arguments(data.draw)
    assert check(edge, arguments), "good arguments were refused"


@pytest.mark.parametrize("name", EDGES)
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bad_arguments_are_named_or_harmless(name: str, data: st.DataObject) -> None:
    edge = EDGES[name]
    arguments = edge.arguments(data.draw)
    for _ in range(data.draw(st.integers(1, 2))):
        target = data.draw(st.sampled_from(sorted(arguments)))
        arguments[target] = spoiled(data.draw, arguments[target])
    # A tensor without memory stands for one on another device: there must be two devices.
    devices = {x.device.type for x in flat(arguments.values()) if x.is_floating_point()}
    assume(devices != {"meta"})
    check(edge, arguments)

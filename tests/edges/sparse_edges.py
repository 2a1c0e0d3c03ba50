"""FP8 rows, index keys, selection, sparse attention, backends: the right results by loops."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from tests.edges.attention_edges import lengths
from tests.edges.edge import FLOATS, Arguments, Draw, Edge, floats, small, some
from tests.support import causal_oracle, concatenate, scatter_pages
from torch import Tensor

from mla_ref import attention, backends, batching, cache, indexer, layers, numerics
from mla_ref.cache.index_keys import read_index_keys
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.sparse import SparseCache, attend_sparse
from mla_ref.numerics import AttentionResult, float8, mxfp8

INTEGERS = st.sampled_from([torch.int32, torch.int64])


def ints(draw: Draw, low: int, high: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randint(low, high + 1, shape, generator=generator)
    return numbers.to(draw(INTEGERS) if dtype is None else dtype)


# --- E4M3 and scales: a table of all its numbers, and the rules as Python writes them


def e4m3_numbers() -> list[float]:
    """The 127 magnitudes by their bytes: 8 multiples of 2^-9, then 8 for each power of two."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return (subnormal + normal)[:127]


TABLE = torch.tensor(e4m3_numbers(), dtype=torch.float64)


def nearest(x: Tensor) -> Tensor:
    """The nearest number of the table to each float32 number, ties to the even byte."""
    wide = x.float().double()
    distance = (TABLE - wide.abs()[..., None]).abs()
    tied = distance == distance.amin(dim=-1, keepdim=True)
    even = torch.arange(127) % 2 == 0
    byte = (tied.double() + (tied & even).double()).argmax(dim=-1)
    return TABLE[byte] * wide.sign()


def scale_by_rule(amax: float, rule: str) -> float:
    low = {"fp32": 2.0**-126, "fp32-floor": 1e-4 / 448, "pow2-floor": 1e-4 / 448, "pow2": 1e-4}
    if rule == "fp32-one" and amax == 0:
        return 1.0
    scale = max(amax / 448, low.get(rule, 2.0**-126))
    if not rule.startswith("pow2"):
        return scale
    return 2.0 ** math.ceil(math.log2(float(torch.tensor(scale, dtype=torch.float32))))


def scales_right(a: Arguments) -> Tensor:
    flat = [scale_by_rule(x, a["rule"]) for x in a["amax"].double().flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).reshape(a["amax"].shape)


def quantised(x: Tensor, group: int, rule: str) -> Tensor:
    """What is left of rows whose neighbours share a scale."""
    groups = x.float().double().unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1)
    scale = scales_right({"amax": amax, "rule": rule}).float().double()
    return (nearest(groups.float() / scale.float()[..., None]) * scale[..., None]).flatten(-2)


def rules(draw: Draw) -> str:
    return draw(st.sampled_from(float8.SCALE_RULES))


def fp8_arguments(draw: Draw) -> Arguments:
    rows = floats(draw, draw(small), draw(st.sampled_from([512, 576])))
    return {"kv_rows": rows, "scale_rule": rules(draw)}


def fp8_right(a: Arguments) -> Tensor:
    rows = a["kv_rows"]
    if rows.ndim != 2:
        raise ValueError("no rows")
    k_pe = torch.zeros(len(rows), 64, dtype=torch.float64)
    k_pe[:, : rows.shape[1] - 512] = rows[:, 512:].bfloat16().double()
    return torch.cat([quantised(rows[:, :512], 128, a["scale_rule"]), k_pe], dim=1)


def written_fp8(**a: Any) -> Tensor:
    """`write_fp8_rows` on a copy, read back as numbers."""
    a["cache"] = a["cache"].clone() if isinstance(a["cache"], Tensor) else a["cache"]
    cache.write_fp8_rows(**a)
    return cache.unpack_fp8_rows(a["cache"])


def write_fp8_arguments(draw: Draw) -> Arguments:
    pages, size, a = draw(some), draw(some), fp8_arguments(draw)
    slots = draw(st.permutations(range(pages * size)))[: len(a["kv_rows"])]
    slots += [-1] * (len(a["kv_rows"]) - len(slots))
    kept = torch.zeros(pages, size, 656, dtype=torch.uint8)
    return a | {"cache": kept, "slots": torch.tensor(slots, dtype=torch.int64)}


def write_fp8_right(a: Arguments) -> Tensor:
    _, size, width = a["cache"].shape
    slots = a["slots"].tolist()
    used = [s for s in slots if s != -1]
    if width != 656 or len(set(used)) < len(used) or any(s < 0 for s in used):
        raise ValueError("no such slot, or twice")
    expected = cache.unpack_fp8_rows(a["cache"]).double()
    for row, slot in zip(fp8_right(a), slots, strict=True):
        if slot >= 0:
            expected[slot // size, slot % size] = row
    return expected


# --- index keys


def keys_arguments(draw: Draw) -> Arguments:
    return {"keys": floats(draw, draw(small), 128), "scale_rule": rules(draw)}


def both_parts(keys: Tensor, scale_rule: str) -> Tensor:
    data, scale = cache.quantise_index_keys(keys, scale_rule)
    return float8.from_e4m3(data) * scale[..., None]


def read_arguments(draw: Draw) -> Arguments:
    kept, table = index_pages(draw, [draw(st.integers(1, 9))])
    size, used = cache.page_size_of(kept), int((table[0] < 10**6).sum())
    first = draw(st.integers(0, used * size))
    count = draw(st.integers(0, used * size - first))
    return {"cache": kept, "block_table_row": table[0], "first": first, "count": count}


def key_at(kept: Tensor, table: Tensor, position: int) -> Tensor:
    size = kept.shape[1] if kept.is_floating_point() else kept.shape[1] // 132
    page, offset = int(table[position // size]), position % size
    if page < 0:
        raise ValueError("no such page")
    if kept.is_floating_point():
        return kept[page, offset].double()
    data = kept[page, offset * 128 : offset * 128 + 128].tolist()
    at = size * 128 + 4 * offset
    scale = float(
        kept[page, at : at + 4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    )
    signs = [-1.0 if byte > 127 else 1.0 for byte in data]
    numbers = [TABLE[byte & 127] * sign for byte, sign in zip(data, signs, strict=True)]
    return torch.stack(numbers) * scale


def read_right(a: Arguments) -> Tensor:
    if a["first"] < 0 or a["count"] < 0:
        raise ValueError("no such keys")
    rows = [key_at(a["cache"], a["block_table_row"], a["first"] + i) for i in range(a["count"])]
    width = a["cache"].shape[2] if a["cache"].ndim == 3 else 128
    return torch.stack(rows) if rows else torch.zeros(0, width)


def index_pages(draw: Draw, seq_lens: list[int]) -> tuple[Tensor, Tensor]:
    """Pages of small whole numbers, which every format holds exactly, so that ties are ties."""
    width, size = draw(st.sampled_from([3, 128])), draw(some)
    keys = [ints(draw, -2, 2, n, width).float() for n in seq_lens]
    plain, table = scatter_pages(keys, size, poison=0.0)
    if width != 128 or draw(st.booleans()):
        return plain, table
    packed = cache.new_index_cache(len(plain), size)
    cache.write_index_keys(packed, plain.flatten(0, 1), torch.arange(len(plain) * size))
    return packed, table


# --- selection


def score_arguments(draw: Draw) -> Arguments:
    rows, heads, d_i = draw(small), draw(some), draw(small)
    return {
        "q": floats(draw, rows, heads, d_i),
        "k": floats(draw, draw(small), d_i),
        "weights": floats(draw, rows, heads),
    }


def score_right(a: Arguments) -> Tensor:
    q, k, weights = (a[name].double() for name in ("q", "k", "weights"))
    if q.shape[:2] != weights.shape:
        raise ValueError("other rows or heads")
    products = (q[:, :, None] * k[None, None]).sum(-1).clamp(min=0)
    return (products * weights[..., None]).sum(1)


def topk_arguments(draw: Draw) -> Arguments:
    rows, s_kv = draw(small), draw(small)
    scores = ints(draw, -2, 2, rows, s_kv).to(draw(st.sampled_from(FLOATS)))
    return {"scores": scores, "visible_lens": ints(draw, 0, s_kv, rows), "k": draw(small)}


def best_of(scores: list[float], length: int, k: int) -> list[int]:
    allowed = [i for i in range(min(length, len(scores))) if scores[i] > -math.inf]
    best = sorted(allowed, key=lambda i: -scores[i])[:k]
    return best + [-1] * (k - len(best))


def topk_right(a: Arguments) -> Tensor:
    lists = [
        best_of(row, n, a["k"])
        for row, n in zip(a["scores"].tolist(), a["visible_lens"].tolist(), strict=True)
    ]
    return torch.tensor(lists, dtype=torch.int32).reshape(len(a["scores"]), a["k"])


def chunked_arguments(draw: Draw) -> Arguments:
    a = topk_arguments(draw)
    scores = a.pop("scores")
    parts = {"score_chunk": lambda first, count: scores[:, first : first + count]}
    return a | parts | {"s_kv": scores.shape[1], "chunk": draw(some)}


def chunked_right(a: Arguments) -> Tensor:
    if a["s_kv"] == 0:  # no chunk is asked for, so the rows are those of visible_lens alone
        return torch.full((len(a["visible_lens"]), a["k"]), -1)
    return topk_right(a | {"scores": a["score_chunk"](0, a["s_kv"])})


def select_arguments(draw: Draw) -> Arguments:
    new, seq_lens = lengths(draw)
    kept, table = index_pages(draw, seq_lens)
    heads, width = draw(some), kept.shape[2] if kept.ndim == 3 else 128
    return {
        "q": ints(draw, -2, 2, sum(new), heads, width).float(),
        "weights": ints(draw, -2, 2, sum(new), heads).to(draw(st.sampled_from(FLOATS))),
        "index_cache": kept,
        "query_start_loc": torch.tensor([0, *new]).cumsum(0),
        "seq_lens": torch.tensor(seq_lens),
        "block_table": table,
        "topk": draw(small),
        "chunk": draw(some),
    }


def select_right(a: Arguments) -> Tensor:
    starts, lists = a["query_start_loc"].tolist(), []
    if starts[0] != 0 or starts[-1] != len(a["q"]) or sorted(starts) != starts:
        raise ValueError("no such rows")
    if a["q"].shape[:2] != a["weights"].shape:
        raise ValueError("other rows or heads")
    for request, length in enumerate(a["seq_lens"].tolist()):
        table = a["block_table"][request]
        keys = [key_at(a["index_cache"], table, p) for p in range(length)]
        rows = range(starts[request], starts[request + 1])
        if len(rows) > length:
            raise ValueError("more new tokens than tokens")
        for i, row in enumerate(rows):
            one = {"q": a["q"][row : row + 1], "weights": a["weights"][row : row + 1]}
            scores = score_right(one | {"k": torch.stack(keys)})[0].tolist()
            lists.append(best_of(scores, length - len(rows) + i + 1, a["topk"]))
    return torch.tensor(lists, dtype=torch.int32).reshape(len(a["q"]), a["topk"])


def convert_arguments(draw: Draw) -> Arguments:
    rows, requests, width = draw(small), draw(some), draw(some)
    return {
        "positions": ints(draw, -2, 9, rows, draw(small)),
        "request_of_row": ints(draw, -1, requests, rows),
        "block_table": ints(draw, -1, 9, requests, width),
        "page_size": draw(some),
    }


def convert_right(a: Arguments) -> Tensor:
    table, size = a["block_table"], a["page_size"]
    slots = torch.full(a["positions"].shape, -1, dtype=torch.int64)
    highest = torch.iinfo(table.dtype).max
    for row, request in enumerate(a["request_of_row"].tolist()):
        for column, position in enumerate(a["positions"][row].tolist()):
            index = position // size
            if position < 0 or not 0 <= request < len(table) or index >= table.shape[1]:
                continue
            page = int(table[request, index])
            if page >= 0 and (page + 1) * size - 1 <= highest:
                slots[row, column] = page * size + position % size
    return slots


def own_arguments(draw: Draw) -> Arguments:
    world = draw(some)
    return {
        "positions": ints(draw, -2, 20, draw(small), draw(small)),
        "rank": draw(st.integers(0, world - 1)),
        "world": world,
        "interleave": draw(some),
    }


def own_right(a: Arguments) -> AttentionResult:
    world, each = a["world"], a["interleave"]
    lists = []
    for row in a["positions"].tolist():
        mine = [p for p in row if p >= 0 and p // each % world == a["rank"]]
        local = [p // (world * each) * each + p % each for p in mine]
        lists.append(local + [-1] * (len(row) - len(local)))
    counts = torch.tensor([sum(p >= 0 for p in row) for row in lists])
    return AttentionResult(torch.tensor(lists).reshape(a["positions"].shape), counts)


# --- attention and backends


def listed(draw: Draw, rows: int, capacity: int, most: int = 5) -> Arguments:
    k = draw(st.integers(0, most))
    found = {"indices": ints(draw, -2, capacity + 1, rows, k)}
    if draw(st.booleans()):
        found["counts"] = ints(draw, 0, k, rows)
    return found


def sparse_arguments(draw: Draw) -> Arguments:
    rows, heads, d, pages, size = draw(small), draw(some), draw(some), draw(some), draw(some)
    a = {
        "q": floats(draw, rows, heads, d),
        "kv_cache": floats(draw, pages, size, d),
        "softmax_scale": draw(st.sampled_from([0.3, 1, 2.0])),
        "kv_lora_rank": draw(st.integers(1, d)),
    }
    if draw(st.booleans()):
        a["sink"] = floats(draw, heads)
    return a | listed(draw, rows, pages * size)


def sparse_right(a: Arguments) -> AttentionResult:
    q, flat = a["q"], a["kv_cache"].flatten(0, 1)
    counts = a.get("counts")
    counts = [10**9] * len(q) if counts is None else counts.tolist()
    results = []
    for row, entries in enumerate(a["indices"].tolist()):
        slots = entries[: max(counts[row], 0)]
        keys = flat[[s for s in slots if 0 <= s < len(flat)]][:, None]
        scale = float(a["softmax_scale"])
        # One query sees all of its keys: with as many tokens as keys, it is the last one.
        values = keys[..., : a["kv_lora_rank"]]
        results.append(causal_oracle(q[row : row + 1], keys, values, scale))
    if len(results) != len(q):
        raise ValueError("other rows")
    if not results:
        return AttentionResult(
            q.new_zeros(0, q.shape[1], a["kv_lora_rank"]), q.new_zeros(q.shape[:2])
        )
    out, lse = concatenate(results)
    if a.get("sink") is not None:
        out = out * (1 / (1 + (a["sink"].double() - lse).exp()))[..., None]
    return AttentionResult(out, lse)


SPEC = backends.AttnSpec(
    num_heads=2,
    kv_lora_rank=3,
    qk_rope_head_dim=2,
    topk=4,
    page_size=3,
    cache_format="bf16",
    q_dtype=torch.float32,
)
CPU = torch.device("cpu")
PLAN = backends.TorchBackend().plan(SPEC, max_rows=4, max_requests=4, device=CPU)


def planned_arguments(draw: Draw) -> Arguments:
    rows, pages = draw(st.integers(0, 4)), draw(some)
    a = {
        "q": floats(draw, rows, 2, 5, dtype=torch.float32),
        "kv_cache": floats(draw, pages, 3, 5, dtype=draw(st.sampled_from(FLOATS[1:]))),
        "softmax_scale": 0.3,
    }
    if draw(st.booleans()):
        a["lse"] = torch.zeros(rows, 2)
    return a | listed(draw, rows, 3 * pages, most=4)


def planned(name: str) -> Any:
    def call(**a: Any) -> AttentionResult:
        if isinstance(a.get("lse"), Tensor):
            a["lse"] = a["lse"].clone()
        return getattr(PLAN, name)(**a)

    return call


def planned_right(a: Arguments) -> AttentionResult:
    q, kept, lse = a["q"], a["kv_cache"], a.get("lse")
    if q.dtype != torch.float32 or len(q) > 4 or a["indices"].shape[1] > 4 or kept.shape[1] != 3:
        raise ValueError("not planned")
    if lse is not None and (lse.dtype, lse.shape) != (torch.float32, q.shape[:2]):
        raise ValueError("no such buffer")
    return sparse_right(a | {"kv_lora_rank": 3})


def spec_arguments(draw: Draw) -> Arguments:
    sizes = {"num_heads": draw(some), "kv_lora_rank": draw(some), "topk": draw(some)}
    more = {"qk_rope_head_dim": draw(small), "page_size": draw(some)}
    return sizes | more | {"cache_format": "bf16", "max_rows": draw(small), "max_requests": 1}


def bytes_of_plan(max_rows: Any, max_requests: Any, **sizes: Any) -> Tensor:
    spec = backends.AttnSpec(**sizes)
    plan = backends.TorchBackend().plan(
        spec, max_rows=max_rows, max_requests=max_requests, device=CPU
    )
    return torch.tensor(plan.nbytes)


def spec_right(a: Arguments) -> Tensor:
    """Lists of at most 64 entries are one split; float32."""
    for name, least in (("num_heads", 1), ("kv_lora_rank", 1), ("topk", 1), ("page_size", 1)):
        if a[name] < least:
            raise ValueError(name)
    if min(a["qk_rope_head_dim"], a["max_rows"], a["max_requests"]) < 0:
        raise ValueError("below 0")
    return torch.tensor(4 * a["max_rows"] * a["num_heads"] * (a["kv_lora_rank"] + 1))


def splits_right(a: Arguments) -> Tensor:
    if min(a.values()) < 0 or a["multiprocessors"] < 1:
        raise ValueError("below 0")
    units = max(a["rows"], 1) * max(math.ceil(a["heads"] / 16), 1)
    filled = max(math.ceil(a["multiprocessors"] / units), 1)
    return torch.tensor(min(filled, max(math.ceil(a["k"] / 64), 1)))


# --- configurations and layers


def indexer_arguments(draw: Draw) -> Arguments:
    return {
        "num_heads": draw(some),
        "full_layers": (0, 1, 3),
        "head_dim": 2 ** draw(some),
        "topk": draw(some),
        "rope_interleaved": draw(st.booleans()),
        "hadamard": draw(st.booleans()),
        "scale_rule": rules(draw),
    }


def indexer_right(a: Arguments) -> Tensor:
    if min(a["num_heads"], a["head_dim"], a["topk"]) < 1 or a["full_layers"] != (0, 1, 3):
        raise ValueError("no such indexer")
    if a["scale_rule"] not in float8.SCALE_RULES:
        raise ValueError("no such rule")
    return torch.tensor([a["num_heads"], a["head_dim"], a["topk"]])


def indexer_numbers(**a: Any) -> Tensor:
    made = layers.IndexerConfig(**a)
    return torch.tensor([made.num_heads, made.head_dim, made.topk])


def budget_right(a: Arguments) -> Tensor:
    rows = {"fp8": 656, "bf16": 1152}[a["cache_format"]]
    keys = 0 if a["config"].indexer is None else 132 * len(a["config"].indexer.full_layers)
    return torch.tensor(a["config"].num_layers * rows + keys)


def layer_norm_arguments(draw: Draw) -> Arguments:
    d = draw(some)
    x = floats(draw, *draw(st.lists(small, max_size=2)), d)
    return {"x": x, "weight": floats(draw, d), "bias": floats(draw, d), "eps": 1e-2}


def layer_norm_right(a: Arguments) -> Tensor:
    x, weight, bias = (a[name].double() for name in ("x", "weight", "bias"))
    n = max(x.shape[-1], 1)
    if weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError("other width")
    centred = x - x.sum(-1, keepdim=True) / n
    deviation = (centred.square().sum(-1, keepdim=True) / n + a["eps"]).sqrt()
    return centred / deviation * weight + bias


MLA = layers.MLAConfig(
    name="small",
    hidden_size=4,
    num_layers=1,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=3,
    qk_nope_head_dim=3,
    qk_rope_head_dim=2,
    v_head_dim=2,
    rope=layers.RopeConfig(2, 100.0, interleaved=True),
    rms_norm_eps=1e-5,
    softmax_scale=0.4,
)
LAYER = MLALayer.random(MLA, 1)
STEP = batching.Step.build([0, 0], [3, 1], torch.tensor([[2], [0]]), 3)


def attended(x: Any, selected: Any, attend: Any, scale_rule: Any) -> Tensor:
    kept = SparseCache(torch.full((3, 3, 5), math.nan), None)
    return attend_sparse(
        LAYER, None, x, kept, STEP, attend, selected=selected, scale_rule=scale_rule
    )[0]


def attended_arguments(draw: Draw) -> Arguments:
    lists = [[0, -1, -1], [1, 0, -1], [2, 0, 1], [0, -1, -1]]
    return {
        "x": floats(draw, 4, 4, dtype=torch.float32),
        "selected": torch.tensor(lists, dtype=draw(INTEGERS)),
        "attend": draw(st.sampled_from((PLAN.decode, PLAN.extend))),
        "scale_rule": rules(draw),
    }


def attended_right(a: Arguments) -> Tensor:
    x, selected = a["x"], a["selected"]
    if x.dtype != torch.float32 or x.shape != (4, 4) or len(selected) != 4:
        raise ValueError("no such step")
    rows = LAYER.kv_rows(x, STEP.positions)
    q_nope, q_pe = LAYER.queries(x, STEP.positions)
    requests = [rows[:3], rows[3:]]
    out = []
    for token, (request, listed_here) in enumerate(
        zip((0, 0, 0, 1), selected.tolist(), strict=True)
    ):
        # A position without a row yet is a slot that nobody wrote: not this library's to refuse.
        mine = [p for p in listed_here if 0 <= p < 3]
        if any(p >= len(requests[request]) for p in mine):
            mine = []
            out.append(torch.full((4,), math.nan))
            continue
        keys = requests[request][mine].double()
        heads = []
        for h in range(2):
            k = torch.cat([keys[:, :3] @ LAYER.w_uk[h].double().T, keys[:, 3:]], dim=1)
            query = torch.cat([q_nope[token, h], q_pe[token, h]]).double()
            v = keys[:, :3] @ LAYER.w_uv[h].double().T
            heads.append((k @ query * 0.4).softmax(0) @ v if mine else torch.zeros(2).double())
        out.append(LAYER.o_proj.weight.double() @ torch.cat(heads))
    return torch.stack([o.double() for o in out])


def mxfp8_arguments(draw: Draw) -> Arguments:
    return {"x": floats(draw, draw(small), 32 * draw(some)), "scale_rule": "ceil"}


def mxfp8_right(a: Arguments) -> Tensor:
    if a["x"].ndim == 0 or a["x"].shape[-1] % 32 or a["scale_rule"] not in ("ceil", "floor"):
        raise ValueError("no groups of 32")
    groups = a["x"].float().double().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    exact = torch.log2(torch.where(amax > 0, amax, 1.0))
    ceil = a["scale_rule"] == "ceil"
    exponent = (exact - math.log2(448)).ceil() if ceil else exact.floor() - 8
    scale = torch.exp2(exponent.clamp(min=-127))
    return (nearest(groups / scale) * scale).flatten(-2)


# NVFP4's numbers have tests of their own; here an answer need only be that of a plain copy.


def nvfp4_numbers(x: Any, global_scale: Any) -> Tensor:
    return numerics.dequantise_nvfp4(numerics.quantise_nvfp4(x, global_scale=global_scale))


def linear_numbers(kind: Any, weight: Any, bias: Any) -> Tensor:
    made = kind.from_weight(weight, bias)
    return made(torch.eye(made.in_features, dtype=weight.dtype, device=weight.device))


def linear_edge(kind: Any) -> Edge:
    return Edge(
        lambda weight, bias: linear_numbers(kind, weight, bias),
        lambda draw: {
            "weight": floats(draw, 5, 32 * draw(some), dtype=torch.float32),
            "bias": floats(draw, 5, dtype=torch.float32),
        },
        lambda a: linear_numbers(kind, a["weight"].contiguous(), a["bias"]),
    )


SPARSE = {
    "to_e4m3": Edge(
        lambda x: float8.from_e4m3(float8.to_e4m3(x)),
        lambda draw: {"x": floats(draw, *draw(st.lists(small, min_size=1, max_size=3))) * 100},
        lambda a: nearest(a["x"]),
        computes=torch.float32,
    ),
    "from_e4m3": Edge(
        float8.from_e4m3,
        lambda draw: {"data": ints(draw, 0, 126, draw(small), draw(some), dtype=torch.uint8)},
        lambda a: TABLE[a["data"].long()],
    ),
    "group_scale": Edge(
        float8.group_scale,
        lambda draw: {"amax": floats(draw, draw(small)).abs(), "rule": rules(draw)},
        scales_right,
        computes=torch.float32,
    ),
    "read_scale": Edge(
        float8.read_scale,
        lambda draw: {
            "stored": floats(draw, draw(small), dtype=torch.float32).abs() + 2**-20,
            "reader": draw(st.sampled_from(float8.SCALE_READERS)),
        },
        lambda a: a["stored"] if a["reader"] == "stored" else 2.0 ** a["stored"].log2().floor(),
        computes=torch.float32,
    ),
    "pack_fp8_rows": Edge(
        lambda **a: cache.unpack_fp8_rows(cache.pack_fp8_rows(**a)),
        fp8_arguments,
        fp8_right,
        computes=torch.float32,
    ),
    "unpack_fp8_rows": Edge(
        cache.unpack_fp8_rows,
        lambda draw: {
            "rows": cache.pack_fp8_rows(floats(draw, draw(small), 576)),
            "scale_reader": "stored",
        },
        lambda a: cache.unpack_fp8_rows(a["rows"].contiguous()),
        computes=torch.float32,
    ),
    "write_fp8_rows": Edge(
        written_fp8, write_fp8_arguments, write_fp8_right, computes=torch.float32
    ),
    "quantise_index_keys": Edge(
        both_parts,
        keys_arguments,
        lambda a: quantised(a["keys"], 128, a["scale_rule"]),
        computes=torch.float32,
    ),
    "read_index_keys": Edge(read_index_keys, read_arguments, read_right),
    "index_scores": Edge(indexer.index_scores, score_arguments, score_right),
    "select_topk": Edge(indexer.select_topk, topk_arguments, topk_right),
    "select_topk_chunked": Edge(indexer.select_topk_chunked, chunked_arguments, chunked_right),
    "select_positions": Edge(indexer.select_positions, select_arguments, select_right),
    "positions_to_slots": Edge(indexer.positions_to_slots, convert_arguments, convert_right),
    "own_positions": Edge(
        lambda **a: AttentionResult(*indexer.own_positions(**a)), own_arguments, own_right
    ),
    "sparse_extend": Edge(attention.sparse_extend, sparse_arguments, sparse_right),
    "sparse_decode": Edge(
        attention.sparse_decode,
        lambda draw: sparse_arguments(draw) | {"num_splits": draw(some)},
        sparse_right,
    ),
    "plan_splits": Edge(
        lambda **a: torch.tensor(attention.plan_splits(**a)),
        lambda draw: {
            "rows": draw(small),
            "heads": draw(st.integers(0, 64)),
            "k": draw(st.integers(0, 2048)),
            "multiprocessors": draw(st.integers(1, 188)),
        },
        splits_right,
    ),
    "TorchBackend.plan": Edge(bytes_of_plan, spec_arguments, spec_right),
    "TorchPlan.decode": Edge(planned("decode"), planned_arguments, planned_right),
    "TorchPlan.extend": Edge(planned("extend"), planned_arguments, planned_right),
    "IndexerConfig": Edge(indexer_numbers, indexer_arguments, indexer_right),
    "bytes_per_token": Edge(
        lambda **a: torch.tensor(cache.bytes_per_token(**a)),
        lambda draw: {
            "config": layers.preset(draw(st.sampled_from(["v3", "v3.2", "glm-5.2"]))),
            "cache_format": draw(st.sampled_from(["bf16", "fp8"])),
        },
        budget_right,
    ),
    "layer_norm": Edge(layers.layer_norm, layer_norm_arguments, layer_norm_right),
    "attend_sparse": Edge(attended, attended_arguments, attended_right),
    "quantise_mxfp8": Edge(
        lambda **a: numerics.dequantise_mxfp8(numerics.quantise_mxfp8(**a)),
        mxfp8_arguments,
        mxfp8_right,
        computes=torch.float32,
    ),
    "mxfp8_scale": Edge(
        lambda **a: mxfp8.from_e8m0(mxfp8.mxfp8_scale(**a)),
        lambda draw: {"amax": floats(draw, draw(small)).abs() + 1e-3, "rule": "floor"},
        lambda a: 2.0 ** (a["amax"].float().double().log2().floor() - 8),
        computes=torch.float32,
    ),
    "quantise_nvfp4": Edge(
        nvfp4_numbers,
        lambda draw: {
            "x": floats(draw, draw(small), 16 * draw(some)),
            "global_scale": draw(st.sampled_from([None, 0.01])),
        },
        lambda a: nvfp4_numbers(a["x"].contiguous(), a["global_scale"]),
    ),
    "W4A16Linear": linear_edge(layers.W4A16Linear),
    "OnlineMXFP8Linear": linear_edge(layers.OnlineMXFP8Linear),
}

"""Shares of ranks, right by dealing the positions out one by one; attention over them by loops."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from tests.edges.edge import Arguments, Draw, Edge, floats, small, some
from tests.edges.sparse_edges import best_of, ints, sparse_right
from torch import Tensor

from mla_ref import backends, batching, parallel
from mla_ref.numerics import AttentionResult
from mla_ref.parallel.topk import Candidates

CPU = torch.device("cpu")
# Positions that are dealt out: beyond all that is drawn, and above the values that spoilers set.
DEALT = 300


def need(truth: bool) -> None:
    """The arguments are good, or returning anything at all is wrong."""
    if not truth:
        raise ValueError("not good")


def a_share(draw: Draw, *, rank: bool = True) -> Arguments:
    world = draw(some)
    share = {"world": world, "interleave": draw(some)}
    return share | ({"rank": draw(st.integers(0, world - 1))} if rank else {})


def dealt(a: Arguments) -> list[tuple[int, int]]:
    """(owner, local position) of positions 0, 1, 2, ..., as a dealer would find them."""
    world, each, rank = a["world"], a["interleave"], a.get("rank", 0)
    need(all(type(x) is int for x in (world, each, rank)))
    need(world >= 1 and each >= 1 and 0 <= rank < world)
    held, cards = [0] * world, []
    while len(cards) < DEALT:
        for owner in range(world):
            for _ in range(each):
                cards.append((owner, held[owner]))
                held[owner] += 1
    return cards


def mapped(positions: Tensor, table: dict[int, int]) -> Tensor:
    """The table's answer for each position, -1 for a negative one, the rule far beyond it."""
    flat = [table.get(p, -1) if p >= 0 else -1 for p in positions.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.int64).reshape(positions.shape)


def far(a: Arguments, name: str) -> bool:
    return bool((a[name] >= DEALT // 2).any())


def positions_arguments(draw: Draw, name: str = "positions", **more: Any) -> Arguments:
    shape = draw(st.lists(small, max_size=2))
    return {name: ints(draw, -2, 40, *shape)} | a_share(draw, **more)


def owner_right(a: Arguments) -> Tensor:
    cards = dealt(a)
    if far(a, "positions"):  # 2^31 - 1 and 100 are not dealt: the rule, in Python's integers
        flat = [
            p // a["interleave"] % a["world"] if p >= 0 else -1
            for p in a["positions"].flatten().tolist()
        ]
        return torch.tensor(flat).reshape(a["positions"].shape)
    return mapped(a["positions"], {p: owner for p, (owner, _) in enumerate(cards)})


def local_right(a: Arguments) -> Tensor:
    cards, world, each = dealt(a), a["world"], a["interleave"]
    if far(a, "positions"):
        flat = [
            p // (world * each) * each + p % each if p >= 0 else -1
            for p in a["positions"].flatten().tolist()
        ]
        return torch.tensor(flat).reshape(a["positions"].shape)
    return mapped(a["positions"], {p: local for p, (_, local) in enumerate(cards)})


def global_right(a: Arguments) -> Tensor:
    cards, world, each, rank = dealt(a), a["world"], a["interleave"], a["rank"]
    if bool((a["local"] >= DEALT // (2 * world)).any()):
        wide = [
            (p // each * world + rank) * each + p % each if p >= 0 else -1
            for p in a["local"].flatten().tolist()
        ]
        # What does not fit its integers cannot be handed back in them.
        wide = [p if p <= torch.iinfo(a["local"].dtype).max else -1 for p in wide]
        return torch.tensor(wide).reshape(a["local"].shape)
    table = {local: p for p, (owner, local) in enumerate(cards) if owner == rank}
    return mapped(a["local"], table)


def lens_right(a: Arguments) -> Tensor:
    cards, rank, world, each = dealt(a), a["rank"], a["world"], a["interleave"]
    found = []
    for length in a["global_lens"].flatten().tolist():
        if length < DEALT:
            found.append(sum(owner == rank for owner, _ in cards[: max(length, 0)]))
        else:
            rest = length % (world * each)
            found.append(length // (world * each) * each + min(max(rest - rank * each, 0), each))
    return torch.tensor(found, dtype=torch.int64).reshape(a["global_lens"].shape)


def on_rank(a: Arguments, position: int, request: int) -> int:
    """Slot of a position on the rank; -1 if another holds it or no page does."""
    table, size = a["block_table"], a["page_size"]
    if position < 0 or not 0 <= request < len(table):
        return -1
    world, each = a["world"], a["interleave"]
    if position // each % world != a["rank"]:
        return -1
    local = position // (world * each) * each + position % each
    if local // size >= table.shape[1]:
        return -1
    page = int(table[request, local // size])
    fits = (page + 1) * size - 1 <= torch.iinfo(table.dtype).max
    return page * size + local % size if page >= 0 and fits else -1


def pages_arguments(draw: Draw, requests: int) -> Arguments:
    share = a_share(draw)
    size = share["interleave"] * draw(st.integers(1, 2))
    return share | {
        "page_size": size,
        "block_table": ints(draw, -1, 9, requests, draw(some)),
    }


def need_pages(a: Arguments) -> None:
    dealt(a)
    need(type(a["page_size"]) is int and a["page_size"] >= 1)
    need(a["page_size"] % a["interleave"] == 0 and a["block_table"].ndim == 2)


def slots_arguments(draw: Draw) -> Arguments:
    rows, requests = draw(small), draw(some)
    return pages_arguments(draw, requests) | {
        "positions": ints(draw, -2, 30, rows, draw(small)),
        "request_of_row": ints(draw, -1, requests, rows),
    }


def slots_right(a: Arguments) -> Tensor:
    need_pages(a)
    need(a["positions"].ndim == 2 and a["request_of_row"].shape == a["positions"].shape[:1])
    found = [
        [on_rank(a, p, request) for p in row]
        for row, request in zip(a["positions"].tolist(), a["request_of_row"].tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(a["positions"].shape)


STEP = batching.Step.build(
    [3, 0], [2, 3], torch.tensor([[0, 1, 2], [3, 4, 5]]), 4, num_tokens_padded=7
)


def mapping_arguments(draw: Draw) -> Arguments:
    share = a_share(draw) | {"interleave": draw(st.sampled_from([1, 2, 4]))}
    return share | {"step": STEP, "block_table": ints(draw, 0, 9, 2, 2)}


def mapping_right(a: Arguments) -> Tensor:
    a = a | {"page_size": 4, "block_table": a["block_table"].long()}
    need_pages(a)
    rows = [(0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]
    found = [on_rank(a, p, request) for request, p in rows]
    owners = [p // a["interleave"] % a["world"] for _, p in rows]
    need(all(slot >= 0 or owner != a["rank"] for slot, owner in zip(found, owners, strict=True)))
    return torch.tensor([*found, -1, -1])


def some_rows(draw: Draw, width: int = 5) -> list[Tensor]:
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    return [floats(draw, n, width, dtype=torch.float32) for n in counts]


def share_arguments(draw: Draw) -> Arguments:
    share = a_share(draw)
    size = share["interleave"] * draw(st.integers(1, 2))
    return share | {"kv_rows": some_rows(draw), "page_size": size}


def share_numbers(**a: Any) -> Tensor:
    """All rows that the rank holds, request after request, read back by the block table."""
    cache, table = parallel.share_of_rows(**a)
    # On world virtual pages a request has a page of each rank, so every slot up to its end is here.
    rows = []
    for request, whole in enumerate(a["kv_rows"]):
        size = a["page_size"]
        mine = [p for p in range(len(whole)) if p // a["interleave"] % a["world"] == a["rank"]]
        for local in range(len(mine)):
            rows.append(cache[int(table[request, local // size]), local % size])
    return torch.stack(rows) if rows else cache.new_zeros(0, cache.shape[2])


def share_right(a: Arguments) -> Tensor:
    cards = dealt(a)
    need(type(a["page_size"]) is int and a["page_size"] % a["interleave"] == 0)
    need(all(isinstance(x, Tensor) for x in a["kv_rows"]))
    rows = [
        whole[p] for whole in a["kv_rows"] for p in range(len(whole)) if cards[p][0] == a["rank"]
    ]
    return torch.stack(rows) if rows else torch.zeros(0, a["kv_rows"][0].shape[1])


# --- selection


def candidate_arguments(draw: Draw) -> Arguments:
    share, length, rows = a_share(draw), draw(st.integers(0, 9)), draw(small)
    local = sum(p // share["interleave"] % share["world"] == share["rank"] for p in range(length))
    return share | {
        "scores": ints(draw, -2, 2, rows, local).float(),
        "visible_lens": ints(draw, 0, length, rows),
        "k": draw(small),
    }


def candidate_right(a: Arguments) -> AttentionResult:
    cards = dealt(a)
    need(type(a["k"]) is int and a["k"] >= 0)
    mine = [p for p, (owner, _) in enumerate(cards) if owner == a["rank"]]
    scores, positions = [], []
    for row, length in zip(a["scores"].tolist(), a["visible_lens"].tolist(), strict=True):
        seen = sum(p < length for p in mine)
        best = best_of(row, seen, a["k"])
        scores.append([row[i] if i >= 0 else -math.inf for i in best])
        positions.append([mine[i] if i >= 0 else -1 for i in best])
    shape = (len(a["scores"]), a["k"])
    return AttentionResult(
        torch.tensor(scores, dtype=torch.float64).reshape(shape),
        torch.tensor(positions, dtype=torch.int64).reshape(shape),
    )


def merge_arguments(draw: Draw) -> Arguments:
    world, rows, proposals = draw(some), draw(small), draw(small)
    order = [draw(st.permutations(range(world * proposals))) for _ in range(rows)]
    positions = torch.tensor(order, dtype=torch.int64).reshape(rows, world, proposals)
    return {
        "scores": ints(draw, -2, 2, world, rows, proposals).float(),
        "positions": positions.movedim(1, 0).contiguous(),
        "k": draw(small),
    }


def merge_right(a: Arguments) -> Tensor:
    need(type(a["k"]) is int and a["k"] >= 0 and a["scores"].shape == a["positions"].shape)
    rows = []
    for row in range(a["scores"].shape[1]):
        pairs = zip(
            a["scores"][:, row].flatten().tolist(),
            a["positions"][:, row].flatten().tolist(),
            strict=True,
        )
        found = sorted((-s, p) for s, p in pairs if p >= 0 and s > -math.inf)[: a["k"]]
        rows.append([p for _, p in found] + [-1] * (a["k"] - len(found)))
    return torch.tensor(rows, dtype=torch.int64).reshape(a["scores"].shape[1], a["k"])


def topk_arguments(draw: Draw) -> Arguments:
    rows, keys = draw(small), draw(st.integers(0, 9))
    return a_share(draw, rank=False) | {
        "scores": ints(draw, -2, 2, rows, keys).float(),
        "visible_lens": ints(draw, 0, keys, rows),
        "k": draw(small),
    }


def topk_right(a: Arguments) -> Tensor:
    dealt(a)
    need(type(a["k"]) is int and a["k"] >= 0)
    lists = [
        best_of(row, length, a["k"])
        for row, length in zip(a["scores"].tolist(), a["visible_lens"].tolist(), strict=True)
    ]
    return torch.tensor(lists, dtype=torch.int64).reshape(len(a["scores"]), a["k"])


def alone_right(a: Arguments) -> Tensor:
    """One rank needs no group: the list of all keys."""
    need(a["rank"] == 0 and a["world"] == 1)
    return topk_right(a)


# --- attention

SPEC = backends.AttnSpec(
    num_heads=2,
    kv_lora_rank=3,
    qk_rope_head_dim=2,
    topk=4,
    page_size=4,
    cache_format="bf16",
    q_dtype=torch.float32,
)
PLAN = backends.TorchBackend().plan(SPEC, max_rows=4, max_requests=4, device=CPU)


def rows_and_lists(draw: Draw, requests: int) -> Arguments:
    rows = draw(st.integers(0, 4))
    a = {
        "q": floats(draw, rows, 2, 5, dtype=torch.float32),
        "positions": ints(draw, -2, 12, rows, draw(st.integers(0, 4))),
        "visible_lens": ints(draw, 0, 9, rows),
        "request_of_row": ints(draw, 0, requests - 1, rows),
        "softmax_scale": 0.3,
        "route": draw(st.sampled_from(backends.KINDS)),
    }
    if draw(st.booleans()):
        a["counts"] = ints(draw, 0, a["positions"].shape[1], rows)
    return a


def counted(a: Arguments, row: int) -> list[int]:
    """Positions of a row that count and that it may see; all that follows from the list alone."""
    listed = a["positions"][row].tolist()
    if a.get("counts") is not None:
        listed = listed[: max(int(a["counts"][row]), 0)]
    if a.get("visible_lens") is None:
        return [p for p in listed if p >= 0]
    return [p for p in listed if 0 <= p < int(a["visible_lens"][row])]


def need_rows(a: Arguments) -> None:
    rows = len(a["q"])
    need(a["route"] in backends.KINDS and a["q"].ndim == 3 and a["positions"].ndim == 2)
    for name in ("positions", "visible_lens", "request_of_row", "counts"):
        need(a.get(name) is None or len(a[name]) == rows)


def attended(a: Arguments, flat: Tensor, slots: list[list[int]]) -> AttentionResult:
    width = max(map(len, slots), default=0)
    padded = [row + [-1] * (width - len(row)) for row in slots]
    indices = torch.tensor(padded, dtype=torch.int64).reshape(len(slots), width)
    return sparse_right(
        {
            "q": a["q"],
            "kv_cache": flat[:, None],
            "indices": indices,
            "softmax_scale": a["softmax_scale"],
            "kv_lora_rank": a.get("kv_lora_rank", 3),
            "sink": a.get("sink"),
        }
    )


def to_share_arguments(draw: Draw) -> Arguments:
    share = a_share(draw) | {"interleave": draw(st.sampled_from([1, 2, 4]))}
    return (
        rows_and_lists(draw, 2)
        | share
        | {
            "kv_cache": floats(draw, 6, 4, 5, dtype=torch.float32),
            "block_table": ints(draw, -1, 6, 2, draw(some)),
            "plan": PLAN,
        }
    )


def to_share_right(a: Arguments) -> AttentionResult:
    a = a | {"page_size": a["kv_cache"].shape[1]}
    need_pages(a)
    need_rows(a)
    need(a["visible_lens"] is not None or a["world"] == 1)
    need(a["q"].dtype == torch.float32 and len(a["q"]) <= 4 and a["positions"].shape[1] <= 4)
    need(a["page_size"] == 4)
    slots = [
        [on_rank(a, p, int(a["request_of_row"][row])) for p in counted(a, row)]
        for row in range(len(a["q"]))
    ]
    return attended(a, a["kv_cache"].flatten(0, 1), slots)


def on_rank_arguments(draw: Draw) -> Arguments:
    a = to_share_arguments(draw) | {"rank": 0, "world": 1}
    if draw(st.booleans()):
        a["sink"] = floats(draw, 2)
    return a | {"heads": draw(st.sampled_from(["all", "own"]))}


def on_rank_right(a: Arguments) -> AttentionResult:
    need(a["world"] == 1 and a["heads"] in ("all", "own"))
    return to_share_right(a)


def simulate_arguments(draw: Draw) -> Arguments:
    share = a_share(draw, rank=False)
    rows = some_rows(draw)
    a = rows_and_lists(draw, len(rows)) | share
    shortest = min(map(len, rows))
    a["positions"] = a["positions"].clamp(max=shortest - 1)
    if draw(st.booleans()):
        a["sink"] = floats(draw, 2)
    return a | {
        "kv_rows": rows,
        "kv_lora_rank": 3,
        "page_size": share["interleave"] * draw(st.integers(1, 2)),
    }


def simulate_right(a: Arguments) -> AttentionResult:
    dealt(a)
    need_rows(a)
    need(type(a["page_size"]) is int and a["page_size"] % a["interleave"] == 0)
    need(type(a["kv_lora_rank"]) is int and 1 <= a["kv_lora_rank"] <= a["q"].shape[2])
    need(a["visible_lens"] is not None or a["world"] == 1)
    need(all(isinstance(x, Tensor) for x in a["kv_rows"]))
    requests, slots = a["request_of_row"], []
    need(requests is not None or len(a["kv_rows"]) == 1)
    starts = [sum(map(len, a["kv_rows"][:r])) for r in range(len(a["kv_rows"]))]
    unwritten = sum(map(len, a["kv_rows"]))
    for row in range(len(a["q"])):
        request = 0 if requests is None else int(requests[row])
        if not 0 <= request < len(starts):
            slots.append([])
            continue
        length, block = len(a["kv_rows"][request]), a["page_size"] * a["world"]
        # A position behind the rows is a slot that nobody wrote, in which there is NaN, or none.
        mine = [p for p in counted(a, row) if p < -(-length // block) * block]
        slots.append([starts[request] + p if p < length else unwritten for p in mine])
    return attended(a, torch.cat([*a["kv_rows"], torch.full((1, 5), math.nan)]), slots)


def plan_arguments(draw: Draw) -> Arguments:
    return {
        "backend": backends.TorchBackend(),
        "spec": SPEC,
        "max_rows": draw(some),
        "max_requests": draw(small),
        "kinds": draw(st.sampled_from([("decode", "extend"), ("decode",), ("extend",)])),
    }


def plan_right(a: Arguments) -> Tensor:
    need(all(type(a[name]) is int and a[name] >= 0 for name in ("max_rows", "max_requests")))
    need(a["max_rows"] >= 1)
    return torch.tensor(a["max_rows"] * 2 * 4 * 4 if "decode" in a["kinds"] else 0)


PARALLEL = {
    "owner_of": Edge(
        parallel.owner_of, lambda draw: positions_arguments(draw, rank=False), owner_right
    ),
    "local_positions": Edge(
        parallel.local_positions, lambda draw: positions_arguments(draw, rank=False), local_right
    ),
    "global_positions": Edge(
        parallel.global_positions, lambda draw: positions_arguments(draw, "local"), global_right
    ),
    "local_lens": Edge(
        parallel.local_lens,
        lambda draw: (
            {"global_lens": ints(draw, 0, 40, *draw(st.lists(small, max_size=2)))} | a_share(draw)
        ),
        lens_right,
    ),
    "slots_on_rank": Edge(parallel.slots_on_rank, slots_arguments, slots_right),
    "slot_mapping_on_rank": Edge(parallel.slot_mapping_on_rank, mapping_arguments, mapping_right),
    "share_of_rows": Edge(share_numbers, share_arguments, share_right),
    "rank_candidates": Edge(
        lambda **a: tuple(parallel.rank_candidates(**a)), candidate_arguments, candidate_right
    ),
    "merge_candidates": Edge(
        lambda scores, positions, k: parallel.merge_candidates(Candidates(scores, positions), k),
        merge_arguments,
        merge_right,
    ),
    "simulate_topk": Edge(parallel.simulate_topk, topk_arguments, topk_right),
    "select_topk_on_rank": Edge(
        parallel.select_topk_on_rank,
        lambda draw: topk_arguments(draw) | {"rank": 0, "world": 1},
        alone_right,
    ),
    "attend_to_share": Edge(parallel.attend_to_share, to_share_arguments, to_share_right),
    "attend_on_rank": Edge(parallel.attend_on_rank, on_rank_arguments, on_rank_right),
    "simulate_ranks": Edge(parallel.simulate_ranks, simulate_arguments, simulate_right),
    "plan_for_ranks": Edge(
        lambda **a: torch.tensor(parallel.plan_for_ranks(**a, device=CPU).nbytes),
        plan_arguments,
        plan_right,
    ),
}

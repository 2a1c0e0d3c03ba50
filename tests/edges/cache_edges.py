"""Cache and batching: the right result is found with Python integers, token by token."""

from typing import Any

import torch
from hypothesis import strategies as st
from tests.edges.attention_edges import lengths, rows_of
from tests.edges.edge import Arguments, Draw, Edge, floats, small, some
from torch import Tensor

from mla_ref import batching, cache


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


CACHE = {
    "slot_mapping": Edge(cache.slot_mapping, batch_of, slots_right),
    "write_rows": Edge(written, written_arguments, written_right),
    "gather_rows": Edge(cache.gather_rows, gathered_arguments, gathered_right),
    "Step.build": Edge(
        lambda **a: batching.Step.build(**a).slot_mapping, step_arguments, step_right
    ),
}

"""The host's side of a step: facts, routes, orders, splits and plans, each right by its rule.

The rules are written again here, request by request and row by row. Results are numbers in tensors,
so that one comparison serves all.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from tests.edges.edge import Arguments, Draw, Edge, floats, small, some
from tests.edges.sparse_edges import ints, listed, sparse_right
from torch import Tensor

from mla_ref import backends, batching
from mla_ref.batching.modes import parse_mode
from mla_ref.numerics import AttentionResult

SPEC = backends.AttnSpec(
    num_heads=2,
    kv_lora_rank=3,
    qk_rope_head_dim=2,
    topk=4,
    page_size=3,
    cache_format="bf16",
    q_dtype=torch.float32,
)
WORDS = {"auto": "auto", "0": "0", "off": "0", " No ": "0", "1": "1", "TRUE": "1"}
KINDS = ("decode", "extend")


def numbers(*values: Any) -> Tensor:
    """Ints, bools, None (-7) and lists of them in one flat tensor."""
    flat: list[int] = []
    for value in values:
        inside = value if isinstance(value, (list, tuple)) else [value]
        flat += [-7 if v is None else int(v) for v in inside]
        flat.append(-9)
    return torch.tensor(flat)


def codes(*names: str) -> list[int]:
    """Reason codes by their place in the table."""
    return [list(batching.REASONS).index(name) for name in names]


def lens(draw: Draw, most: int = 5, requests: int = 4) -> list[int]:
    return draw(st.lists(st.integers(0, most), max_size=requests))


def flags(draw: Draw, count: int) -> list[bool] | None:
    if draw(st.booleans()):
        return None
    return draw(st.lists(st.booleans(), min_size=count, max_size=count))


def need(truth: bool) -> None:
    """The arguments are good, or returning anything at all is wrong."""
    if not truth:
        raise ValueError("not good")


def need_counts(*values: Any, at_least: int = 0) -> None:
    for value in values:
        need(type(value) is int and at_least <= value < 2**63)


# --- facts


def facts_arguments(draw: Draw) -> Arguments:
    query_lens = lens(draw)
    real = draw(st.integers(0, len(query_lens)))
    query_lens[real:] = [0] * (len(query_lens) - real)
    return {
        "query_lens": query_lens,
        "is_prefilling": flags(draw, len(query_lens)),
        "num_reqs": draw(st.sampled_from([real, None])),
        "num_tokens_padded": draw(st.sampled_from([None, sum(query_lens), sum(query_lens) + 3])),
    }


def facts_numbers(**a: Any) -> Tensor:
    facts = batching.batch_facts(**a)
    return numbers(
        list(facts.query_lens),
        facts.is_prefilling is None,
        facts.is_prefilling or (),
        facts.num_reqs_padded,
        facts.num_tokens_padded,
    )


def real_requests(a: Arguments) -> tuple[list[int], list[bool] | None]:
    """Lengths and flags of the requests that are there."""
    query_lens, prefilling = list(a["query_lens"]), a["is_prefilling"]
    need_counts(*query_lens)
    real = a.get("num_reqs")
    real = len(query_lens) if real is None else real
    need_counts(real)
    need(real <= len(query_lens) and sum(query_lens[real:]) == 0)
    if prefilling is not None:
        need(len(prefilling) == len(query_lens) and all(type(f) is bool for f in prefilling))
        prefilling = [
            f and q > 0 for f, q in zip(prefilling[:real], query_lens[:real], strict=True)
        ]
    return query_lens[:real], prefilling


def facts_right(a: Arguments) -> Tensor:
    query_lens, prefilling = real_requests(a)
    padded = a["num_tokens_padded"]
    padded = sum(query_lens) if padded is None else padded
    need_counts(padded)
    need(padded >= sum(query_lens))
    return numbers(query_lens, prefilling is None, prefilling or (), len(a["query_lens"]), padded)


# --- the rule


def drafter(draw: Draw) -> Arguments:
    return {"num_speculative_tokens": draw(small)}


def verdict(query_lens: Sequence[int], prefilling: Sequence[bool] | None, n: int) -> str:
    """The code of `classify`, from the definition of a verifier batch."""
    longest = max(query_lens, default=0)
    if longest <= 1:
        return "single-token" if longest else "empty"
    if n == 0:
        return "no-spec-config"
    if prefilling is not None and any(prefilling):
        return "prefill-in-batch"
    if longest > 1 + n:
        return "query-over-n+1"
    return "prefilling-unknown" if prefilling is None else "verifier"


def some_facts(draw: Draw) -> batching.BatchFacts:
    query_lens = lens(draw)
    padded = sum(query_lens) + draw(st.integers(0, 2))
    return batching.batch_facts(query_lens, flags(draw, len(query_lens)), num_tokens_padded=padded)


def classify_right(a: Arguments) -> Tensor:
    facts = a["facts"]
    need_counts(a["num_speculative_tokens"])
    code = verdict(facts.query_lens, facts.is_prefilling, a["num_speculative_tokens"])
    return numbers(code == "verifier", codes(code))


def classified(**a: Any) -> Tensor:
    found = batching.classify(**a)
    return numbers(found.is_verifier, codes(found.reason))


def verifier_right(a: Arguments) -> Tensor:
    need_counts(a["num_speculative_tokens"])
    return numbers(verdict(*real_requests(a), a["num_speculative_tokens"]) == "verifier")


def limits_arguments(draw: Draw) -> Arguments:
    return {
        "max_num_seqs": draw(some),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "num_speculative_tokens": draw(small),
        "max_q": draw(some),
    }


def limits_numbers(**a: Any) -> Tensor:
    limits = batching.ServingLimits(**a)
    return numbers([batching.ScratchRows(limits, mode).decode_rows for mode in batching.SpecMode])


def decode_rows(limits: Arguments, mode: str) -> int:
    seqs, tokens = limits["max_num_seqs"], limits["max_num_batched_tokens"]
    n, max_q = limits["num_speculative_tokens"], limits["max_q"]
    each = {"auto": 1 + n, "0": 1, "1": max(1 + n, max_q)}[mode]
    return max(min(seqs * each, tokens), seqs)


def limits_right(a: Arguments) -> Tensor:
    need_counts(a["max_num_seqs"], a["max_num_batched_tokens"], a["max_q"], at_least=1)
    need_counts(a["num_speculative_tokens"])
    return numbers([decode_rows(a, mode) for mode in ("auto", "0", "1")])


def fields_of(limits: batching.ServingLimits) -> Arguments:
    return {name: getattr(limits, name) for name in limits_names}


limits_names = ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens", "max_q")


def word(draw: Draw) -> str:
    return draw(st.sampled_from(sorted(WORDS)))


def mode_of(text: Any) -> str:
    need(isinstance(text, str) and text in WORDS)
    return WORDS[text]


def mode_number(mode: str) -> Tensor:
    return numbers(["auto", "0", "1"].index(mode))


def scratch_arguments(draw: Draw) -> Arguments:
    return {
        "backend": backends.TorchBackend(),
        "spec": SPEC,
        "limits": batching.ServingLimits(**limits_arguments(draw)),
        "mode": word(draw),
        "device": draw(st.sampled_from([None, torch.device("meta")])),
    }


def scratch_numbers(**a: Any) -> Tensor:
    plan = batching.plan_scratch(**a)
    return numbers(plan.decode.max_rows, plan.extend.max_rows, plan.nbytes)


def scratch_right(a: Arguments) -> Tensor:
    limits = fields_of(a["limits"])
    rows = decode_rows(limits, mode_of(a["mode"]))
    # One split of lists of 4; 2 heads; 3 numbers and the LSE in float32. Nothing for extend.
    return numbers(rows, limits["max_num_batched_tokens"], rows * 2 * 4 * 4)


def kind_of(
    query_lens: Sequence[int],
    prefilling: Sequence[bool] | None,
    padded: int,
    limits: Arguments,
    planned: str,
    mode: str,
) -> str:
    """Decode or extend for a batch, by the rule as the pull request states it."""
    longest = max(query_lens, default=0)
    fits = padded <= decode_rows(limits, planned)
    if longest <= 1:
        return "decode" if fits else "extend"
    verifies = verdict(query_lens, prefilling, limits["num_speculative_tokens"]) == "verifier"
    wanted = mode == "1" or (mode == "auto" and verifies)
    return "decode" if wanted and longest <= limits["max_q"] and fits else "extend"


def route_arguments(draw: Draw) -> Arguments:
    limits = batching.ServingLimits(4, 23, draw(small), draw(st.integers(1, 6)))
    return {
        "step": some_facts(draw),
        "plan": batching.ScratchRows(limits, draw(st.sampled_from(list(batching.SpecMode)))),
        "mode": draw(st.sampled_from([None, *sorted(WORDS)])),
    }


def kinds_of_rows(way: batching.Route) -> Tensor:
    """The kernel of each row: 0 for decode, 1 for extend; nothing if rows are left out."""
    rows = []
    for start, end, _, _, kind in way.segments:
        need(start == len(rows))
        rows += [KINDS.index(kind)] * (end - start)
    return numbers(rows)


def rule_of(a: Arguments) -> tuple[Arguments, str, str]:
    planned = str(a["plan"].mode)
    return (
        fields_of(a["plan"].limits),
        planned,
        planned if a["mode"] is None else mode_of(a["mode"]),
    )


def route_right(a: Arguments) -> Tensor:
    facts = a["step"]
    padded = facts.num_tokens_padded
    kind = kind_of(facts.query_lens, facts.is_prefilling, padded, *rule_of(a))
    return numbers([KINDS.index(kind)] * padded)


def per_request_right(a: Arguments) -> Tensor:
    facts, (limits, planned, mode) = a["step"], rule_of(a)
    padding = facts.num_tokens_padded - facts.num_tokens
    rows: list[str] = []
    for r, q in enumerate(facts.query_lens):
        known = None if facts.is_prefilling is None else [facts.is_prefilling[r]]
        rows += [kind_of([q], known, q, limits, planned, mode)] * q
    rows += [rows[-1] if rows else "decode"] * padding
    if not facts.num_tokens:
        alone = kind_of((), None, padding, limits, planned, mode)
        rows = [alone] * padding
    # Neighbours in decode that together are too many go to extend together.
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end] == rows[start]:
            end += 1
        if rows[start] == "decode" and end - start > decode_rows(limits, planned):
            rows[start:end] = ["extend"] * (end - start)
        start = end
    return numbers([KINDS.index(kind) for kind in rows])


# --- along a route

LIMITS = batching.ServingLimits(3, 9, 2)
SCRATCH = batching.plan_scratch(backends.TorchBackend(), SPEC, LIMITS)
MIXED = batching.route_per_request(batching.batch_facts([3, 1, 4], [False, False, True]), SCRATCH)


def along_arguments(draw: Draw) -> Arguments:
    pages = draw(some)
    a = {
        "route": MIXED,
        "plan": SCRATCH,
        "q": floats(draw, 8, 2, 5, dtype=torch.float32),
        "kv_cache": floats(draw, pages, 3, 5, dtype=torch.float32),
        "softmax_scale": 0.3,
    }
    if draw(st.booleans()):
        a["sink"] = floats(draw, 2)
    return a | listed(draw, 8, 3 * pages, most=4)


def along_right(a: Arguments) -> AttentionResult:
    need(a["q"].dtype == torch.float32 and len(a["q"]) == 8 and a["indices"].shape[1] <= 4)
    need(a["kv_cache"].shape[1] == 3)
    return sparse_right(a | {"kv_lora_rank": 3})


# --- order and splits


def class_of(scheduled: int, computed: int, prompt: int, threshold: int) -> int:
    need_counts(scheduled, computed, prompt)
    need_counts(threshold, at_least=1)
    if not computed:
        return 3
    if scheduled > threshold:
        return 2
    return int(computed < prompt)


def class_arguments(draw: Draw) -> Arguments:
    return {
        "scheduled": draw(small),
        "computed": draw(small),
        "prompt": draw(small),
        "decode_threshold": draw(some),
    }


def reorder_arguments(draw: Draw) -> Arguments:
    rows = draw(st.lists(st.tuples(small, small, small), max_size=6))
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    a: Arguments = dict(zip(("scheduled", "computed", "prompt"), map(list, columns), strict=True))
    return a | {"decode_threshold": draw(some)}


def in_order(**a: Any) -> Tensor:
    """The classes from the front, and how many requests have moved."""
    order = batching.reorder_batch(**a).order
    need(sorted(order) == list(range(len(order))))
    rows = list(zip(a["scheduled"], a["computed"], a["prompt"], strict=True))
    ranks = [class_of(*rows[r], a["decode_threshold"]) for r in order]
    return numbers(ranks, sum(place != r for place, r in enumerate(order)))


def reorder_right(a: Arguments) -> Tensor:
    need_counts(a["decode_threshold"], at_least=1)
    rows = zip(a["scheduled"], a["computed"], a["prompt"], strict=True)
    ranks = [class_of(*row, a["decode_threshold"]) for row in rows]
    out_of_place = sum(x != y for x, y in zip(ranks, sorted(ranks), strict=True))
    return numbers(sorted(ranks), out_of_place)


def split_arguments(draw: Draw) -> Arguments:
    query_lens = lens(draw)
    padded = draw(st.sampled_from([None, sum(query_lens), sum(query_lens) + 3]))
    # Where a flag is needed there is one; a batch of one length is not asked for.
    return {
        "query_lens": query_lens,
        "is_prefilling": draw(
            st.lists(st.booleans(), min_size=len(query_lens), max_size=len(query_lens))
        ),
        "num_tokens_padded": padded,
        "decode_threshold": draw(some),
        "treat_short_extends_as_decodes": draw(st.booleans()),
    }


def split_numbers(**a: Any) -> Tensor:
    return numbers(list(batching.split_decodes_and_prefills(**a)))


def padded_tokens(a: Arguments, query_lens: Sequence[int]) -> int:
    padded = a["num_tokens_padded"]
    padded = sum(query_lens) if padded is None else padded
    need_counts(padded)
    need(padded >= sum(query_lens))
    return padded


def split_right(a: Arguments) -> Tensor:
    query_lens, prefilling = real_requests(a)
    threshold, tokens = a["decode_threshold"], padded_tokens(a, query_lens)
    need_counts(threshold, at_least=1)
    blind = bool(a["treat_short_extends_as_decodes"])
    need(blind or prefilling is not None)
    front = 0
    for r, q in enumerate(query_lens):
        if q > threshold or (not blind and prefilling is not None and prefilling[r]):
            break
        front += 1
    if front == len(query_lens):
        return numbers([front, 0, tokens, 0])
    decodes = sum(query_lens[:front])
    return numbers([front, len(query_lens) - front, decodes, tokens - decodes])


def six_arguments(draw: Draw) -> Arguments:
    query_lens = lens(draw)
    seq_lens = [q + draw(st.sampled_from([0, 3])) for q in query_lens]
    padded = draw(st.sampled_from([None, sum(query_lens) + 2]))
    return {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "num_tokens_padded": padded,
        "decode_threshold": draw(some),
    }


def six_right(a: Arguments) -> Tensor:
    query_lens, _ = real_requests(a | {"is_prefilling": None})
    seq_lens, threshold = a["seq_lens"], a["decode_threshold"]
    need_counts(*seq_lens)
    need_counts(threshold, at_least=1)
    need(len(seq_lens) == len(query_lens))
    need(all(s >= q for q, s in zip(query_lens, seq_lens, strict=True)))
    padding = padded_tokens(a, query_lens) - sum(query_lens)
    requests, tokens, part = [0, 0, 0], [0, 0, 0], 0
    for q, s in zip(query_lens, seq_lens, strict=True):
        if q > threshold:
            part = max(part, 2 if q == s else 1)
        requests[part] += 1
        tokens[part] += q
    tokens[max((i for i in range(3) if requests[i]), default=0)] += padding
    return numbers([*requests, *tokens])


# --- a server's dump, a step, a cost


def metadata_arguments(draw: Draw) -> Arguments:
    query_lens = lens(draw)
    starts = [sum(query_lens[:r]) for r in range(len(query_lens) + 1)]
    return {
        "query_start_loc": starts,
        "is_prefilling": flags(draw, len(query_lens)),
        "num_actual_tokens": starts[-1] + draw(small),
        "seq_lens": [q + 2 for q in query_lens],
        "num_reqs": len(query_lens),
    }


def metadata_numbers(**a: Any) -> Tensor:
    batch = batching.read_metadata(a)
    return numbers(
        list(batch.query_lens),
        batch.is_prefilling is None,
        list(batch.is_prefilling or ()),
        batch.num_tokens_padded,
        batch.visible_lens(unknown=50),
    )


def metadata_right(a: Arguments) -> Tensor:
    starts, prefilling, seq_lens = a["query_start_loc"], a["is_prefilling"], a["seq_lens"]
    need_counts(*starts)
    need(bool(starts) and starts[0] == 0)
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    need_counts(*query_lens)
    need_counts(a["num_actual_tokens"])
    need(a["num_actual_tokens"] >= starts[-1])
    need_counts(a["num_reqs"])
    need(a["num_reqs"] == len(query_lens))
    if prefilling is not None:
        need(len(prefilling) == len(query_lens))
        need(all(type(f) in (bool, int) and f in (0, 1) for f in prefilling))
    visible = [50] * sum(query_lens)
    if seq_lens is not None:
        need_counts(*seq_lens)
        need(all(s >= q for q, s in zip(query_lens, seq_lens, strict=True)))
        visible = [
            s - q + j + 1 for q, s in zip(query_lens, seq_lens, strict=True) for j in range(q)
        ]
    return numbers(
        query_lens, prefilling is None, prefilling or [], a["num_actual_tokens"], visible
    )


def step_arguments(draw: Draw) -> Arguments:
    query_lens, size = lens(draw), draw(some)
    computed = [draw(small) for _ in query_lens]
    pages = max((-(-(c + q) // size) for c, q in zip(computed, query_lens, strict=True)), default=0)
    padding = draw(st.sampled_from([0, 2]))
    return {
        "computed_lens": computed,
        "query_lens": query_lens,
        "block_table": ints(draw, 0, 20, len(query_lens), pages),
        "page_size": size,
        "prompt_lens": draw(st.sampled_from([None, [3] * len(query_lens)])),
        "num_reqs_padded": draw(st.sampled_from([None, len(query_lens) + padding])),
        "num_tokens_padded": draw(st.sampled_from([None, sum(query_lens) + padding])),
    }


def step_numbers(**a: Any) -> Tensor:
    step = batching.Step.build(**a)
    prefilling = step.is_prefilling
    return numbers(
        list(step.query_lens),
        step.query_start_loc.tolist(),
        step.seq_lens.tolist(),
        step.positions.tolist(),
        step.visible_lens.tolist(),
        step.request_of_row.tolist(),
        step.slot_mapping.tolist(),
        None if prefilling is None else prefilling.tolist(),
    )


def step_right(a: Arguments) -> Tensor:
    computed, query_lens, size = a["computed_lens"], a["query_lens"], a["page_size"]
    prompts, table = a["prompt_lens"], a["block_table"]
    need_counts(*computed, *query_lens, *(prompts or ()))
    need_counts(size, at_least=1)
    need(table.ndim == 2 and len(table) == len(query_lens) == len(computed))
    rows = [
        (r, p)
        for r, (c, q) in enumerate(zip(computed, query_lens, strict=True))
        for p in range(c, c + q)
    ]
    seqs = [c + q for c, q in zip(computed, query_lens, strict=True)]
    need(all(-(-s // size) <= table.shape[1] for s in seqs))
    pages = [int(table[r, p // size]) for r, p in rows]
    need_counts(*pages)
    slots = [page * size + p % size for page, (_, p) in zip(pages, rows, strict=True)]
    more_reqs, more_rows = (
        0 if a[name] is None else a[name] - real
        for name, real in (("num_reqs_padded", len(seqs)), ("num_tokens_padded", len(rows)))
    )
    need_counts(more_reqs, more_rows)
    prefilling = None
    if prompts is not None:
        prefilling = [c < p for c, p in zip(computed, prompts, strict=True)] + [False] * more_reqs
    ends = [sum(query_lens[: r + 1]) for r in range(len(query_lens))]
    return numbers(
        [*query_lens, *[0] * more_reqs],
        [0, *ends, *[len(rows)] * more_reqs],
        [*seqs, *[0] * more_reqs],
        [p for _, p in rows] + [0] * more_rows,
        [p + 1 for _, p in rows] + [0] * more_rows,
        [r for r, _ in rows] + [-1] * more_rows,
        slots + [-1] * more_rows,
        prefilling,
    )


def cost_arguments(draw: Draw) -> Arguments:
    visible = lens(draw, 9)
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "visible_lens": visible,
        "spec": SPEC,
        "num_rows_padded": draw(st.sampled_from([None, len(visible) + 2])),
        "multiprocessors": draw(some),
        "num_splits": draw(st.sampled_from([None, 3])),
    }


def cost_numbers(**a: Any) -> Tensor:
    cost = batching.kernel_cost(**a)
    return numbers(cost.blocks, cost.num_splits, cost.gathered_bytes)


def cost_right(a: Arguments) -> Tensor:
    need(a["kind"] in KINDS)
    need_counts(*a["visible_lens"])
    rows = len(a["visible_lens"]) if a["num_rows_padded"] is None else a["num_rows_padded"]
    need_counts(rows)
    need(rows >= len(a["visible_lens"]))
    need_counts(a["multiprocessors"], at_least=1)
    splits = 1  # lists of 4 entries are one tile
    if a["num_splits"] is not None:
        need_counts(a["num_splits"], at_least=1)
        splits = a["num_splits"] if a["kind"] == "decode" else 1
    read = sum(min(v, 4) for v in a["visible_lens"]) * 5 * 2
    return numbers(rows * math.ceil(2 / 16) * splits, splits, read)


def verifier_rows_arguments(draw: Draw) -> Arguments:
    query_lens = draw(st.lists(some, max_size=4))
    return {
        "query_lens": query_lens,
        "num_drafts": [draw(st.integers(0, q - 1)) for q in query_lens],
    }


def verifier_rows_numbers(**a: Any) -> Tensor:
    rows = batching.VerifierRows.of(**a)
    return numbers(*(x.tolist() for x in (rows.logits, rows.target, rows.bonus, rows.draft)))


def verifier_rows_right(a: Arguments) -> Tensor:
    need_counts(*a["query_lens"], *a["num_drafts"])
    logits: list[int] = []
    target: list[int] = []
    bonus: list[int] = []
    drafts: list[int] = []
    end = 0
    for q, d in zip(a["query_lens"], a["num_drafts"], strict=True):
        need(d < q)
        end += q
        for row in range(end - 1 - d, end):
            if row < end - 1:
                target.append(len(logits))
                drafts.append(row + 1)
            else:
                bonus.append(len(logits))
            logits.append(row)
    return numbers(logits, target, bonus, drafts)


BATCHING = {
    "batch_facts": Edge(facts_numbers, facts_arguments, facts_right),
    "classify": Edge(
        classified, lambda draw: {"facts": some_facts(draw)} | drafter(draw), classify_right
    ),
    "is_verifier_batch": Edge(
        lambda **a: numbers(batching.is_verifier_batch(**a)),
        lambda draw: {
            name: value
            for name, value in (facts_arguments(draw) | drafter(draw)).items()
            if name != "num_tokens_padded"
        },
        verifier_right,
    ),
    "parse_mode": Edge(
        lambda text: mode_number(str(parse_mode("text", text))),
        lambda draw: {"text": word(draw)},
        lambda a: mode_number(mode_of(a["text"])),
    ),
    "read_mode": Edge(
        lambda mode: mode_number(str(batching.read_mode(mode, {}))),
        lambda draw: {"mode": word(draw)},
        lambda a: mode_number("auto" if a["mode"] is None else mode_of(a["mode"])),
    ),
    "read_max_q": Edge(
        lambda max_q: numbers(batching.read_max_q(max_q, {})),
        lambda draw: {"max_q": draw(some)},
        lambda a: numbers(8 if a["max_q"] is None else max(a["max_q"], 1)),
    ),
    "ServingLimits": Edge(limits_numbers, limits_arguments, limits_right),
    "plan_scratch": Edge(scratch_numbers, scratch_arguments, scratch_right),
    "route": Edge(lambda **a: kinds_of_rows(batching.route(**a)), route_arguments, route_right),
    "route_per_request": Edge(
        lambda **a: kinds_of_rows(batching.route_per_request(**a)),
        route_arguments,
        per_request_right,
    ),
    "attend_along": Edge(batching.attend_along, along_arguments, along_right),
    "request_class": Edge(
        lambda **a: numbers(batching.CLASSES.index(batching.request_class(**a))),
        class_arguments,
        lambda a: numbers(class_of(*a.values())),
    ),
    "reorder_batch": Edge(in_order, reorder_arguments, reorder_right),
    "split_decodes_and_prefills": Edge(split_numbers, split_arguments, split_right),
    "split_decodes_prefills_and_extends": Edge(
        lambda **a: numbers(list(batching.split_decodes_prefills_and_extends(**a))),
        six_arguments,
        six_right,
    ),
    "read_metadata": Edge(metadata_numbers, metadata_arguments, metadata_right),
    "Step.build": Edge(step_numbers, step_arguments, step_right),
    "kernel_cost": Edge(cost_numbers, cost_arguments, cost_right),
    "VerifierRows.of": Edge(verifier_rows_numbers, verifier_rows_arguments, verifier_rows_right),
}

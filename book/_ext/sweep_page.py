"""The tables of whole attention steps and of configurations tried, from kernels/receipts."""

import json
from functools import cache

from page_table import table
from receipts_page import FOLDER, kernels_in_words

PARTS = ("index scores", "top-k", "slots")


@cache
def _newest(kind: str) -> dict:
    """The newest file of a kind, "sweep" or "tune"."""
    path = max((FOLDER / "nvidia-h200" / kind).glob("*.json"))
    return json.loads(path.read_text("utf-8"))


def sweep(env) -> str:
    """A table for each context, and one of prefill chunks."""
    found = _newest("sweep")
    blocks = [_where(found)]
    points = [p for p in found["points"] if p["what"] == "verifier"]
    for context in sorted({p["context"] for p in points}):
        rows = [["requests", "drafts", *PARTS, "decode", "extend"], ["--:"] * 9]
        rows[0] += ["step by decode", "share of decode"]
        for p in (p for p in points if p["context"] == context):
            cells = [p["requests"], p["rows_per_request"] - 1]
            cells += [_us(p["parts"][part]) for part in (*PARTS, "decode", "extend")]
            rows.append([*cells, f"{p['total_s']['decode'] * 1e6:.0f}", _share(p, "decode")])
        blocks += [f"**Verifier rows, {context:,} cached tokens a request**, µs", table(rows)]
    rows = [["cached tokens", "rows", *PARTS, "extend", "step", "share of extend"], ["--:"] * 8]
    for p in (p for p in found["points"] if p["what"] == "prefill"):
        cells = [f"{p['context']:,}", p["rows_per_request"]]
        cells += [_us(p["parts"][part]) for part in (*PARTS, "extend")]
        rows.append([*cells, f"{p['total_s']['extend'] * 1e6:.0f}", _share(p, "extend")])
    return "\n\n".join([*blocks, "**A chunk of a prompt**, µs", table(rows)])


def parts_model(env) -> str:
    """How far off the model of each part is, and what it foretells for two cards."""
    from statistics import median

    from mla_ref.bench.roofline_devices import DEVICES, H200
    from mla_ref.bench.roofline_parts import PARTS as MODELS
    from mla_ref.bench.roofline_parts import hold_part, part_rates

    points = _newest("sweep")["points"]
    cards = [card for card in DEVICES if not card.measured]
    shapes = [
        next(p for p in points if (p["context"], p["requests"], p["rows_per_request"]) == key)
        for key in ((16_384, 1, 4), (131_072, 16, 4))
    ]
    names = [f"{p['requests']} x 4 rows, {p['context']:,} tokens" for p in shapes]
    head = ["part", "a call waits, µs", "median error", "largest error"]
    head += [f"{name}: {who}" for name in names for who in ("H200", *(c.name for c in cards))]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for part in MODELS:
        rates = part_rates(points, part, H200)
        errors = [abs(h.error) for h in hold_part(points, part, H200) if not h.calibrates]
        cells = [part.name, f"{rates.step_s * 1e6:.1f}"]
        cells += [f"{median(errors):.0%}", f"{max(errors):.0%}"]
        for point in shapes:
            cells.append(_us(point["parts"][part.name]))
            for card in cards:
                cells.append(f"*{rates.on(card, H200).expected_s(point, card) * 1e6:.1f}*")
        rows.append(cells)
    return table(rows)


def tuned(env) -> str:
    """For each shape the fastest configuration, the next one, and the plan's own choice."""
    found = _newest("tune")
    rows = [["heads", "rows", "tried", "fastest", "µs", "the plan's choice", "µs"], ["--:"] * 7]
    shapes = dict.fromkeys((t["heads"], t["rows"]) for t in found["trials"])
    for heads, count in shapes:
        here = [t for t in found["trials"] if (t["heads"], t["rows"]) == (heads, count)]
        timed = sorted((t for t in here if t["median_s"]), key=lambda t: t["median_s"])
        own = next(t for t in timed if t["chosen"])
        cells = [heads, count, len(here)]
        for trial in (timed[0], own):
            cells += [f"`{trial['config']}`", f"{trial['median_s'] * 1e6:.1f}"]
        rows.append(cells)
    return f"{_where(found)}\n\n{table(rows)}"


def _where(found: dict) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"*{found['backend']} on {machine['device']}, driver {machine['state']['driver']}; "
        f"{versions}.* {kernels_in_words(found['backend'], found['kernel_hash'])}"
    )


def _us(part: dict) -> str:
    return f"{part['median_s'] * 1e6:.1f}" if "median_s" in part else ""


def _share(point: dict, kind: str) -> str:
    return f"{point['shares'][kind][kind]:.0%}"


FUNCTIONS = (sweep, parts_model, tuned)

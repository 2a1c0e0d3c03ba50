"""What `mla-ref plan` found, as a page for a terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_ref.batching import (
    REASONS,
    TRUTH_TABLE,
    KernelCost,
    OriginalAnswer,
    Route,
    ScratchPlan,
    ServerBatch,
    SpecMode,
)

COLOURS = {"decode": "green", "extend": "yellow", "mixed": "cyan"}


@dataclass(frozen=True)
class Diagnosis:
    """One batch on one server.

    Attributes:
        batch: The batch.
        plan: The server's buffers.
        backend: Whose they are.
        route: Of the whole batch.
        per_request: Of each request by itself.
        original: The pull request's answer, if it was asked for.
        costs: Of extend and of decode.
    """

    batch: ServerBatch
    plan: ScratchPlan
    backend: str
    route: Route
    per_request: Route
    original: OriginalAnswer | None
    costs: tuple[KernelCost, ...]

    @property
    def kind(self) -> str:
        """The answer that was asked for."""
        return self.route.kind if self.original is None else self.original.kind

    def to_json(self) -> dict[str, Any]:
        """As plain data; keys are added in later versions, never renamed."""
        return {
            "kind": self.kind,
            "server": _server_json(self.plan),
            "plan": _plan_json(self.plan, self.backend),
            "batch": {
                "query_lens": self.batch.query_lens,
                "is_prefilling": self.batch.is_prefilling,
                "num_reqs": self.batch.facts.num_reqs,
                "num_tokens": self.batch.facts.num_tokens,
                "num_tokens_padded": self.batch.num_tokens_padded,
            },
            "route": _route_json(self.route),
            "per_request": _route_json(self.per_request),
            "original": None if self.original is None else self.original._asdict(),
            "costs": [{**asdict(c), "moved_bytes": c.moved_bytes} for c in self.costs],
        }


def capacity_json(plans: Sequence[ScratchPlan], backend: str) -> dict[str, Any]:
    """What the buffers hold in each mode, and the table of routes."""
    return {
        "plans": [{**_server_json(p), **_plan_json(p, backend)} for p in plans],
        "routes": [
            {
                "name": kind.name,
                "num_speculative_tokens": kind.num_speculative_tokens,
                "query_lens": kind.query_lens,
                "is_prefilling": kind.flags,
                "num_tokens_padded": kind.facts.num_tokens_padded,
                "routes": {str(mode): list(way) for mode, way in kind.routes.items()},
            }
            for kind in TRUTH_TABLE
        ],
        "reasons": dict(REASONS),
    }


def show_capacity(plans: Sequence[ScratchPlan], backend: str, heads: int, topk: int) -> None:
    """Print what the buffers hold in each mode, and where each kind of batch goes."""
    console = Console(highlight=False)
    limits = plans[0].limits
    console.print(
        f"Buffers for {limits.max_num_seqs:,} requests and {limits.max_num_batched_tokens:,} "
        f"tokens a step, {limits.num_speculative_tokens} drafts a request, max_q {limits.max_q}; "
        f"backend {escape(backend)}, {heads} heads, top-k {topk:,}.\n"
    )
    table = _table("mode", ">rows a request", ">decode rows", ">bytes", ">extend rows", ">bytes")
    for plan in plans:
        table.add_row(
            str(plan.mode),
            f"{plan.rows_per_request:,}",
            f"{plan.decode_rows:,}",
            _bytes(plan.decode.nbytes),
            f"{plan.extend_rows:,}",
            _bytes(plan.extend.nbytes),
        )
    console.print(table)
    console.print("\nWhere a batch goes (p: prefilling, ?: not told), with n = 3 and max_q = 8.\n")
    table = _table("batch", "tokens", "mode auto", "", "mode 0", "mode 1")
    for kind in TRUTH_TABLE:
        way, reason = kind.routes[SpecMode.AUTO]
        others = [kind.routes[mode][0] for mode in (SpecMode.OFF, SpecMode.FORCED)]
        auto, off, forced = (f"[{COLOURS[w]}]{w}[/]" for w in (way, *others))
        table.add_row(kind.name, _tokens(kind.query_lens, kind.flags), auto, reason, off, forced)
    console.print(table)
    console.print()
    grid = Table.grid(padding=(0, 2))
    for code, meaning in REASONS.items():
        grid.add_row(f"[dim]{code}[/]", meaning)
    console.print(grid)


def show_diagnosis(found: Diagnosis) -> None:
    """Print the route, why, what would change it, what is planned and what it costs."""
    console = Console(highlight=False)
    way = found.route
    if found.original is not None:
        _show_original(found, console)
    else:
        console.print(f"[bold {COLOURS[way.kind]}]{way.kind}[/] ({way.reason}): {way.text}.")
    if way.remedy is not None:
        console.print(f"For decode: {way.remedy.text}")
    elif way.kind != "decode":
        console.print("No single change would give decode.")
    if found.per_request.kind != way.kind:
        console.print(f"Each request by itself: {_segments(found.per_request)}.")
    plan, limits, facts = found.plan, found.plan.limits, found.batch.facts
    spec = plan.spec
    padded = facts.num_tokens_padded - facts.num_tokens
    lines = {
        "batch": f"{_many(facts.num_reqs, 'request')}, {_many(facts.num_tokens, 'row')}"
        + (f" and {padded:,} of padding" if padded else "")
        + f": {_tokens(found.batch.query_lens, found.batch.is_prefilling)}",
        "server": f"{limits.max_num_seqs:,} requests, {limits.max_num_batched_tokens:,} tokens, "
        f"{limits.num_speculative_tokens} drafts, max_q {limits.max_q}, mode {plan.mode}",
        "buffers": f"decode {plan.decode_rows:,} rows ({_bytes(plan.decode.nbytes)}), "
        f"extend {plan.extend_rows:,} rows ({_bytes(plan.extend.nbytes)})",
        "layer": f"{spec.num_heads} heads, top-k {spec.topk:,}, {spec.cache_format} rows; "
        f"backend {escape(found.backend)}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        grid.add_row(f"[dim]{name}[/]", line)
    console.print()
    console.print(grid)
    console.print()
    sms = found.costs[0].multiprocessors
    table = _table("", ">splits", ">blocks", f">of {sms} SMs", ">cache", ">q and out", ">partials")
    for cost in found.costs:
        mark = "[bold]" if cost.kind == found.kind else ""
        table.add_row(
            f"{mark}{cost.kind}",
            f"{mark}{cost.num_splits}",
            f"{mark}{cost.blocks:,}",
            f"{mark}{100 * cost.busy:.0f}%",
            f"{mark}{_bytes(cost.gathered_bytes)}",
            f"{mark}{_bytes(cost.query_bytes + cost.output_bytes)}",
            f"{mark}{_bytes(cost.partial_bytes)}",
        )
    console.print(table)
    console.print(
        "[dim]Counted for one layer, not measured: SMs that have a block, and bytes asked for"
        f"{'' if found.batch.seq_lens else ' if each row has a full list'}.[/]"
    )


def _show_original(found: Diagnosis, console: Console) -> None:
    answer, ours = found.original, found.route
    if answer is None:
        return
    facts = f"is_spec_decode {answer.is_spec_decode}, use_spec {answer.use_spec}"
    console.print(f"[bold {COLOURS[answer.kind]}]{answer.kind}[/] in the original: {facts}.")
    differs = "too" if answer.kind == ours.kind else "instead"
    console.print(f"mla-ref: {ours.kind} {differs} ({ours.reason}): {ours.text}.")
    flags = found.batch.is_prefilling or ()
    if any(f and q == 0 for f, q in zip(flags, found.batch.query_lens, strict=False)):
        console.print(
            "A request without a token is flagged as prefilling, which the original counts "
            "(vllm#41841): clear the flags behind the real requests."
        )


def _segments(way: Route) -> str:
    """Rows of each segment: "rows 0 to 7 decode, 8 to 11 extend"."""
    parts = [
        f"{s.row_start:,} to {s.row_end - 1:,} {s.kind}"
        if s.row_end > s.row_start + 1
        else f"{s.row_start:,} {s.kind}"
        for s in way.segments
    ]
    return f"rows {', '.join(parts[:6])}" + (", ..." if len(parts) > 6 else "")


def _tokens(lens: Sequence[int], flags: Sequence[bool] | None) -> str:
    """Lengths with a p at those that are prefilling; runs of equals are counted."""
    marks = [
        f"{q}{'p' if flags is not None and flags[r] else '' if flags is not None else '?'}"
        for r, q in enumerate(lens)
    ]
    if len(marks) > 8 and len(set(marks)) == 1:
        return f"{len(marks)} x {marks[0]}"
    return ",".join(marks[:12]) + (",..." if len(marks) > 12 else "")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _table(*headings: str) -> Table:
    """Columns that fit 80 characters; a heading with > is right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(
            heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left"
        )
    return table


def _bytes(count: int) -> str:
    """Three digits and a decimal unit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def _server_json(plan: ScratchPlan) -> dict[str, Any]:
    return {**asdict(plan.limits), "mode": str(plan.mode)}


def _plan_json(plan: ScratchPlan, backend: str) -> dict[str, Any]:
    return {
        "backend": backend,
        "rows_per_request": plan.rows_per_request,
        "decode_rows": plan.decode_rows,
        "decode_bytes": plan.decode.nbytes,
        "extend_rows": plan.extend_rows,
        "extend_bytes": plan.extend.nbytes,
    }


def _route_json(way: Route) -> dict[str, Any]:
    return {
        "kind": way.kind,
        "segments": [segment._asdict() for segment in way.segments],
        "reason": way.reason,
        "text": way.text,
        "blame": way.blame,
        "remedy": None if way.remedy is None else asdict(way.remedy),
        "reasons": way.reasons,
    }

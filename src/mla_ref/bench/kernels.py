"""Sparse MLA kernels and their peers on the same work: times, floors and ratios.

At each point the backend's decode and extend stand beside every peer that runs here. A kernel that
is wrong at the very shape gets no time (`kernel_check`), and neither does a peer. What decode gains
over extend depends on how good the extend is; so decode in one split, the same kernel without
splitting, is timed as well. On the verifier workload a backend that can read what the rows of a
request list once for all of them (a method `plan_union`) is timed in this way too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from mla_ref.bench.ceilings import Ceilings
from mla_ref.bench.kernel_check import SAMPLE, KernelCheck, Read
from mla_ref.bench.kernel_timer import KernelTimer
from mla_ref.bench.kernel_workload import (
    ROWS_PER_REQUEST,
    SOFTMAX_SCALE,
    VERIFIER,
    KernelShape,
    KernelWorkload,
)
from mla_ref.bench.peers import Peer
from mla_ref.bench.timer import Contender
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.numerics import AttentionResult, to_natural_lse
from mla_ref.testing import Adapter

DECODE, EXTEND, ONE_SPLIT = "decode", "extend", "decode in 1 split"
UNION = "decode by union"


@dataclass(frozen=True)
class KernelLine:
    """One contender at one point.

    Attributes:
        name: "decode", "extend", "decode in 1 split", "decode by union", or the peer's.
        own: Whether it is the backend's.
        outcome: Its time, or why there is none.
        how: In which of a peer's ways it was the fastest.
        timed: What the time holds and leaves out.
        note: What must be known of a peer's adapter.
        tried: Median seconds of all of a peer's ways; None for one that gave none.
    """

    name: str
    own: bool
    outcome: Timing | NoTime
    how: str = ""
    timed: str = ""
    note: str = ""
    tried: tuple[tuple[str, float | None], ...] = ()

    @property
    def seconds(self) -> float | None:
        """The median; None without a time."""
        return self.outcome.median_s if isinstance(self.outcome, Timing) else None

    @property
    def wrong(self) -> bool:
        """Whether it ran and its result was wrong."""
        return isinstance(self.outcome, NoTime) and self.outcome.wrong


@dataclass(frozen=True)
class KernelPoint:
    """All contenders on one workload.

    Attributes:
        workload: "disjoint" or "verifier".
        shape: Its sizes.
        overlap: Of a verifier workload.
        unique_bytes: Bytes of the cached rows that are named, each once.
        gathered_bytes: The same, as often as they are named.
        floor_s: See `KernelWorkload.floor_s`.
        checked_rows: Rows that each result was judged on.
        lines: The backend's own first.
    """

    workload: str
    shape: KernelShape
    overlap: float
    unique_bytes: int
    gathered_bytes: int
    floor_s: float
    checked_rows: int
    lines: tuple[KernelLine, ...]

    def seconds(self, name: str) -> float | None:
        """The time of a contender; None where it has none."""
        return next((line.seconds for line in self.lines if line.name == name), None)

    def ratio(self, line: KernelLine) -> float | None:
        """Time of a contender over that of the backend's decode: above 1, decode is faster."""
        own = self.seconds(DECODE)
        return line.seconds / own if line.seconds and own else None

    def to_json(self) -> dict[str, Any]:
        """The point as a JSON object, rates and shares included."""
        lines = []
        for line in self.lines:
            seconds = line.seconds
            lines.append(
                {
                    "name": line.name,
                    "own": line.own,
                    "how": line.how,
                    "timed": line.timed,
                    "note": line.note,
                    "median_s": seconds,
                    "gathered_bytes_s": self.gathered_bytes / seconds if seconds else None,
                    "flops_s": self.shape.flops / seconds if seconds else None,
                    "share_of_floor": self.floor_s / seconds if seconds else None,
                    "times_decode": self.ratio(line),
                    "tried": dict(line.tried),
                    "outcome": line.outcome.to_json(),
                }
            )
        return {
            "workload": self.workload,
            **asdict(self.shape),
            "overlap": self.overlap,
            "unique_bytes": self.unique_bytes,
            "gathered_bytes": self.gathered_bytes,
            "flops": self.shape.flops,
            "floor_s": self.floor_s,
            "checked_rows": self.checked_rows,
            "lines": lines,
        }


def measure_kernels(
    adapter: Adapter,
    workloads: Iterator[KernelWorkload],
    timer: KernelTimer,
    ceilings: Ceilings,
    peers: Sequence[Peer] = (),
    *,
    sample: int = SAMPLE,
) -> Iterator[KernelPoint]:
    """Measure each workload as it comes.

    Args:
        adapter: What is measured; see `mla_ref.testing.load_target`.
        workloads: From `make_workload`.
        timer: See `kernel_timer`.
        ceilings: Of this machine.
        peers: Whom to compare with.
        sample: Rows of each result that are judged.
    """
    for workload in workloads:
        check = KernelCheck(workload, sample)
        entries = [*_own(adapter, workload, check), *_of_peers(peers, workload, check)]
        ready = [entry.contender for entry in entries if entry.contender is not None]
        outcomes = iter(timer.race(ready))
        for entry in entries:
            if entry.contender is not None:
                entry.line = replace(entry.line, outcome=next(outcomes))
        yield KernelPoint(
            workload=workload.name,
            shape=workload.shape,
            overlap=workload.overlap,
            unique_bytes=workload.unique_bytes,
            gathered_bytes=workload.gathered_bytes,
            floor_s=workload.floor_s(ceilings),
            checked_rows=len(check.rows),
            lines=tuple(_fastest(entries)),
        )


@dataclass
class _Entry:
    """A line in the making: its contender if it can run."""

    line: KernelLine
    contender: Contender[Any] | None = None


def _own(adapter: Adapter, workload: KernelWorkload, check: KernelCheck) -> Iterator[_Entry]:
    """The backend's ways, or what a plain function does."""
    maths = getattr(adapter.backend, "maths", adapter.maths)
    right = check.by_precision_rule(maths, _in_our_convention(adapter))
    for kind in (DECODE, EXTEND):
        if kind not in adapter.kinds:
            continue
        function, plan, refusal = _function(adapter, kind, workload)
        calls = [(kind, function)]
        if kind == DECODE and plan is not None and (one := at_one_split(plan)) is not None:
            calls.append((ONE_SPLIT, one.decode))
        for name, call in calls:
            line = KernelLine(name, True, NoTime(name, refusal or ""))
            yield _Entry(line, None if refusal else _contender(name, call, workload, right))
        if kind == DECODE and plan is not None and _has_union(adapter, workload):
            yield _by_union(adapter, workload, right)


def _function(adapter: Adapter, kind: str, workload: KernelWorkload) -> tuple[Any, Any, str | None]:
    """What to call, the plan behind it if there is one, and why it cannot be called."""
    own = getattr(adapter, kind)
    if own is not None or adapter.backend is None:
        return own, None, None
    spec, device = workload.shape.spec, workload.q.device
    if reason := adapter.backend.supports(spec, device):
        return None, None, reason
    rows = workload.shape.rows
    plan = adapter.backend.plan(
        spec, max_rows=rows, max_requests=rows, device=device, kinds=(kind,)
    )
    return getattr(plan, kind), plan, None


def at_one_split(plan: Any) -> Any:
    """The same plan with one split; None where it has one already, or does not say."""
    splits, partials = getattr(plan, "num_splits", 1), getattr(plan, "partials", None)
    if splits < 2 or not isinstance(partials, AttentionResult):
        return None
    first = AttentionResult(partials.out[:1], partials.lse[:1])
    return replace(plan, num_splits=1, partials=first)


def _has_union(adapter: Adapter, workload: KernelWorkload) -> bool:
    """Whether the backend has a kernel for the union of the lists of a request's rows."""
    made = getattr(adapter.backend, "plan_union", None) is not None
    return made and workload.name == VERIFIER and workload.shape.cache_format == "fp8"


def _by_union(adapter: Adapter, workload: KernelWorkload, right: Any) -> _Entry:
    """Decode by that kernel, or why it is not offered here: on SM12x it does not fit."""
    shape, backend = workload.shape, cast("Any", adapter.backend)
    line = KernelLine(UNION, True, NoTime(UNION, ""))
    try:
        plan = backend.plan_union(
            shape.spec,
            max_rows=shape.rows,
            max_requests=shape.rows // ROWS_PER_REQUEST,
            device=workload.q.device,
            request_rows=ROWS_PER_REQUEST,
        )
    except ValueError as error:
        return _Entry(replace(line, outcome=NoTime(UNION, str(error))))
    return _Entry(line, _contender(UNION, plan.decode, workload, right))


def _contender(name: str, call: Any, workload: KernelWorkload, check: Any) -> Contender[Any]:
    def run() -> Any:
        return call(workload.q, workload.kv_cache, workload.indices, softmax_scale=SOFTMAX_SCALE)

    return Contender(f"{name}, {workload.name}, {workload.shape}", run, check)


def _in_our_convention(adapter: Adapter) -> Read:
    def read(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = result
        return out, to_natural_lse(lse, base=adapter.lse_base, empty=adapter.empty_lse)

    return read


def _of_peers(
    peers: Sequence[Peer], workload: KernelWorkload, check: KernelCheck
) -> Iterator[_Entry]:
    for peer in peers:
        line = KernelLine(peer.name, False, NoTime(peer.name, ""), timed=peer.timed, note=peer.note)
        if reason := peer.missing(workload):
            yield _Entry(replace(line, outcome=NoTime(peer.name, reason)))
            continue
        try:
            ways = peer.ways(workload)
        except Exception as error:  # another library's set-up may raise anything
            yield _Entry(replace(line, outcome=NoTime.failure(peer.name, error)))
            continue
        for way in ways:
            right = (
                check.by_precision_rule("bfloat16", way.read)
                if peer.tolerance is None
                else check.by_tolerance(peer.tolerance, way.read)
            )
            name = f"{peer.name} ({way.how})" if way.how else peer.name
            contender = Contender(f"{name}, {workload.name}, {workload.shape}", way.run, right)
            yield _Entry(replace(line, how=way.how), contender)


def _fastest(entries: Sequence[_Entry]) -> Iterator[KernelLine]:
    """One line a contender: of a peer's ways the fastest, with what the others took."""
    for name in dict.fromkeys(entry.line.name for entry in entries):
        ways = [entry.line for entry in entries if entry.line.name == name]
        best = min(ways, key=lambda line: (line.seconds is None, line.seconds or 0.0))
        yield replace(best, tried=tuple((w.how, w.seconds) for w in ways if w.how))

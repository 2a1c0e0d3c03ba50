"""Single parts beside their peers: a merge of two partial results, index scores of one request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.bench.gate import Agreement, Verdict
from mla_ref.bench.kernel_step import INDEX_DIM, INDEX_HEADS
from mla_ref.bench.kernel_timer import KernelTimer
from mla_ref.bench.peers.parts import DeepGemmScores, VllmMerge
from mla_ref.bench.step_checks import SCORES_REL_L2, merged_like
from mla_ref.bench.timer import Contender
from mla_ref.bench.timing import NoTime, Timing, in_words
from mla_ref.indexer import index_scores
from mla_ref.numerics import AttentionResult, compare, merge_many
from mla_ref.testing import Adapter

# Both operands are rounded to FP8, which costs 1 % of the scores of normal numbers.
FP8_REL_L2 = 0.05


@dataclass(frozen=True)
class PartLine:
    """One part by one implementation.

    Attributes:
        part: Which part, with its sizes.
        name: Whose: the backend's, "torch" or the peer's.
        outcome: Its time, or why there is none.
    """

    part: str
    name: str
    outcome: Timing | NoTime

    @property
    def seconds(self) -> float | None:
        """The median; None without a time."""
        return self.outcome.median_s if isinstance(self.outcome, Timing) else None

    def __str__(self) -> str:
        words = str(getattr(self.outcome, "why", ""))
        return f"{self.part}, {self.name}: {in_words(self.seconds) if self.seconds else words}"

    def to_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {
            "part": self.part,
            "name": self.name,
            "median_s": self.seconds,
            "outcome": self.outcome.to_json(),
        }


def measure_parts(
    adapter: Adapter,
    timer: KernelTimer,
    device: torch.device,
    *,
    rows: int,
    heads: int,
    keys: int,
    merge_peer: VllmMerge | None = None,
    scores_peer: DeepGemmScores | None = None,
) -> Iterator[PartLine]:
    """A merge of two parts and the index scores of 4 rows, each by all who have it.

    Args:
        adapter: Its parts; torch's where it has none.
        timer: See `kernel_timer`.
        device: Where.
        rows: Of the merge.
        heads: Of the merge.
        keys: Of the index scores.
        merge_peer: None: vLLM's.
        scores_peer: None: DeepGEMM's.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    parts = AttentionResult(normal(2, rows, heads, 512), normal(2, rows, heads))
    q, k = (normal(*n).to(torch.bfloat16) for n in ((4, INDEX_HEADS, INDEX_DIM), (keys, INDEX_DIM)))
    weights = normal(4, INDEX_HEADS).abs()
    own = adapter.backend.parts if adapter.backend is not None else {}
    owner = {True: adapter.backend.name if adapter.backend else "", False: "torch"}
    merge, score = own.get("merge", merge_many), own.get("index_scores", index_scores)
    vllm, gemm = merge_peer or VllmMerge(), scores_peer or DeepGemmScores()
    merged, scored = merged_like(parts), _scores(q, k, weights, SCORES_REL_L2)
    yield from _race(
        timer,
        f"merge of 2 parts, {rows} rows, {heads} heads",
        [(owner["merge" in own], lambda: merge(*parts, validate=False), merged)],
        (vllm.name, vllm.missing(device), lambda: vllm.call(*parts), merged),
    )
    yield from _race(
        timer,
        f"index scores of 4 rows over {keys:,} keys",
        [(owner["index_scores" in own], lambda: score(q, k, weights), scored)],
        (
            gemm.name,
            gemm.missing(device),
            lambda: gemm.call(q, k, weights),
            _scores(q, k, weights, FP8_REL_L2),
        ),
    )


def _race(
    timer: KernelTimer,
    part: str,
    ours: Sequence[tuple[str, Callable[[], Any], Any]],
    peer: tuple[str, str | None, Callable[[], Callable[[], Any]], Any],
) -> Iterator[PartLine]:
    """The backend's and the peer's, in turn."""
    contenders = [Contender(f"{part}, {name}", run, check) for name, run, check in ours]
    names = [name for name, _, _ in ours]
    peer_name, reason, make, check = peer
    if reason is None:
        try:
            contenders.append(Contender(f"{part}, {peer_name}", make(), check))
            names.append(peer_name)
        except Exception as error:  # another library's set-up may raise anything
            reason = NoTime.failure(peer_name, error).why
    for name, outcome in zip(names, timer.race(contenders), strict=True):
        yield PartLine(part, name, outcome)
    if reason is not None:
        yield PartLine(part, peer_name, NoTime(peer_name, reason))


def _scores(
    q: Tensor, k: Tensor, weights: Tensor, rel_l2: float
) -> Callable[[Any], Sequence[Verdict]]:
    expected = index_scores(q.cpu().double(), k.cpu().double(), weights.cpu().double())

    def check(result: Any) -> Sequence[Verdict]:
        largest = float(expected.abs().max())
        return [Agreement("scores", compare(result.cpu(), expected), rel_l2, largest)]

    return check

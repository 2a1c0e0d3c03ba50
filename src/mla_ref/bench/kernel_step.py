"""One attention step of a verifier batch, part by part: index scores, top-k, slots, attention.

Each part is the backend's own where it has one, and torch's otherwise, which is said. Every request
has a context of its own. The index queries of its rows have 0.95 of their square in common, and
their weights all: four lists of 2,048 of 16,384 keys then have 0.62 in common and name 1.45 lists
of different keys, much as neighbouring rows of a real model do (`verifier_overlap`: 0.65 and 1.41).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.bench.kernel_check import KernelCheck
from mla_ref.bench.kernel_workload import (
    PAGE_SIZE,
    Q_SIZE,
    ROW,
    SOFTMAX_SCALE,
    VERIFIER,
    KernelShape,
    KernelWorkload,
)
from mla_ref.bench.step_checks import exactly, merged_like, scores_like
from mla_ref.bench.timer import Contender
from mla_ref.indexer import index_scores, positions_to_slots, select_topk
from mla_ref.numerics import AttentionResult, merge_many
from mla_ref.testing import Adapter

INDEX_HEADS, INDEX_DIM = 64, 128
IN_COMMON = 0.95
SCORES, TOPK, CONVERT, MERGE = "index scores", "top-k", "slots", "merge"
TWINS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    SCORES: ("index_scores", index_scores),
    TOPK: ("topk", select_topk),
    CONVERT: ("convert", positions_to_slots),
    MERGE: ("merge", merge_many),
}


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step.

    Attributes:
        context: Cached tokens of each request, the step's own included.
        requests: Concurrent requests.
        rows_per_request: 1 + drafts of a verifier batch; the chunk of a prefill.
        heads: Query heads.
        topk: Keys that a row attends to at most.
    """

    context: int
    requests: int
    rows_per_request: int
    heads: int = 8
    topk: int = 2048

    def __post_init__(self) -> None:
        """Raise a ValueError where the cache would not hold the step's own tokens."""
        if self.context < self.rows_per_request:
            raise ValueError(
                f"context must hold the step's own {self.rows_per_request} tokens, got "
                f"{self.context}"
            )

    @property
    def rows(self) -> int:
        """Query rows of the batch."""
        return self.requests * self.rows_per_request

    @property
    def pages(self) -> int:
        """Pages of the cache that the requests take."""
        return self.requests * -(-self.context // PAGE_SIZE)

    @property
    def index_key_bytes(self) -> int:
        """Bytes of the index keys, in bfloat16."""
        return self.requests * self.context * INDEX_DIM * 2


@dataclass(frozen=True)
class StepBatch:
    """A step's tensors and what each part must give.

    Attributes:
        shape: Sizes.
        kv_cache: Pages; those of the requests lie in a random order.
        index_q: [rows, 64, 128] bfloat16.
        index_k: [requests, context, 128] bfloat16.
        weights: [rows, 64] float32.
        visible_lens: Causal length of each row.
        request_of_row: Which request each row belongs to.
        block_table: Pages of each request.
        q: Attention queries.
    """

    shape: StepShape
    kv_cache: Shaped[Tensor, "pages page_size row"]
    index_q: Float[Tensor, "rows index_heads d_i"]
    index_k: Float[Tensor, "requests context d_i"]
    weights: Float[Tensor, "rows index_heads"]
    visible_lens: Int[Tensor, " rows"]
    request_of_row: Int[Tensor, " rows"]
    block_table: Int[Tensor, "requests max_pages"]
    q: Float[Tensor, "rows h 576"]

    @classmethod
    def random(
        cls, shape: StepShape, kv_cache: Shaped[Tensor, "pages page_size row"], *, seed: int = 0
    ) -> "StepBatch":
        """Make a batch over a cache that has enough pages."""
        if shape.pages > kv_cache.shape[0]:
            raise ValueError(
                f"kv_cache has {kv_cache.shape[0]} pages, the requests take {shape.pages}"
            )
        device = kv_cache.device
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        requests, each = shape.requests, shape.rows_per_request
        common, own = (
            normal(requests, 1, INDEX_HEADS, INDEX_DIM),
            normal(requests, each, INDEX_HEADS, INDEX_DIM),
        )
        index_q = (IN_COMMON**0.5 * common + (1 - IN_COMMON) ** 0.5 * own).flatten(0, 1)
        index_k = torch.empty(
            requests, shape.context, INDEX_DIM, dtype=torch.bfloat16, device=device
        )
        for keys in index_k:
            keys.copy_(normal(shape.context, INDEX_DIM))
        weights = normal(requests, INDEX_HEADS).abs() * INDEX_HEADS**-0.5 * INDEX_DIM**-0.5
        pages = torch.randperm(kv_cache.shape[0], generator=generator, device=device)
        last = torch.arange(shape.context - each, shape.context, device=device)
        return cls(
            shape=shape,
            kv_cache=kv_cache,
            index_q=index_q.to(torch.bfloat16),
            index_k=index_k,
            weights=weights.repeat_interleave(each, dim=0),
            visible_lens=(last + 1).repeat(requests).to(torch.int32),
            request_of_row=torch.arange(requests, device=device)
            .repeat_interleave(each)
            .to(torch.int32),
            block_table=pages[: shape.pages].view(requests, -1).to(torch.int32),
            q=(Q_SIZE * normal(shape.rows, shape.heads, ROW)).to(torch.bfloat16),
        )

    def scores(self, part: Callable[..., Any]) -> Tensor:
        """Index scores of all rows, one call a request: each has keys of its own."""
        each = self.shape.rows_per_request
        return torch.cat(
            [
                part(self.index_q[first : first + each], keys, self.weights[first : first + each])
                for first, keys in zip(range(0, self.shape.rows, each), self.index_k, strict=True)
            ]
        )

    def workload(self, indices: Int[Tensor, "rows topk"]) -> KernelWorkload:
        """The attention's part of the step over the lists that were chosen."""
        shape = KernelShape(self.shape.rows, self.shape.heads, indices.shape[1])
        valid = indices[indices >= 0]
        return KernelWorkload(
            VERIFIER, shape, self.q, self.kv_cache, indices, 0.0, len(valid.unique())
        )


def step_contenders(
    adapter: Adapter, batch: StepBatch, kinds: Sequence[str] = ("decode", "extend")
) -> tuple[list[Contender[Any]], tuple[str, ...]]:
    """The parts of a step, ready to be timed, and which of them are torch's.

    The parts run once here, in order, to give each the input that it has in a step: the twins' own,
    so that a wrong part is caught where it stands and not by what comes after it.

    Args:
        adapter: With a backend.
        batch: The step.
        kinds: Ways of the attention.
    """
    if adapter.backend is None:
        raise ValueError("a step needs a backend, this is a plain function")
    own = {name: adapter.backend.parts.get(key) for name, (key, _) in TWINS.items()}
    parts = {name: own[name] or twin for name, (_, twin) in TWINS.items()}
    scores = batch.scores(index_scores)
    positions = select_topk(scores, batch.visible_lens, batch.shape.topk)
    slots = positions_to_slots(positions, batch.request_of_row, batch.block_table, PAGE_SIZE)
    work = batch.workload(slots)

    contenders = [
        Contender(SCORES, lambda: batch.scores(parts[SCORES]), scores_like(batch)),
        Contender(
            TOPK,
            lambda: parts[TOPK](scores, batch.visible_lens, batch.shape.topk),
            exactly(TOPK, positions),
        ),
        Contender(
            CONVERT,
            lambda: parts[CONVERT](positions, batch.request_of_row, batch.block_table, PAGE_SIZE),
            exactly(CONVERT, slots),
        ),
    ]
    right = KernelCheck(work).by_precision_rule(getattr(adapter.backend, "maths", adapter.maths))
    partials: AttentionResult | None = None
    for kind in kinds:
        plan = adapter.backend.plan(
            work.shape.spec,
            max_rows=work.shape.rows,
            max_requests=batch.shape.requests,
            device=work.q.device,
            kinds=(kind,),
        )
        contenders.append(Contender(kind, _attention(plan, kind, work), right))
        if kind == "decode" and getattr(plan, "num_splits", 1) > 1:
            shape = (plan.num_splits, work.shape.rows, work.shape.heads)  # type: ignore[attr-defined]
            partials = _random_partials(shape, work.q.device)
    if partials is not None:
        given = partials
        contenders.append(
            Contender(
                MERGE,
                lambda: parts[MERGE](*given, validate=False),
                merged_like(given),
            )
        )
    return contenders, tuple(name for name in TWINS if own[name] is None)


def _attention(plan: Any, kind: str, work: KernelWorkload) -> Callable[[], Any]:
    run = getattr(plan, kind)
    return lambda: run(work.q, work.kv_cache, work.indices, softmax_scale=SOFTMAX_SCALE)


def _random_partials(shape: tuple[int, int, int], device: torch.device) -> AttentionResult:
    generator = torch.Generator(device).manual_seed(0)
    out = torch.randn(*shape, 512, generator=generator, device=device)
    return AttentionResult(out, torch.randn(shape, generator=generator, device=device))

"""Recorded steps. On a CPU the recorded function runs again on the same buffers: all is the same
but the recording, so what is stale in a buffer or wrong in a key shows here.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.serving import (
    CONTEXT,
    MOST_NEW,
    KnowingDrafter,
    parts_of,
    plain_answer,
    plain_tokens,
    prompt,
    serve,
    small_model,
)

from mla_ref.backends import TorchBackend
from mla_ref.batching import ServingLimits, Step
from mla_ref.engine import Engine, GraphSizes, Request, StaticStep, StepGraphs
from mla_ref.models.smollm2_ranks import DCPSmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.numerics import compare
from mla_ref.speculative import Draft

PAGE, CPU = 4, torch.device("cpu")
WIDTH = CONTEXT // PAGE
LIMITS = ServingLimits(4, 32, 3)


def some_requests(*numbers: int, new: int) -> list[Request]:
    return [Request(str(i), prompt(n), new) for i, n in enumerate(numbers)]


@pytest.mark.parametrize(
    ("kind", "mode"), [("packed", "auto"), ("sparse", "auto"), ("sparse", "0")]
)
def test_tokens_are_those_of_plain_decoding_whoever_gives_way(kind: str, mode: str) -> None:
    """Drafts, some of them wrong; pages for two of three requests; NaN where nobody owns a page."""
    requests = some_requests(2, 3, 5, new=10)
    texts = [(*r.prompt_ids, *plain_tokens(kind, r.prompt_ids, MOST_NEW)) for r in requests]
    engine = Engine(
        small_model(kind),
        drafter=KnowingDrafter(texts, wrong=0.3),
        num_drafts=3,
        mode=mode,
        max_num_seqs=3,
        num_pages=9,
        page_size=PAGE,
        graphs=True,
    )
    states = serve(engine, requests, [0, 0, 2])
    for request, state in zip(requests, states, strict=True):
        assert (state.output_ids, state.finish_reason) == plain_answer(kind, request)
    assert any(record.preempted for record in engine.timeline)
    kinds = [record.graph for record in engine.timeline]
    assert kinds.count("recorded") == len(engine.runner.graphs.recorded)
    assert kinds.count("replayed") > 3
    for record in engine.timeline:
        assert (record.graph is None) == bool(record.num_prefill_tokens)


def test_without_graphs_nothing_is_recorded_or_padded() -> None:
    engine = Engine(small_model("sparse"), num_drafts=0, page_size=PAGE)
    engine.run(some_requests(1, 4, new=3))
    assert engine.runner.graphs is None
    assert all(r.graph is None and r.num_tokens == r.num_tokens_padded for r in engine.timeline)


class Decoding:
    """A model with a filled cache of some requests, and the steps that come next."""

    def __init__(self, kind: str, mode: str = "auto", model: Any = None) -> None:
        self.model = model or small_model(kind)
        self.cache = self.model.new_cache(4 * WIDTH, PAGE, limits=LIMITS, mode=mode)
        order = torch.randperm(4 * WIDTH, generator=torch.Generator().manual_seed(3))
        self.tables = order.view(4, WIDTH)
        for part in parts_of(self.cache):
            part.fill_(math.nan)
        self.graphs = StepGraphs(
            self.model, self.cache, limits=LIMITS, max_pages=WIDTH, page_size=PAGE
        )
        self.fill(range(4), [28] * 4)

    def fill(self, requests: Any, lens: list[int]) -> None:
        for request, length in zip(requests, lens, strict=True):
            for first in range(0, length, 30):
                new = min(30, length - first)
                step = Step.build(
                    [first], [new], self.tables[[request]], PAGE, prompt_lens=[length]
                )
                self.model.forward(torch.arange(new), step, self.cache)

    def step(self, requests: list[int], computed: list[int], new: list[int]) -> Step:
        """Padded to the size of a graph; its table is no wider than it must be."""
        reqs, tokens = GraphSizes(LIMITS).padded(new)
        width = -(-max(c + n for c, n in zip(computed, new, strict=True)) // PAGE)
        return Step.build(
            computed,
            new,
            self.tables[requests, :width],
            PAGE,
            prompt_lens=[1] * len(new),
            num_reqs_padded=reqs,
            num_tokens_padded=tokens,
        )

    def both(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The real rows, replayed and then run on a copy of the cache as it was before."""
        ids = (torch.arange(step.num_tokens_padded) * 7) % 50
        before = [part.clone() for part in parts_of(self.cache)]
        route = self.model.route(step, self.cache)
        replayed = self.graphs.forward(ids, step, route)[: step.num_tokens].clone()
        after = [part.clone() for part in parts_of(self.cache)]
        for part, old in zip(parts_of(self.cache), before, strict=True):
            part.copy_(old)
        run = self.model.forward(ids, step, self.cache, route=route)[: step.num_tokens]
        for part, replays in zip(parts_of(self.cache), after, strict=True):
            assert compare(replays, part).agrees(rel_l2=1e-12)
        return replayed, run


@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_B008_a_smaller_batch_after_a_larger_one_in_the_same_buffers(kind: str) -> None:
    """What the larger one has left is poisoned as well: only what is written may be read."""
    decoding = Decoding(kind)
    sizes = []
    for requests, computed, new in (
        ([0, 1, 2, 3], [20, 24, 28, 9], [4, 4, 4, 4]),
        ([3, 1, 2], [5, 6, 28], [1, 3, 2]),
        ([2, 0, 1, 3], [1, 28, 2, 3], [1, 1, 1, 4]),
        ([1, 0, 2], [28, 27, 26], [4, 1, 4]),
    ):
        step = decoding.step(requests, computed, new)
        sizes.append((step.num_reqs_padded, step.num_tokens_padded))
        replayed, run = decoding.both(step)
        assert compare(replayed, run).agrees(rel_l2=1e-12)
        for buffers in decoding.graphs._buffers.values():
            buffers._flat.fill_(10**6)
    assert set(sizes) == {(4, 16)} and len(decoding.graphs.recorded) == 1


def test_B011_a_graph_of_a_short_context_serves_the_longest() -> None:
    decoding = Decoding("sparse")
    decoding.fill([0], [CONTEXT - 4])
    for length in (1, 2, 17, CONTEXT - 4):
        replayed, run = decoding.both(decoding.step([0], [length], [4]))
        assert compare(replayed, run).agrees(rel_l2=1e-12)
    assert len(decoding.graphs.recorded) == 1


def test_B013_buffers_are_made_once() -> None:
    decoding = Decoding("sparse")
    found = set()
    for computed in ([8], [28], [3]):
        decoding.both(decoding.step([1], computed, [2]))
        (buffers,) = decoding.graphs._buffers.values()
        (recorded,) = decoding.graphs.recorded.values()
        tensors = (*buffers.step.on_device, buffers.token_ids, recorded.output)
        found.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_B016_a_batch_of_nobody_runs_and_writes_nothing(kind: str) -> None:
    decoding = Decoding(kind)
    before = [part.clone() for part in parts_of(decoding.cache)]
    static, nobody = StaticStep(4, 16, WIDTH, PAGE, CPU), decoding.step([0], [0], [4])
    route = decoding.model.route(nobody, decoding.cache)
    if route is not None:
        whole = route.segments[0]._replace(row_end=16, req_end=4)
        route = replace(route, segments=(whole,), num_reqs_padded=4, num_tokens_padded=16)
    hidden = decoding.model.forward(static.token_ids, static.step, decoding.cache, route=route)
    assert hidden.isfinite().all()
    for part, old in zip(parts_of(decoding.cache), before, strict=True):
        assert compare(part, old).agrees(rel_l2=0.0)


def test_B018_a_size_never_holds_more_requests_than_the_server() -> None:
    sizes = GraphSizes(ServingLimits(100, 1000, 2))
    assert sizes.padded([3] * 65) == (100, 300)
    assert sizes.padded([1, 2] * 32) == (64, 192)
    assert sizes.padded([2]) == (1, 3)
    for runs_as_it_is in ([], [4], [1] * 101, [1, 4]):
        assert sizes.padded(runs_as_it_is) is None
    assert GraphSizes(ServingLimits(8, 16, 3)).padded([2] * 5) is None  # 8 * 4 rows of 16


def test_where_nobody_has_a_draft_there_is_no_room_for_drafts() -> None:
    sizes = GraphSizes(ServingLimits(8, 256, 3))
    assert sizes.padded([1] * 3) == (4, 4) and sizes.padded([1, 1, 2]) == (4, 16)
    assert GraphSizes(ServingLimits(100, 1000, 2)).padded([1] * 65) == (100, 100)


@pytest.mark.parametrize(
    ("mode", "verifier"), [("auto", ("decode", "verifier")), ("0", ("extend", "mode-off"))]
)
def test_single_tokens_go_to_decode_in_every_mode(mode: str, verifier: tuple[str, str]) -> None:
    """Mode 0 plans one row a request: with room for drafts they would be more than are planned."""
    requests = some_requests(2, 3, 5, new=8)
    texts = [(*r.prompt_ids, *plain_tokens("sparse", r.prompt_ids, MOST_NEW)) for r in requests]

    class Sometimes(KnowingDrafter):
        """Every second call proposes nothing."""

        def propose(self, requests: Any, *args: Any) -> Any:
            drafts = super().propose(requests, *args)
            return drafts if len(self.calls) % 2 else [Draft([]) for _ in requests]

    engine = Engine(
        small_model("sparse"),
        drafter=Sometimes(texts, wrong=0.5),
        num_drafts=3,
        mode=mode,
        page_size=PAGE,
        graphs=True,
    )
    states = serve(engine, requests, [0, 0, 0])
    for request, state in zip(requests, states, strict=True):
        assert state.output_ids == plain_tokens("sparse", request.prompt_ids, 8)
    found = {False: set(), True: set()}
    for record in engine.timeline:
        if not record.num_prefill_tokens:
            assert record.graph is not None
            rows = record.num_tokens_padded // (1 << (record.num_reqs - 1).bit_length())
            found[record.num_tokens > record.num_reqs].add((record.route, record.reason, rows))
    assert found == {False: {("decode", "single-token", 1)}, True: {(*verifier, 4)}}


@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_steps_with_drafts_and_without_have_graphs_of_their_own(kind: str) -> None:
    decoding = Decoding(kind)
    for computed, new in (([20, 9], [4, 1]), ([20, 9], [1, 1]), ([5, 6], [1, 3]), ([1, 2], [1, 1])):
        replayed, run = decoding.both(decoding.step([0, 2], computed, new))
        assert compare(replayed, run).agrees(rel_l2=1e-12)
    assert {size for size, _ in decoding.graphs.recorded} == {(2, 8), (2, 2)}
    assert len(decoding.graphs.recorded) == 2


def test_padding_of_the_buffers_is_neutral() -> None:
    static = StaticStep(4, 16, WIDTH, PAGE, CPU)
    static._flat.fill_(7)
    static.fill(Decoding("packed").step([1, 0, 2], [5, 0, 2], [2, 1, 1]), torch.arange(16))
    step = static.step
    assert step.query_start_loc.tolist() == [0, 2, 3, 4, 4]
    assert step.seq_lens.tolist() == [7, 1, 3, 0]
    assert step.block_table[:, 2:].eq(-1).all() and step.block_table[3].eq(-1).all()
    for name, value in (("slot_mapping", -1), ("request_of_row", -1), ("visible_lens", 0)):
        assert (
            getattr(step, name)[4:].eq(value).all() and not getattr(step, name)[:4].eq(value).any()
        )
    assert static.token_ids.tolist() == list(range(16))


@dataclass(frozen=True)
class Listening(TorchBackend):
    """Notes which kernel runs."""

    heard: list[str] = field(default_factory=list)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().plan(*args, **kwargs)
        for kind in ("decode", "extend"):
            noted = partial(self._note, kind, getattr(plan, kind))
            object.__setattr__(plan, kind, noted)
        return plan

    def _note(self, kind: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.heard.append(kind)
        return call(*args, **kwargs)


def test_each_route_has_a_graph_of_its_own() -> None:
    """A replay repeats the branch that was recorded: with sizes alone as the key, the wrong one."""
    plain = small_model("sparse")
    backend = Listening()
    model = SparseSmolLM2(
        plain.dense,
        plain.indexers,
        attention=plain.attention,
        backend=backend,
        cache_format="fp32",
    )
    decoding = Decoding("sparse", model=model)
    step, ids = decoding.step([0], [20], [3]), torch.arange(4)
    routes = {"decode": model.route(step, decoding.cache)}
    mode_off = model.new_cache(4 * WIDTH, PAGE, limits=LIMITS, mode="0")
    routes["extend"] = model.route(step, mode_off)
    outputs = []
    for kind in ("decode", "extend", "decode", "extend"):
        assert routes[kind].kind == kind
        outputs.append(decoding.graphs.forward(ids, step, routes[kind])[:3].clone())
        backend.heard.clear()
        decoding.graphs.forward(ids, step, routes[kind])
        assert set(backend.heard) == {kind}
    assert len(decoding.graphs.recorded) == 2
    for output in outputs:
        assert compare(output, outputs[0]).agrees(rel_l2=1e-12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_reqs_padded": 2}, "num_reqs_padded 4, got 2"),
        ({"num_tokens_padded": 15}, "num_tokens_padded 16, got 15"),
        ({"page_size": 8}, "page_size 4, got 8"),
        ({"block_table": torch.zeros(1, WIDTH + 1, dtype=torch.int64)}, "at most 16 pages"),
    ],
)
def test_a_step_of_another_size_is_refused(changed: dict[str, Any], message: str) -> None:
    fields = {
        "block_table": torch.tensor([[0, 1]]),
        "page_size": PAGE,
        "num_reqs_padded": 4,
        "num_tokens_padded": 16,
    } | changed
    step = Step.build([3], [2], **fields)
    with pytest.raises(ValueError, match=message):
        StaticStep(4, 16, WIDTH, PAGE, CPU).fill(step, torch.zeros(16, dtype=torch.int64))


def test_a_model_that_cannot_be_captured_is_refused_before_it_runs() -> None:
    sparse = small_model("sparse")
    dense = small_model("packed")
    for model in (
        small_model("gqa"),
        dense.with_attention("packed", "expanded"),
        dense.with_attention("split", "expanded"),
        DCPSmolLM2(sparse, rank=0, world=1),
    ):
        assert not model.captures
        with pytest.raises(ValueError, match="graphs must be False for a model that reads lengths"):
            Engine(model, page_size=PAGE, graphs=True)
        Engine(model, page_size=PAGE)
    for model in (sparse, dense, dense.with_attention("split")):
        assert model.captures
        Engine(model, page_size=PAGE, graphs=True).run(some_requests(1, new=2))


def test_whoever_captures_it_all_the_same_is_told_what_is_missing() -> None:
    """What `captures` says of these models is so."""
    for model in (small_model("gqa"), small_model("packed").with_attention("packed", "expanded")):
        cache = model.new_cache(WIDTH, PAGE, limits=LIMITS)
        graphs = StepGraphs(model, cache, limits=LIMITS, max_pages=WIDTH, page_size=PAGE)
        step = Step.build([3], [1], torch.tensor([[0]]), PAGE, prompt_lens=[1], num_reqs_padded=1)
        with pytest.raises(ValueError, match="step must have its batch on the host"):
            graphs.forward(torch.zeros(1, dtype=torch.int64), step, model.route(step, cache))

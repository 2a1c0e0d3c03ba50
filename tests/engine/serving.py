"""What the tests of the engine share: small models, a drafter that knows the answer, poison."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_ref.cache import slot_mapping
from mla_ref.engine import Batch, Engine, Request, RequestState, Status, generate
from mla_ref.layers import IndexerConfig, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.speculative import Draft, DraftRequest

VOCAB, CONTEXT, MOST_NEW = 60, 64, 16
KINDS = ("packed", "gqa", "sparse")


@cache
def small_model(kind: str) -> LanguageModel:
    """Random weights in float64, so that rounding swaps no two tokens."""
    if kind != "sparse":
        config = SmolLM2Config(num_layers=2, vocab_size=VOCAB, context_length=CONTEXT)
        return with_own_head(SmolLM2.random(config, 5, attention=kind, dtype=torch.float64))
    config = SmolLM2Config(
        num_layers=2,
        hidden_size=48,
        num_heads=3,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=32,
        vocab_size=VOCAB,
        context_length=CONTEXT,
    )
    attention = replace(
        preset("smollm2-packed"),
        hidden_size=48,
        num_layers=2,
        num_heads=3,
        indexer=IndexerConfig(4, (0,), topk=6, rope_interleaved=True),
    )
    dense = SmolLM2.random(config, 5, dtype=torch.float64)
    indexers = {0: IndexerLayer.random(attention, 0, torch.float64)}
    model = SparseSmolLM2(dense, indexers, attention=attention, cache_format="fp32")
    return with_own_head(model)


def with_own_head(model: Any) -> Any:
    """With the embedding as its head, a random model says the same token again and again."""
    generator = torch.Generator().manual_seed(7)
    shape = (model.config.vocab_size, model.config.hidden_size)
    head = torch.randn(shape, generator=generator, dtype=torch.float64)
    model.logits = lambda hidden: hidden @ head.T / 4
    return model


@cache
def _all_plain_tokens(kind: str, prompt_ids: tuple[int, ...]) -> list[int]:
    return list(generate(small_model(kind), prompt_ids, max_new_tokens=MOST_NEW, page_size=16))


def plain_tokens(kind: str, prompt_ids: tuple[int, ...], new: int) -> list[int]:
    """Greedy decoding of one request, one token a step; "packed" must say what "gqa" says."""
    return _all_plain_tokens("gqa" if kind == "packed" else kind, prompt_ids)[:new]


def plain_answer(kind: str, request: Request) -> tuple[list[int], str]:
    """The same, ended as the request asks for; and why it ends."""
    tokens = plain_tokens(kind, tuple(request.prompt_ids), request.max_new_tokens)
    for count, token_id in enumerate(tokens, 1):
        if token_id == request.eos_id:
            return tokens[:count], "eos"
        if token_id in request.stop_ids:
            return tokens[:count], "stop"
    return tokens, "length"


def prompt(number: int) -> tuple[int, ...]:
    """One of a few prompts of 1 to 20 tokens, so that each is decoded plainly once."""
    rng = random.Random(number)
    return tuple(rng.randrange(VOCAB) for _ in range((1, 3, 20, 8, 2, 13, 5)[number % 7]))


@dataclass
class KnowingDrafter:
    """Proposes the true continuation, each token of it spoiled with some probability.

    With a script, call number i proposes script[i] right tokens and wrong ones behind them.

    It has a cache of one number a slot and writes there as an MTP module does: the rows that the
    target has validated, then one row further for each draft but the last. In every call the rows
    of all computed tokens must be there, so it notices a row that it was never shown, a row of a
    rejected draft, a page that is missing and one that somebody else writes to.
    """

    texts: Sequence[Sequence[int]]
    model: LanguageModel | None = None
    wrong: float = 0.0
    seed: int = 0
    script: Sequence[int] | None = None
    name: str = "knowing"
    calls: list[list[DraftRequest]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def new_cache(self, num_pages: int, page_size: int) -> Tensor:
        return torch.full((num_pages, page_size), -1)

    def propose(
        self,
        requests: Sequence[DraftRequest],
        hidden: Tensor,
        block_table: Tensor,
        page_size: int,
        cache: Any,
    ) -> list[Draft]:
        self.calls.append(list(requests))
        return [self._one(r, hidden, block_table, page_size, cache) for r in requests]

    def _one(
        self, request: DraftRequest, hidden: Tensor, table: Tensor, page_size: int, cache: Tensor
    ) -> Draft:
        ids, done, rows = request.token_ids, request.computed_len, request.num_rows
        pages = table[request.block_table_row : request.block_table_row + 1]

        def slots(first: int, end: int) -> Tensor:
            starts, lens = torch.tensor([0, end - first]), torch.tensor([end])
            return slot_mapping(pages, starts, lens, page_size)

        flat = cache.view(-1)
        flat[slots(done - rows, done)] = torch.tensor(ids[done - rows + 1 : done + 1])
        assert flat[slots(0, done)].tolist() == list(ids[1 : done + 1])
        if self.model is not None and request.num_drafts:
            last = hidden[request.first_row + rows - 1]
            assert int(self.model.logits(last[None]).argmax()) == ids[-1]
        if not request.num_drafts:
            return Draft([])
        text = next(t for t in self.texts if tuple(t[: len(ids)]) == tuple(ids))
        drafts = [*text[len(ids) :], *[0] * request.num_drafts][: request.num_drafts]
        if self.script is not None:
            right = self.script[(len(self.calls) - 1) % len(self.script)]
            drafts[right:] = [(t + 1) % VOCAB for t in drafts[right:]]
        drafts = [(t + 1) % VOCAB if self.rng.random() < self.wrong else t for t in drafts]
        flat[slots(done, done + len(drafts) - 1)] = torch.tensor(drafts[:-1], dtype=torch.int64)
        return Draft(drafts)


def parts_of(state: Any) -> list[Tensor]:
    """Every tensor of a cache with its pages in front."""
    if isinstance(state, Tensor):
        return [state.transpose(0, 1) if state.ndim == 4 else state.transpose(0, 2)]
    return [p for c in state.caches for p in (c.kv, c.index) if p is not None]


def poison_free_pages(engine: Engine) -> None:
    """Fill the cache with NaN now, and each page again when it is given back."""
    blocks, parts = engine.scheduler.blocks, parts_of(engine.runner.cache)
    for part in parts:
        part.fill_(math.nan)
    free = blocks.free

    def free_and_poison(pages: Sequence[int]) -> None:
        for part in parts:
            part[list(pages)] = math.nan
        if engine.runner.draft_cache is not None:
            engine.runner.draft_cache[list(pages)] = -1
        free(pages)

    blocks.free = free_and_poison  # type: ignore[method-assign]


def watch_batches(engine: Engine) -> list[Batch]:
    """A list that every batch of the engine will be put into, once its flags are looked at."""
    seen: list[Batch] = []
    execute = engine.runner.execute

    def watched(batch: Batch, watch: Any) -> Any:
        assert batch.step.is_prefilling is not None
        flags = batch.step.is_prefilling.tolist()
        assert flags[: len(batch.items)] == [item.state.is_prefilling for item in batch.items]
        assert not any(flags[len(batch.items) :])
        for item in batch.items:
            assert item.num_tokens > 0
            assert not (item.drafts and item.state.is_prefilling)
            assert item.state.is_prefilling or item.num_tokens == 1 + len(item.drafts)
        seen.append(batch)
        return execute(batch, watch)

    engine.runner.execute = watched  # type: ignore[method-assign]
    return seen


def require_order(engine: Engine) -> None:
    """What holds between any two steps."""
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    owned = [page for state in scheduler.running for page in state.pages]
    assert len(set(owned)) == len(owned) == blocks.num_pages - blocks.num_free
    assert all(0 <= page < blocks.num_pages for page in owned)
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs
    for state in scheduler.waiting:
        assert state.status == Status.WAITING
        assert state.pages == [] and state.num_computed == 0 and state.drafts == ()
    for state in scheduler.running:
        assert state.status == Status.RUNNING and state.finish_reason is None
        assert state.num_computed < state.num_tokens
        assert state.num_computed <= len(state.pages) * blocks.page_size
        assert len(state.drafts) <= state.max_drafts
    arrivals = [s.request.request_id for s in (*scheduler.running, *scheduler.waiting)]
    assert arrivals == sorted(arrivals, key=int)


def serve(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int]) -> list[Any]:
    """Add each request before the step of its arrival, step to the end, look after every step."""
    poison_free_pages(engine)
    batches = watch_batches(engine)
    states: list[RequestState] = []
    heard: dict[str, list[int]] = {}
    limits = engine.scheduler.limits
    for number in range(3000):
        while len(states) < len(requests) and arrivals[len(states)] <= number:
            states.append(engine.add(requests[len(states)]))
        outputs = engine.step()
        require_order(engine)
        if engine.timeline and outputs:
            record = engine.timeline[-1]
            assert 0 < record.num_tokens <= record.num_tokens_padded
            assert record.num_tokens_padded <= limits.max_num_batched_tokens
            assert len(outputs) == record.num_reqs <= limits.max_num_seqs
        for output in outputs:
            heard.setdefault(output.request_id, []).extend(output.token_ids)
        assert outputs or not engine.requests
        if len(states) == len(requests) and not engine.requests:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    assert len(batches) == len(engine.timeline)
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_pages
    assert [heard[s.request.request_id] for s in states] == [s.output_ids for s in states]
    return states

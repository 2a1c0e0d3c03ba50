"""SmolLM2 with sparse attention: it is SmolLM2 where a list covers all, and its own where not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_ref.batching import Route, Segment, ServingLimits, Step
from mla_ref.engine import generate
from mla_ref.layers import IndexerConfig, MLAConfig, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2, load_indexers
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import compare

PAGE = 16


def small_attention(model: SmolLM2, topk: int) -> MLAConfig:
    """The packed form of a model with 3 KV heads of 64: the served row of 576 numbers."""
    config = model.config
    return replace(
        preset("smollm2-packed"),
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        indexer=IndexerConfig(4, (0, 1), topk=topk, rope_interleaved=True),
    )


@pytest.fixture(scope="module")
def small() -> SmolLM2:
    config = SmolLM2Config(
        num_layers=4,
        hidden_size=48,
        num_heads=3,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=32,
        vocab_size=50,
        context_length=128,
    )
    return SmolLM2.random(config, dtype=torch.float64)


def sparse(small: SmolLM2, topk: int, **kwargs: object) -> SparseSmolLM2:
    attention = small_attention(small, topk)
    indexers = {layer: IndexerLayer.random(attention, layer, torch.float64) for layer in (0, 1)}
    return SparseSmolLM2(small, indexers, attention=attention, **kwargs)


def all_to(kind: str, step: Step) -> Route:
    """A route that no rule would give: every row of a step to one kernel."""
    rows, reqs = step.num_tokens_padded, step.num_reqs_padded
    segment = Segment(0, rows, 0, reqs, kind)
    return Route((segment,), "forced", "a test's wish", None, None, (), reqs, rows)


def logits_of(
    model: object, token_ids: Tensor, chunks: list[int], kind: str | None = None
) -> Tensor:
    cache = model.new_cache(-(-len(token_ids) // PAGE), PAGE)
    done, parts = 0, []
    for chunk in chunks:
        step = Step.one_request(done, chunk, PAGE)
        route = None if kind is None else all_to(kind, step)
        hidden = model.forward(token_ids[done : done + chunk], step, cache, route=route)
        parts.append(model.logits(hidden))
        done += chunk
    return torch.cat(parts)


def test_lists_that_cover_all_give_the_dense_model(small, plain_calls) -> None:
    ids = torch.randint(0, 50, (40,))
    dense = logits_of(small, ids, [40])
    full = logits_of(sparse(small, 40, cache_format="fp32"), ids, [40])
    # Rows are stored in float32 here.
    assert compare(full, dense).agrees(rel_l2=1e-6)
    few = logits_of(sparse(small, 4, cache_format="fp32"), ids, [40])
    assert compare(few[:4], dense[:4]).agrees(rel_l2=1e-6)
    assert compare(few, dense).rel_l2 > 1e-2


@pytest.mark.parametrize("cache_format", ["fp32", "fp8"])
def test_chunks_tokens_and_routes_agree(small, plain_calls, cache_format) -> None:
    ids = torch.randint(0, 50, (40,))
    model = sparse(small, 8, cache_format=cache_format)
    at_once = logits_of(model, ids, [40], "extend")
    for chunks, kind in (([17, 19, 4], "extend"), ([17, 19, 4], "decode"), ([36] + [1] * 4, None)):
        assert compare(logits_of(model, ids, chunks, kind), at_once).agrees(rel_l2=1e-9)


def test_a_cache_is_planned_for_the_server_and_the_batch_is_routed(small, plain_calls) -> None:
    """The verifier's rows go where the mode says, and give the same."""
    model, ids = sparse(small, 8, cache_format="fp32"), torch.randint(0, 50, (20,))
    limits = ServingLimits(2, 32, 3)
    hidden, reasons = [], []
    for mode in ("auto", "0", None):
        cache = model.new_cache(2, PAGE, limits=limits, mode=mode)
        assert cache.scratch.limits == limits
        model.forward(ids[:16], Step.one_request(0, 16, PAGE), cache)
        step = Step.build([16], [4], torch.arange(2)[None], PAGE, prompt_lens=[16])
        route = model.route(step, cache)
        reasons.append((route.kind, route.reason))
        hidden.append(model.forward(ids[16:], step, cache, route=route))
        assert torch.equal(model.forward(ids[16:], step, cache), hidden[-1])
    assert reasons == [("decode", "verifier"), ("extend", "mode-off"), ("decode", "verifier")]
    assert compare(hidden[1], hidden[0]).agrees(rel_l2=1e-9)
    mixed = Step.build([16, 0], [4, 5], torch.tensor([[0, 1], [1, 0]]), PAGE, prompt_lens=[16, 5])
    assert model.route(mixed, cache).kind == "extend"
    assert model.route(mixed, cache, per_request=True).kind == "mixed"


def test_layers_without_an_indexer_use_the_list_before_them(small, plain_calls) -> None:
    ids, selected = torch.randint(0, 50, (20,)), []
    model = sparse(small, 8)
    cache, step = model.new_cache(2, PAGE), Step.one_request(0, 20, PAGE)
    hidden = model.forward(ids, step, cache, selected=selected)
    assert len(selected) == 4
    assert torch.equal(selected[1], selected[2]) and torch.equal(selected[1], selected[3])
    assert not torch.equal(selected[0], selected[1])
    # Looking changes nothing.
    assert torch.equal(hidden, model.forward(ids, step, model.new_cache(2, PAGE)))
    assert [c.index is None for c in cache.caches] == [False, False, True, True]


def test_a_step_beyond_the_plan_is_refused(small, plain_calls) -> None:
    model = sparse(small, 8, max_rows=4)
    with pytest.raises(ValueError, match="step has 5 rows, but max_num_batched_tokens is 4"):
        model.forward(torch.arange(5), Step.one_request(0, 5, PAGE), model.new_cache(1, PAGE))


def test_the_parts_must_fit(small) -> None:
    attention = small_attention(small, 8)
    one = {0: IndexerLayer.random(attention, 0, torch.float64)}
    with pytest.raises(ValueError, match=r"indexers must be those of layers \(0, 1\), got \(0,\)"):
        SparseSmolLM2(small, one, attention=attention)
    with pytest.raises(ValueError, match="attention must have an indexer"):
        SparseSmolLM2(small, one, attention=replace(attention, indexer=None))
    with pytest.raises(ValueError, match="cache_format must be one of fp8, fp32, got 'int4'"):
        sparse(small, 8, cache_format="int4")


def test_generate_runs_it_and_tokens_do_not_depend_on_the_chunk(small, plain_calls) -> None:
    model = sparse(small, 8, cache_format="fp32")
    prompt = list(range(20))
    whole, pieces = (
        list(generate(model, prompt, max_new_tokens=6, chunk_size=size)) for size in (20, 3)
    )
    assert whole == pieces


def test_the_indexers_of_this_package_load_without_the_model() -> None:
    indexers = load_indexers(preset("smollm2-packed"))
    assert tuple(indexers) == (0, 1, 2, 6, 10, 14, 18, 22, 26)
    for indexer in indexers.values():
        assert indexer.weights_proj.weight.dtype == torch.float32
        assert all(p.isfinite().all() for p in indexer.parameters())
        assert not any(p.requires_grad for p in indexer.parameters())


@pytest.mark.model
def test_the_real_model_with_64_of_160_keys_is_close_to_itself(plain_calls) -> None:
    dense = SmolLM2.from_gguf(attention="gqa")
    ids = torch.tensor(Tokenizer.from_gguf().encode(passage()))[:160]
    expected = logits_of(dense, ids, [160])
    model = SparseSmolLM2.trained(dense, topk=64, cache_format="fp8")
    actual = logits_of(model, ids, [160])
    late = slice(128, None)  # rows that leave out half of their keys at least
    log_p, log_q = expected[late].log_softmax(-1), actual[late].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    # Far below what a wrong choice gives: random keys are off by nats, not by hundredths.
    assert kl < 0.06 and agreement > 0.85

"""The served recipe: the same numbers as the layer classes, and what each part is seen to do."""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support import raw

from mla_ref.layers import IndexerConfig, OnlineMXFP8Linear, W4A16Linear, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.mtp import MTPModule
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_served import (
    ATTENTION,
    FEED_FORWARD,
    MXFP8Projections,
    MXFP8SmolLM2,
    served_weights,
    through_mxfp8,
)
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import compare
from mla_ref.speculative import NgramDrafter
from mla_ref.speculative.mtp_drafter import MTPDrafter
from mla_ref.validation import recipe as recipe_module
from mla_ref.validation.recipe import (
    PLAIN,
    RECIPES,
    SERVED,
    RecipeRow,
    measure_recipes,
    text_logits,
    trunk_of,
)

pytestmark = pytest.mark.thorough

# Widths of whole groups of 16 and 32, and heads as the packed form of 656 bytes needs them.
CONFIG = SmolLM2Config(
    num_layers=2,
    hidden_size=64,
    num_heads=3,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=96,
    vocab_size=60,
    context_length=64,
)
TEXT = [(7 * i * i + i) % 60 for i in range(30)]
PROMPTS = {"p": TEXT[:9]}


@cache
def small() -> SmolLM2:
    return SmolLM2.random(CONFIG, 3, attention="gqa")


def make_sparse(dense: SmolLM2, *, topk: int, cache_format: str) -> SparseSmolLM2:
    """In place of the trained indexers, which fit the real model alone."""
    attention = replace(
        preset("smollm2-packed"),
        hidden_size=64,
        num_layers=2,
        num_heads=3,
        indexer=IndexerConfig(4, (0,), topk=topk, rope_interleaved=True),
    )
    indexers = {0: IndexerLayer.random(attention, 0)}
    return SparseSmolLM2(dense, indexers, attention=attention, cache_format=cache_format)


@cache
def rows() -> tuple[RecipeRow, ...]:
    return tuple(
        measure_recipes(
            small(),
            NgramDrafter(3),
            TEXT,
            PROMPTS,
            score_from=8,
            topk=6,
            tokens=6,
            make_sparse=make_sparse,
        )
    )


def test_weights_are_those_of_the_layer_classes() -> None:
    weights = small().weights
    served = served_weights(weights)
    for before, after in zip(weights.layers, served.layers, strict=True):
        for names, kind in ((FEED_FORWARD, W4A16Linear), (ATTENTION, OnlineMXFP8Linear)):
            for name in names:
                expected = kind.from_weight(getattr(before, name)).dequantised_weight()
                assert torch.equal(getattr(after, name), expected)
                assert not torch.equal(expected, getattr(before, name))
        assert after.attn_norm is before.attn_norm and after.ffn_norm is before.ffn_norm
    assert served.embedding is weights.embedding and served.output_norm is weights.output_norm
    half = served_weights(weights, nvfp4=False)
    assert half.layers[0].ffn_up is weights.layers[0].ffn_up
    assert torch.equal(half.layers[0].attn_q, served.layers[0].attn_q)
    assert served_weights(weights, nvfp4=False, mxfp8=False) == weights


def test_mxfp8_projections_are_online_mxfp8_layers() -> None:
    plain = small()
    layer = MXFP8SmolLM2(served_weights(plain.weights), attention="gqa").layers[0]
    assert isinstance(layer.gqa, MXFP8Projections)
    weights = plain.weights.layers[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator)
    heads = torch.randn(5, 3, 64, generator=generator)
    for found, given, weight in (
        (layer.gqa.values(x).flatten(1), x, weights.attn_v),
        (layer.gqa.output(heads), heads.flatten(1), weights.attn_output),
    ):
        expected = OnlineMXFP8Linear.from_weight(weight)(given)
        assert compare(found, expected).agrees(rel_l2=1e-6)
        # With activations as they are it would be another number: the test can fail.
        weight_only = given @ OnlineMXFP8Linear.from_weight(weight).dequantised_weight().T
        assert not compare(weight_only, expected).agrees(rel_l2=1e-3)


def test_every_view_of_a_served_layer_quantises_its_activations() -> None:
    """Packed, split and gqa are one model still, and `with_attention` does not lose the format."""
    served = MXFP8SmolLM2(served_weights(small().weights), attention="gqa")
    ids = torch.tensor(TEXT)
    expected = text_logits(served, ids, 0)
    for attention in ("packed", "split"):
        other = served.with_attention(attention)
        assert isinstance(other, MXFP8SmolLM2)
        assert compare(text_logits(other, ids, 0), expected).agrees(rel_l2=1e-2)
    lost = SmolLM2(served.weights, attention="gqa")
    assert not compare(text_logits(lost, ids, 0), expected).agrees(rel_l2=1e-2)


def test_a_token_is_rounded_by_itself() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([through_mxfp8(row[None]) for row in x])
    assert torch.equal(through_mxfp8(x), alone)
    assert through_mxfp8(x.bfloat16()).dtype == torch.bfloat16


def test_each_recipe_is_measured_against_plain() -> None:
    found = rows()
    assert [row.recipe for row in found] == list(RECIPES)
    plain, *others = found
    assert plain.kl == 0 and plain.top1 == 1 and plain.tokens == len(TEXT) - 9
    ids = torch.tensor(TEXT)
    expected = torch.nn.functional.cross_entropy(text_logits(small(), ids, 8), ids[9:])
    assert plain.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    for row in others:
        assert row.kl > 0 and row.finite and row.acceptance.drafted > 0
    by_name = {row.recipe.name: row for row in found}
    # Each part moves the logits, and 4 bits of weight more than 8 bits of cache.
    assert by_name["FP8 cache"].kl < by_name["NVFP4 feed-forward"].kl
    assert by_name["sparse"].kl > 1e-4, "lists of 6 keys leave most out"
    assert json.dumps([row.to_json() for row in found], allow_nan=False)


def test_a_recipe_with_all_keys_and_a_plain_cache_is_plain() -> None:
    """What sparse attention costs is what it leaves out: with lists of everything it is nothing."""
    (row,) = measure_recipes(
        small(),
        NgramDrafter(3),
        TEXT,
        PROMPTS,
        score_from=8,
        recipes=[replace(PLAIN, name="all keys", sparse=True)],
        topk=len(TEXT),
        tokens=4,
        make_sparse=make_sparse,
    )
    assert row.kl < 1e-9 and row.top1 == 1


def test_nan_in_a_format_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(recipe: Any, dense: SmolLM2) -> SmolLM2:
        weights = served_weights(dense.weights)
        weights.layers[1].ffn_up[3, 5] = torch.nan
        return SmolLM2(weights, attention="gqa")

    monkeypatch.setattr(recipe_module, "trunk_of", spoilt)
    (row,) = measure_recipes(
        small(),
        NgramDrafter(3),
        TEXT,
        PROMPTS,
        score_from=8,
        recipes=[RECIPES[1]],
        tokens=2,
    )
    assert not row.finite
    assert row.to_json()["perplexity"] is None


def test_only_the_parts_that_are_asked_for_are_on() -> None:
    plain = small()
    assert trunk_of(PLAIN, plain) is plain
    assert type(trunk_of(RECIPES[1], plain)) is SmolLM2
    served = trunk_of(SERVED, plain)
    assert isinstance(served, MXFP8SmolLM2) and served.attention == "gqa"


def test_bad_input_is_named() -> None:
    def measure(**changed: Any) -> Any:
        wanted = {"score_from": 8, "tokens": 4} | changed
        return raw(measure_recipes)(small(), NgramDrafter(3), TEXT, PROMPTS, **wanted)

    for changed, name in (
        ({"score_from": len(TEXT) - 1}, "score_from"),
        ({"score_from": -1}, "score_from"),
        ({"topk": 0}, "topk"),
        ({"num_drafts": 0}, "num_drafts"),
    ):
        with pytest.raises(ValueError, match=name):
            measure(**changed)
    odd = SmolLM2.random(replace(CONFIG, hidden_size=40), attention="gqa")
    with pytest.raises(ValueError, match="multiple of"):
        served_weights(odd.weights)


@pytest.mark.model
def test_the_real_model_bears_the_served_recipe() -> None:
    dense = SmolLM2.from_gguf(attention="gqa")
    text = Tokenizer.from_gguf().encode(passage())
    plain, served = measure_recipes(
        dense,
        MTPDrafter(MTPModule.trained(dense), 3),
        text[:64],
        {"emma": text[:16]},
        score_from=16,
        recipes=[PLAIN, SERVED],
        topk=16,
        tokens=4,
    )
    assert 0 < served.kl < 1 and served.top1 > 0.5
    # As text without a meaning it would be in the thousands.
    assert plain.perplexity < served.perplexity * 1.1 < 3 * plain.perplexity
    assert served.acceptance.drafted > 0

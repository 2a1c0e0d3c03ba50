"""IndexerConfig: what it refuses, and what MLAConfig refuses of it."""

import dataclasses

import pytest
from tests.support import raw

from mla_ref.layers import IndexerConfig, preset


def test_published_models() -> None:
    v32, glm5, glm52 = (preset(name).indexer for name in ("v3.2", "glm-5", "glm-5.2"))
    assert v32 == IndexerConfig(64, tuple(range(61)))
    assert (v32.head_dim, v32.topk, v32.rope_interleaved) == (128, 2048, False)
    assert glm5 == IndexerConfig(32, tuple(range(78)), rope_interleaved=True)
    assert glm52.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(glm52.full_layers) == 21
    assert preset("v3").indexer is None


def test_B023_the_indexer_pairs_halves_where_the_attention_pairs_neighbours() -> None:
    config = preset("v3.2")
    assert config.rope.interleaved
    assert config.indexer is not None and not config.indexer.rope_interleaved


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 2.0}, "num_heads"),
        ({"num_heads": True}, "num_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"topk": 0}, "topk"),
        ({"topk": "8"}, "topk"),
        ({"head_dim": 96, "hadamard": True}, "head_dim must be a power of two for hadamard"),
        ({"full_layers": ()}, "full_layers"),
        ({"full_layers": (1, 2)}, "full_layers"),
        ({"full_layers": (0, 2, 1)}, "full_layers"),
        ({"full_layers": (0, 0, 1)}, "full_layers"),
        ({"full_layers": (-1, 0)}, "full_layers"),
        ({"full_layers": None}, "full_layers"),
        ({"full_layers": 3}, "full_layers"),
        ({"full_layers": ("0",)}, "full_layers"),
        ({"full_layers": (0, None)}, "full_layers"),
        ({"full_layers": (0, 1.5)}, "full_layers"),
        ({"rope_interleaved": "no"}, "rope_interleaved"),
        ({"hadamard": "no"}, "hadamard"),
        ({"scale_rule": "pow3"}, "scale_rule"),
        ({"scale_rule": None}, "scale_rule"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    good = {"num_heads": 2, "full_layers": (0, 1), "head_dim": 64, "topk": 8}
    raw(IndexerConfig)(**good)
    with pytest.raises((TypeError, ValueError), match=name):
        raw(IndexerConfig)(**(good | changed))


def test_widths_that_only_hadamard_refuses() -> None:
    assert IndexerConfig(2, (0,), head_dim=96).head_dim == 96
    assert IndexerConfig(2, (0,), head_dim=64, hadamard=True).hadamard


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 32}, "indexer.head_dim must hold the 64 rotary numbers, got 32"),
        ({"full_layers": (0, 61)}, "indexer.full_layers must lie below num_layers = 61, got 61"),
    ],
)
def test_a_model_refuses_an_indexer_that_does_not_fit_it(changed: dict, message: str) -> None:
    config = preset("v3.2")
    assert config.indexer is not None
    wrong = dataclasses.replace(config.indexer, **changed)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, indexer=wrong)

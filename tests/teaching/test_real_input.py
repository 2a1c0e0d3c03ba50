"""Input of the lessons: random numbers without the model, its activations with it."""

import pytest
import torch

from mla_ref.attention import causal_attention, vectorised_attention
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.numerics import compare
from mla_ref.teaching import (
    RealModel,
    continue_text,
    layer_input,
    planted,
    real_input,
    real_model,
)


def test_without_a_model_the_numbers_are_random_and_seeded_by_the_layer():
    first, again, other = (layer_input(None, layer=n, num_tokens=5) for n in (3, 3, 4))
    assert "random" in first.origin
    assert first.q.shape == (5, 9, 64)
    assert first.k.shape == first.v.shape == (5, 3, 64)
    assert len(first.tokens) == 5
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("error", [FileNotFoundError("no wheel"), ImportError("no gguf")])
def test_a_missing_model_is_one_line_and_no_error(monkeypatch, capsys, error):
    def missing():
        raise error

    monkeypatch.setattr(real_input, "default_gguf", missing)
    assert real_model() is None
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert str(error) in printed


@pytest.mark.model
def test_the_real_activations_are_those_of_the_text():
    real = real_model()
    layer = layer_input(real, layer=1, num_tokens=12)
    assert "".join(layer.tokens).startswith("Emma Woodhouse, handsome")
    assert layer.q.shape == (12, 9, 64)
    assert layer.softmax_scale == 64**-0.5
    # A longer text begins with the same activations: nothing looks ahead.
    longer = layer_input(real, layer=1, num_tokens=20)
    for name in ("q", "k", "v"):
        short, long = getattr(layer, name), getattr(longer, name)
        assert compare(short, long[:12]).agrees(rel_l2=1e-5)


class Letters:
    """A tokenizer for a random model: letters in, token ids out."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.mark.usefixtures("plain_calls")
def test_the_small_loop_writes_what_the_whole_model_would_write():
    model = SmolLM2.random(seed=6, attention="gqa")
    real = RealModel(model, Letters())
    text, prompt = [], Letters().encode("hello")
    for _ in range(6):
        logits = whole_text_logits(model, torch.tensor(prompt + text))
        text.append(int(logits.argmax()))
    for attention in (causal_attention, unbatched(vectorised_attention)):
        assert continue_text(real, "hello", attention, 6) == Letters().decode(text)
    assert len(set(text)) > 2  # a model that repeats itself would hide an error


@pytest.mark.usefixtures("plain_calls")
def test_with_the_planted_mask_only_the_first_token_is_sure_to_be_right():
    real = RealModel(SmolLM2.random(seed=6, attention="gqa"), Letters())
    right = continue_text(real, "hello", causal_attention, 8).split()
    wrong = continue_text(real, "hello", planted.top_left_causal_attention, 8).split()
    assert wrong[0] == right[0]
    assert wrong != right


def whole_text_logits(model, ids):
    """Logits after the last token, from one prefill of everything through the model's own path."""
    from mla_ref.batching import Step

    step = Step.one_request(0, len(ids), 16)
    cache = model.new_cache(step.block_table.shape[1], 16)
    return model.logits(model.forward(ids, step, cache)[-1:])


def unbatched(attention):
    def call(q, k, v, *, softmax_scale):
        out, lse = attention(q[None], k[None], v[None], softmax_scale=softmax_scale)
        return out[0], lse[0]

    return call

"""The MTP module: its maths by hand, its cache, its vocabulary, and the weights in the package."""

import hashlib
import json
from importlib.resources import files

import pytest
import torch
from safetensors.torch import save_file
from tests.support import raw
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.layers import rms_norm
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_layer import ATTENTIONS
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.numerics import compare
from mla_ref.training.unroll import unroll

CONFIG = SmolLM2Config(num_layers=2, vocab_size=60, context_length=64)
PAGE = 4


def small_module(attention: str = "gqa", seed: int = 3) -> MTPModule:
    model = SmolLM2.random(CONFIG, 5, attention=attention, dtype=torch.float64)
    weights = MTPWeights.random(CONFIG, torch.arange(0, 60, 2), seed).to(dtype=torch.float64)
    # Norms of ones would hide a norm that is left out.
    named = {
        name: tensor + 0.3 * torch.arange(len(tensor)).sin() if "norm" in name else tensor
        for name, tensor in weights.named().items()
    }
    return MTPModule(model, MTPWeights.from_named(named))


def hidden_states(module: MTPModule, token_ids: Tensor) -> Tensor:
    step = Step.one_request(0, len(token_ids), PAGE)
    cache = module.model.new_cache(step.block_table.shape[1], PAGE)
    return module.model.forward(token_ids, step, cache)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_passes_over_pages_are_those_of_the_training(attention: str) -> None:
    module = small_module(attention)
    tokens = torch.randint(60, (14,), generator=torch.Generator().manual_seed(1))
    hidden = hidden_states(module, tokens)
    expected = list(unroll(module.model, module.weights, tokens[None], hidden[None], 3))
    for anchor in (0, 1, 5, 10):
        cache = module.new_cache(5, PAGE)
        first = Step.one_request(0, anchor + 1, PAGE)
        state = module.forward(tokens[1 : anchor + 2], hidden[: anchor + 1], first, cache)[-1:]
        for number in (1, 2, 3):
            if number > 1:
                step = Step.one_request(anchor + number - 1, 1, PAGE)
                state = module.forward(tokens[[anchor + number]], state, step, cache)
            wanted = expected[number - 1][0, anchor][None]
            assert compare(state, wanted).agrees(rel_l2=1e-12), (anchor, number)


def test_the_embedding_comes_first_and_both_are_normed() -> None:
    module = small_module()
    weights, eps = module.weights, CONFIG.rms_norm_eps
    e, h = torch.randn(2, 3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, right = weights.projection[:, :48], weights.projection[:, 48:]
    by_hand = (
        rms_norm(e, weights.embedding_norm, eps=eps) @ left.T
        + rms_norm(h, weights.hidden_norm, eps=eps) @ right.T
    )
    assert compare(weights.mix(e, h, eps), by_hand).agrees(rel_l2=1e-14)


def test_B108_position_0_holds_a_real_token() -> None:
    module = small_module()
    tokens = torch.tensor([7, 8, 9, 10, 11])
    hidden = hidden_states(module, tokens[:4])
    step = Step.one_request(0, 4, PAGE)
    shifted = module.forward(tokens[1:], hidden, step, module.new_cache(1, PAGE))
    other = tokens[1:].clone()
    other[0] = 30
    changed = module.forward(other, hidden, step, module.new_cache(1, PAGE))
    assert (shifted != changed).any(dim=1).all()
    # Of one row alone, attention is its value: all of the layer by hand, from token 1's embedding.
    layer = module.model.new_layer(module.weights.layer)
    x = module.weights.mix(module.model.weights.embedding[tokens[1:2]], hidden[:1], 1e-5)
    value = layer.gqa.values(layer.attention_input(x)).repeat_interleave(3, dim=1)
    by_hand = layer.feed_forward(x + layer.gqa.output(value))
    assert compare(shifted[:1], by_hand).agrees(rel_l2=1e-13)


def test_guesses_are_ids_of_the_whole_vocabulary() -> None:
    module = small_module()
    hidden = torch.randn(20, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits = module.logits(hidden)
    assert logits.shape == (20, 30)
    normed = rms_norm(hidden, module.weights.head_norm, eps=CONFIG.rms_norm_eps)
    full = module.model.logits(normed)
    assert compare(logits, full[:, ::2]).agrees(rel_l2=1e-14)
    guesses = module.guess(hidden)
    assert torch.equal(guesses, 2 * full[:, ::2].argmax(dim=-1))
    assert guesses.dtype == torch.int64


def test_a_token_to_guess_must_be_in_the_vocabulary() -> None:
    model = SmolLM2.random(CONFIG, 5)
    for tokens in ([3, 60], [-1, 3]):
        weights = MTPWeights.random(CONFIG, torch.tensor(tokens))
        with pytest.raises(ValueError, match=r"draft_tokens must lie in 0 .. 59"):
            MTPModule(model, weights)


def test_hidden_states_must_be_as_many_as_tokens() -> None:
    module = small_module()
    step = Step.one_request(0, 2, PAGE)
    with pytest.raises(ValueError, match="hidden must have size 2"):
        raw(module.forward)(
            torch.tensor([1, 2]),
            torch.zeros(3, 48, dtype=torch.float64),
            step,
            module.new_cache(1, PAGE),
        )


def test_weights_survive_a_file(tmp_path) -> None:
    weights = MTPWeights.random(CONFIG, torch.tensor([1, 5], dtype=torch.int32))
    save_file(weights.named(), tmp_path / "w.safetensors")
    again = MTPWeights.read(CONFIG, tmp_path / "w.safetensors", torch.float64)
    assert again.draft_tokens.tolist() == [1, 5] and again.draft_tokens.dtype == torch.int32
    for name, tensor in weights.named().items():
        assert torch.equal(again.named()[name].double(), tensor.double()), name
    named = weights.named()
    del named["layer.ffn_up"]
    save_file(named, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"layer.ffn_up must be of shape \[80, 48\], got None"):
        MTPWeights.read(CONFIG, tmp_path / "w.safetensors")
    save_file(weights.named() | {"projection": torch.zeros(48, 48)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"projection must be of shape \[48, 96\]"):
        MTPWeights.read(CONFIG, tmp_path / "w.safetensors")
    for wrong in (None, torch.tensor([1.0, 5.0]), torch.tensor([[1, 5]])):
        named = weights.named() | {"draft_tokens": wrong}
        save_file({k: v for k, v in named.items() if v is not None}, tmp_path / "w.safetensors")
        with pytest.raises(
            ValueError, match=r"w\.safetensors: draft_tokens must be int32 or int64"
        ):
            MTPWeights.read(CONFIG, tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", ["mtp", "indexer"])
def test_the_package_holds_the_weights_that_its_record_describes(name: str) -> None:
    data = files("mla_ref.models") / "data"
    record = json.loads((data / f"smollm2_{name}.json").read_text())
    content = (data / f"smollm2_{name}.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == record["weights_sha256"]
    assert len(content) < 10e6


def test_the_weights_of_the_package_are_of_the_module_of_smollm2() -> None:
    config = SmolLM2Config(30, 576, 9, 3, 64, 1536, 49152, 8192)
    weights = MTPWeights.read(config)
    assert all(tensor.isfinite().all() for tensor in weights.named().values())
    tokens = weights.draft_tokens
    record = json.loads((files("mla_ref.models") / "data" / "smollm2_mtp.json").read_text())
    assert len(tokens) == record["draft_vocab"] == 8192 and (tokens.diff() > 0).all()

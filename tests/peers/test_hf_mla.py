"""MLALayer against the attention of transformers' DeepSeek and GLM models, on their own weights.

The whole peer model runs, with its rotary tables, masks and cache; hooks record what goes into each
attention and what comes out. Our layers get the same inputs and must give the same outputs, in both
forms, when the tokens come at once and when they come step by step. The peer's indexer keeps every
token (index_topk is as long as the text), so its sparse models are dense here.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import gather_rows
from mla_ref.layers.hf_config import mla_config_from_hf
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.projections import FORMS
from mla_ref.numerics import compare

# The shape checks run in the layer's own tests; here they would take most of the time.
pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("plain_calls")]

LENGTH, REQUESTS, LAYERS, PAGE_SIZE = 24, 2, 2, 5

# Two layers with a dense feed-forward each.
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "attn_implementation": "eager",
}
INDEXER = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": LENGTH}
SHAPES: dict[str, dict[str, Any]] = {
    "even": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
    },
    # Three heads, and a value that is wider than the key. (V2's complex rope wants even strides.)
    "odd": {
        "hidden_size": 51,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 25,
        "kv_lora_rank": 18,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 10,
        "v_head_dim": 23,
    },
}
# (config class, model class, what the kind of model adds)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2Config", "DeepseekV2Model", {"q_lora_rank": None}),
    "v2": ("DeepseekV2Config", "DeepseekV2Model", {}),
    "v3": ("DeepseekV3Config", "DeepseekV3Model", {}),
    "v3-half-split": ("DeepseekV3Config", "DeepseekV3Model", {"rope_interleave": False}),
    "v3.2": ("DeepseekV32Config", "DeepseekV32Model", INDEXER),
    "glm": ("GlmMoeDsaConfig", "GlmMoeDsaModel", INDEXER),
    "glm-shared": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaModel",
        INDEXER | {"indexer_types": ["full", "shared"]},
    ),
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    # As published: the ramp then covers pairs 2 to 6 of 8. With 16 it would be a step.
    "original_max_position_embeddings": 4096,
}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 1e4},
    "yarn": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    # cos and sin get a factor too.
    "yarn-mscales-differ": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-no-mscales": _YARN,
}


def build_peer(kind: str, shape: str, rope: str, seed: int, **changes: Any) -> torch.nn.Module:
    """A peer model whose attention is not uniform: with its own 0.02 most errors would not show."""
    import transformers

    config_class, model_class, extra = KINDS[kind]
    # Copied, since transformers writes into it.
    settings = COMMON | SHAPES[shape] | extra | {"rope_parameters": dict(ROPES[rope])} | changes
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 1.0 if "embed" in name else 0.15
                parameter.normal_(0, std, generator=generator)
    return model


def run_peer(
    model: torch.nn.Module, token_ids: Tensor, chunks: tuple[int, ...]
) -> tuple[list[list[Tensor]], list[list[Tensor]], Any]:
    """Inputs and outputs of each layer's attention, one tensor a chunk, and the peer's cache."""
    inputs: list[list[Tensor]] = [[] for _ in model.layers]
    outputs: list[list[Tensor]] = [[] for _ in model.layers]

    def recorder(layer: int) -> Any:
        def record(
            _: Any, args: Any, kwargs: dict[str, Tensor], result: tuple[Tensor, ...]
        ) -> None:
            inputs[layer].append(kwargs["hidden_states"])
            outputs[layer].append(result[0])

        return record

    hooks = [
        layer.self_attn.register_forward_hook(recorder(i), with_kwargs=True)
        for i, layer in enumerate(model.layers)
    ]
    cache, first = None, 0
    with torch.no_grad():
        for length in chunks:
            step_ids = token_ids[:, first : first + length]
            cache = model(input_ids=step_ids, cache=cache, use_cache=True).cache
            first += length
    for hook in hooks:
        hook.remove()
    return inputs, outputs, cache


def load_layers(model: torch.nn.Module, **changes: Any) -> list[MLALayer]:
    """Our layers on the peer's weights, from its configuration file and its state dict."""
    config = dataclasses.replace(mla_config_from_hf(model.config.to_dict()), **changes)
    return [
        MLALayer.from_state_dict(config, model.state_dict(), prefix=f"layers.{i}.self_attn.")
        for i in range(LAYERS)
    ]


def run_ours(
    layer: MLALayer, inputs: list[Tensor], form: str
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of one layer for the same chunks; the cache and the block table with them."""
    pages = -(-LENGTH // PAGE_SIZE)
    block_table = torch.randperm(REQUESTS * pages).view(REQUESTS, pages)
    kv_cache = torch.full((REQUESTS * pages, PAGE_SIZE, layer.config.kv_row_dim), torch.nan)
    outputs, done = [], 0
    for x in inputs:
        length = x.shape[1]
        step = Step.build([done] * REQUESTS, [length] * REQUESTS, block_table, PAGE_SIZE)
        outputs.append(layer(x.flatten(0, 1), kv_cache, step, form=form).view_as(x))
        done += length
    return outputs, kv_cache, block_table


def assert_same_attention(
    model: torch.nn.Module, layers: list[MLALayer], chunks: tuple[int, ...]
) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Every layer, form and chunk agrees to 1e-5.

    Returns:
        The peer's cache; and for each layer our cache with its block table.
    """
    token_ids = torch.randint(0, COMMON["vocab_size"], (REQUESTS, LENGTH))
    inputs, outputs, peer_cache = run_peer(model, token_ids, chunks)
    caches = []
    for i, layer in enumerate(layers):
        expected = torch.cat(outputs[i], dim=1)
        # Values of about 1, so that an absolute limit means something.
        assert 0.3 < expected.std() < 3
        for form in FORMS:
            ours, kv_cache, block_table = run_ours(layer, inputs[i], form)
            comparison = compare(torch.cat(ours, dim=1), expected)
            assert comparison.agrees(max_abs=1e-5), f"layer {i}, {form}: {comparison}"
        caches.append((kv_cache, block_table))
    return peer_cache, caches


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_gives_the_peers_attention(kind, rope):
    model = build_peer(kind, "even", rope, seed=1)
    layers = load_layers(model)
    assert layers[0].softmax_scale == pytest.approx(model.layers[0].self_attn.scaling, rel=1e-12)
    assert_same_attention(model, layers, (20,) + (1,) * (LENGTH - 20))


@pytest.mark.parametrize(
    "chunks", [(LENGTH,), (1,) * LENGTH, (10, 3, 11)], ids=["prefill", "decode", "chunks"]
)
@pytest.mark.parametrize("kind", ["v2-lite", "v3", "v3.2", "glm"])
def test_other_shapes_seeds_and_steps(kind, chunks):
    seed = 100 + len(chunks)
    model = build_peer(kind, "odd", "yarn" if kind != "glm" else "plain", seed)
    assert_same_attention(model, load_layers(model), chunks)


@pytest.mark.parametrize("kind", ["v2", "v3", "v3-half-split", "v3.2", "glm"])
def test_B081_caches_agree_once_the_rotary_key_is_in_one_order(kind):
    """The peers but V2 turn interleaved pairs and store first halves, then second halves."""
    model = build_peer(kind, "even", "plain", seed=4)
    peer_cache, caches = assert_same_attention(model, load_layers(model), (LENGTH,))
    for i, (kv_cache, block_table) in enumerate(caches):
        for request in range(REQUESTS):
            rows = gather_rows(kv_cache, block_table[request], LENGTH)
            latent, k_pe = rows.tensor_split([model.config.kv_lora_rank], dim=-1)
            assert compare(latent, peer_cache.layers[i].keys[request, 0]).agrees(max_abs=1e-5)
            theirs = peer_cache.layers[i].values[request, 0]
            if kind not in ("v2", "v3-half-split"):
                assert not compare(k_pe, theirs).agrees(max_abs=0.1)
                theirs = theirs.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            assert compare(k_pe, theirs).agrees(max_abs=1e-5)


@pytest.mark.parametrize("kind", ["v3", "v3.2", "glm"])
def test_B080_the_peers_inner_norms_do_not_read_the_eps_of_the_file(kind):
    """A known difference: transformers keeps 1e-6 there. Told ours is 1e-6, it agrees."""
    model = build_peer(kind, "even", "plain", seed=5, rms_norm_eps=1e-2)
    assert model.layers[0].self_attn.kv_a_layernorm.variance_epsilon == 1e-6
    assert_same_attention(model, load_layers(model, rms_norm_eps=1e-6), (LENGTH,))
    with pytest.raises(AssertionError, match="max abs"):
        assert_same_attention(model, load_layers(model), (LENGTH,))
    for layer in model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = 1e-2
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-2
    assert_same_attention(model, load_layers(model), (LENGTH,))


def test_B079_the_scale_matters_from_the_second_token_on():
    """One key takes all the weight whatever the scale, so position 0 proves nothing."""
    model = build_peer("v3", "even", "yarn", seed=6)
    config = mla_config_from_hf(model.config.to_dict())
    without_mscale = config.qk_head_dim**-0.5
    absorbed_width = config.kv_row_dim**-0.5
    token_ids = torch.randint(0, COMMON["vocab_size"], (REQUESTS, LENGTH))
    inputs, outputs, _ = run_peer(model, token_ids, (LENGTH,))
    for wrong in (without_mscale, absorbed_width):
        layer = load_layers(model, softmax_scale=wrong)[0]
        ours = run_ours(layer, inputs[0], "absorbed")[0][0]
        assert compare(ours[:, 0], outputs[0][0][:, 0]).agrees(max_abs=1e-5)
        assert (ours[:, 1:] - outputs[0][0][:, 1:]).abs().amax(dim=(0, 2)).min() > 1e-2

"""The indexer of a layer against the same maths written out once more, and its checkpoints."""

import dataclasses

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.indexer import index_scores, select_topk
from mla_ref.layers import (
    IndexerConfig,
    MLAConfig,
    RopeConfig,
    YarnConfig,
    default_softmax_scale,
    preset,
)
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.numerics import compare

HIDDEN, D_Q, HEADS, D_I, D_R = 20, 12, 3, 16, 8


def small_config(
    interleaved: bool = False, hadamard: bool = False, q_lora_rank: int | None = D_Q
) -> MLAConfig:
    return MLAConfig(
        name="small",
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=2,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=14,
        qk_nope_head_dim=6,
        qk_rope_head_dim=D_R,
        v_head_dim=5,
        rope=RopeConfig(D_R, 100.0, interleaved=True),
        rms_norm_eps=1e-3,
        softmax_scale=default_softmax_scale(6, D_R, None),
        indexer=IndexerConfig(
            HEADS, (0,), head_dim=D_I, topk=4, rope_interleaved=interleaved, hadamard=hadamard
        ),
    )


def inputs(rows: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Query latents, inputs of the attention, and positions that do not start at 0."""
    positions = torch.arange(3, 3 + rows)
    return torch.randn(rows, D_Q, dtype=dtype), torch.randn(rows, HIDDEN, dtype=dtype), positions


# --- by hand


def placed(x: Tensor, position: int, interleaved: bool) -> Tensor:
    """The first 8 of 16 numbers turned, pair by pair as complex numbers; the rest as it is."""
    turned = x.clone()
    for i in range(D_R // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + D_R // 2)
        angle = torch.tensor(position * 100.0 ** (-2 * i / D_R), dtype=torch.float64)
        pair = torch.complex(x[a], x[b]) * torch.polar(torch.ones_like(angle), angle)
        turned[a], turned[b] = pair.real, pair.imag
    return turned


def key_by_hand(weights: dict[str, Tensor], x: Tensor, position: int, interleaved: bool) -> Tensor:
    key = weights["wk.weight"] @ x
    centred = key - key.sum() / D_I
    normalised = centred / (centred.square().sum() / D_I + 1e-6).sqrt()
    key = normalised * weights["k_norm.weight"] + weights["k_norm.bias"]
    return placed(key, position, interleaved)


def scores_by_hand(layer: IndexerLayer, latent: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """Every row with every key, one head at a time."""
    weights, interleaved = layer.state_dict(), layer.config.rope_interleaved
    scores = torch.zeros(len(x), len(x), dtype=torch.float64)
    for t in range(len(x)):
        q = weights["wq_b.weight"] @ latent[t]
        for head in range(HEADS):
            mine = placed(q[head * D_I : (head + 1) * D_I], int(positions[t]), interleaved)
            factor = (weights["weights_proj.weight"][head] @ x[t]) / (HEADS**0.5 * D_I**0.5)
            for s in range(len(x)):
                key = key_by_hand(weights, x[s], int(positions[s]), interleaved)
                scores[t, s] += factor * max(float(mine @ key), 0.0)
    return scores


def scores_of(layer: IndexerLayer, latent: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    q, weights = layer.queries(latent, x, positions)
    return index_scores(q, layer.keys(x, positions), weights)


@pytest.mark.parametrize("interleaved", [False, True])
def test_B025_scores_are_what_the_formulas_say_in_both_layouts(interleaved: bool) -> None:
    layer = IndexerLayer.random(small_config(interleaved), 1, torch.float64)
    arguments = inputs()
    found = compare(scores_of(layer, *arguments), scores_by_hand(layer, *arguments))
    assert found.agrees(max_abs=1e-13), found


def test_B023_the_layout_is_the_indexers_and_not_the_attentions() -> None:
    """Same weights, same attention; positions 1 of (1, 2, 3, 4) turned either way, by hand."""
    config = dataclasses.replace(
        small_config(), qk_rope_head_dim=4, rope=RopeConfig(4, 1e4, interleaved=True)
    )
    for interleaved, expected in (
        (True, [-1.14264, 1.92208, 2.95985, 4.02980]),
        (False, [-1.98411, 1.95990, 2.46238, 4.01980]),
    ):
        assert config.indexer is not None
        indexer = dataclasses.replace(config.indexer, rope_interleaved=interleaved)
        layer = IndexerLayer.random(dataclasses.replace(config, indexer=indexer), 1)
        layer.wq_b.weight.zero_()
        layer.wq_b.weight[:16, 0] = torch.tensor([1.0, 2, 3, 4, *range(5, 17)])
        q, _ = layer.queries(torch.eye(1, D_Q), torch.zeros(1, HIDDEN), torch.tensor([1]))
        assert q[0, 0].tolist() == pytest.approx([*expected, *range(5, 17)], abs=1e-5)


def test_the_first_numbers_are_turned_and_the_rest_never() -> None:
    """In the attention's queries the rotary numbers stand last."""
    layer = IndexerLayer.random(small_config(), 2, torch.float64)
    latent, x, positions = inputs()
    far, near = (layer.queries(latent, x, p)[0] for p in (positions, torch.zeros_like(positions)))
    assert torch.equal(far[..., D_R:], near[..., D_R:])
    assert not (far[..., :D_R] == near[..., :D_R]).any()
    far, near = layer.keys(x, positions), layer.keys(x, torch.zeros_like(positions))
    assert torch.equal(far[..., D_R:], near[..., D_R:])
    assert not (far[..., :D_R] == near[..., :D_R]).any()


def test_yarn_reaches_the_indexer() -> None:
    yarn = YarnConfig(4.0, 16, mscale=1.0, mscale_all_dim=0.7)
    config = small_config()
    stretched = dataclasses.replace(config, rope=dataclasses.replace(config.rope, yarn=yarn))
    plain, turned = (IndexerLayer.random(c, 3, torch.float64) for c in (config, stretched))
    _, x, positions = inputs()
    difference = compare(plain.keys(x, positions), turned.keys(x, positions)).rel_l2
    assert difference > 0.05


def test_B027_keys_are_normalised_by_a_layer_norm() -> None:
    """Inputs whose keys are constant but for rounding: the bias is left. An RMSNorm gives ones."""
    layer = IndexerLayer.random(small_config(), 4, torch.float64)
    layer.wk.weight.copy_(torch.randn(1, HIDDEN, dtype=torch.float64).expand(D_I, -1))
    _, x, positions = inputs()
    keys = layer.keys(x, torch.zeros_like(positions))
    assert torch.allclose(keys, layer.k_norm.bias.expand_as(keys), atol=1e-9)


def test_the_eps_of_the_keys_norm_is_not_the_models() -> None:
    """rms_norm_eps is 1e-3 here; the norm of index keys has 1e-6 in every published model."""
    layer = IndexerLayer.random(small_config(), 5, torch.float64)
    _, x, positions = inputs()
    tiny = layer.keys(1e-2 * x, positions)
    assert compare(tiny, layer.keys(x, positions)).rel_l2 < 0.02


def test_B152_the_order_of_two_tokens_with_equal_content_matters() -> None:
    layer = IndexerLayer.random(small_config(), 6, torch.float64)
    latent, x, positions = inputs()
    x[4] = x[1]
    scores = scores_of(layer, latent, x, positions)[-1]
    assert abs(float(scores[1] - scores[4])) > 1e-3
    swapped = positions.clone()
    swapped[[1, 4]] = positions[[4, 1]]
    again = scores_of(layer, latent, x, swapped)[-1]
    assert again[[1, 4]].tolist() == pytest.approx(scores[[4, 1]].tolist(), rel=1e-12)


def test_scores_hold_only_differences_of_positions() -> None:
    layer = IndexerLayer.random(small_config(), 7, torch.float64)
    latent, x, positions = inputs()
    found = compare(
        scores_of(layer, latent, x, positions + 1000), scores_of(layer, latent, x, positions)
    )
    assert found.agrees(max_abs=1e-10), found


# --- Hadamard


def test_B028_the_hadamard_matrix_on_both_sides_changes_no_score() -> None:
    plain = IndexerLayer.random(small_config(), 8, torch.float64)
    mixed = IndexerLayer.random(small_config(hadamard=True), 8, torch.float64)
    latent, x, positions = inputs(40)
    expected = scores_of(plain, latent, x, positions)
    scores = scores_of(mixed, latent, x, positions)
    assert compare(scores, expected).agrees(max_abs=1e-13)
    lens = torch.arange(1, 41)
    assert torch.equal(select_topk(scores, lens, 4), select_topk(expected, lens, 4))
    # On one side alone it is another model.
    q, weights = mixed.queries(latent, x, positions)
    one_side = index_scores(q, plain.keys(x, positions), weights)
    assert compare(one_side, expected).rel_l2 > 0.3


def test_B146_the_hadamard_matrix_spreads_what_is_large() -> None:
    """One number of 400 among 16: FP8 keys and queries would be scaled for it alone."""
    _, x, positions = inputs(dtype=torch.float32)
    for hadamard, spread in ((False, False), (True, True)):
        layer = IndexerLayer.random(small_config(hadamard=hadamard), 9)
        layer.k_norm.bias[D_I - 1] = 400.0
        keys = layer.keys(x, positions)
        assert bool((keys.abs().amax(dim=-1) < 110).all()) is spread


# --- head weights


def test_B029_a_bfloat16_checkpoint_keeps_its_head_weights_in_float32() -> None:
    state = {
        k: v.bfloat16() for k, v in IndexerLayer.random(small_config(), 10).state_dict().items()
    }
    layer = IndexerLayer.from_state_dict(small_config(), state)
    assert layer.weights_proj.weight.dtype == torch.float32
    assert layer.wk.weight.dtype == layer.wq_b.weight.dtype == torch.bfloat16
    latent, x, positions = inputs(dtype=torch.bfloat16)
    q, weights = layer.queries(latent, x, positions)
    assert q.dtype == layer.keys(x, positions).dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    exact = x.double() @ state["weights_proj.weight"].double().T / (HEADS * D_I) ** 0.5
    assert compare(weights, exact).agrees(rel_l2=1e-6)
    assert not compare(weights.bfloat16(), exact).agrees(rel_l2=1e-4)


@pytest.mark.parametrize(("heads", "d_i"), [(32, 128), (64, 128)])
def test_B030_the_factor_of_the_scores_is_not_rounded(heads: int, d_i: int) -> None:
    """(32 * 128)^-0.5 is 2^-6; (64 * 128)^-0.5 is no power of two."""
    indexer = IndexerConfig(heads, (0,), head_dim=d_i)
    config = dataclasses.replace(small_config(), indexer=indexer)
    layer = IndexerLayer.random(config, 11, torch.bfloat16)
    latent, x, positions = inputs(dtype=torch.bfloat16)
    _, weights = layer.queries(latent, x, positions)
    expected = layer.weights_proj(x.float()).double() * heads**-0.5 * d_i**-0.5
    assert compare(weights, expected).agrees(rel_l2=1e-7)


def test_float64_stays_float64() -> None:
    layer = IndexerLayer.random(small_config(), 12, torch.float64)
    q, weights = layer.queries(*inputs())
    assert q.dtype == weights.dtype == torch.float64


# --- weights


def test_names_and_shapes_are_those_of_the_published_checkpoints() -> None:
    """As in the files of DeepSeek-V3.2; no memory is taken."""
    layer = IndexerLayer.for_model(preset("v3.2"), device="meta")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "wq_b.weight": (8192, 1536),
        "wk.weight": (128, 7168),
        "k_norm.weight": (128,),
        "k_norm.bias": (128,),
        "weights_proj.weight": (64, 7168),
    }
    assert not layer.rope.interleaved
    assert IndexerLayer.for_model(preset("glm-5.2"), device="meta").rope.interleaved
    with pytest.raises(ValueError, match="v3 has no indexer"):
        IndexerLayer.for_model(preset("v3"))


def test_a_model_without_a_query_latent_makes_index_queries_from_x() -> None:
    layer = IndexerLayer.random(small_config(q_lora_rank=None), 13)
    x = torch.randn(2, HIDDEN)
    q, _ = layer.queries(x, x, torch.arange(2))
    assert q.shape == (2, HEADS, D_I)


def checkpoint(prefix: str = "", seed: int = 14) -> dict[str, Tensor]:
    weights = IndexerLayer.random(small_config(), seed).state_dict()
    return {prefix + name: weight for name, weight in weights.items()}


def test_a_checkpoint_is_loaded_without_a_copy() -> None:
    prefix = "model.layers.1.self_attn.indexer."
    state = checkpoint(prefix) | {"model.layers.1.self_attn.o_proj.weight": torch.zeros(1)}
    layer = IndexerLayer.from_state_dict(small_config(), state, prefix=prefix)
    for name, weight in layer.state_dict().items():
        assert weight.data_ptr() == state[prefix + name].data_ptr()
    assert not any(p.requires_grad for p in layer.parameters())


def test_random_weights_repeat_and_differ_by_seed() -> None:
    first, again, other = (checkpoint(seed=seed) for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("name", sorted(checkpoint()))
def test_a_missing_or_misshapen_weight_is_named(name: str) -> None:
    state = checkpoint("a.")
    weight = state.pop(f"a.{name}")
    with pytest.raises(ValueError, match=f"missing a.{name}"):
        IndexerLayer.from_state_dict(small_config(), state, prefix="a.")
    state[f"a.{name}"] = weight[:-1]
    with pytest.raises(ValueError, match=f"a.{name} must have the shape"):
        IndexerLayer.from_state_dict(small_config(), state, prefix="a.")


@pytest.mark.parametrize(
    "name", ["wk.weight_scale_inv", "wq_b.bias", "k_norm.eps", "weights_proj.bias", "extra"]
)
def test_an_unexpected_weight_is_named(name: str) -> None:
    state = checkpoint("a.") | {f"a.{name}": torch.zeros(3)}
    with pytest.raises(ValueError, match=f"unexpected a.{name}"):
        IndexerLayer.from_state_dict(small_config(), state, prefix="a.")


def test_quantised_or_mixed_weights_are_refused() -> None:
    for name in ("wk.weight", "weights_proj.weight"):
        state = checkpoint()
        state[name] = state[name].to(torch.float8_e4m3fn)
        with pytest.raises(TypeError, match="dequantise it first"):
            IndexerLayer.from_state_dict(small_config(), state)
    state = checkpoint()
    state["wk.weight"] = state["wk.weight"].bfloat16()
    with pytest.raises(ValueError, match="one dtype"):
        IndexerLayer.from_state_dict(small_config(), state)


def test_input_that_does_not_fit_is_named() -> None:
    layer = IndexerLayer.random(small_config(), 15)
    latent, x, positions = inputs(dtype=torch.float32)
    for name, args in (
        ("latent", (latent[:, :-1], x, positions)),
        ("latent", (latent.double(), x, positions)),
        ("latent", (None, x, positions)),
        ("x", (latent, x[0], positions)),
        ("x", (latent, x.bfloat16(), positions)),
        ("positions", (latent, x, positions[:-1])),
        ("positions", (latent, x, positions.float())),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(layer.queries)(*args)
    for name, args in (
        ("x", (x[:, :-1], positions)),
        ("x", (x.long(), positions)),
        ("positions", (x, positions[:-1])),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(layer.keys)(*args)

"""The MLA layer against the same maths written out once more, and the loading of weights."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.layers import (
    MLAConfig,
    RopeConfig,
    YarnConfig,
    default_softmax_scale,
    preset,
    rope_table,
)
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.projections import FORMS, attend_latent
from mla_ref.numerics import compare

YARN = YarnConfig(4.0, 16, mscale=1.0, mscale_all_dim=0.7)


def small_config(
    q_lora_rank: int | None = 12, yarn: YarnConfig | None = None, interleaved: bool = True
) -> MLAConfig:
    """Every dimension different, so that no two can be exchanged unseen."""
    return MLAConfig(
        name="small",
        hidden_size=20,
        num_layers=1,
        num_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=14,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
        rope=RopeConfig(8, 100.0, interleaved=interleaved, yarn=yarn),
        rms_norm_eps=1e-3,
        softmax_scale=default_softmax_scale(6, 8, yarn),
    )


def attend(layer: MLALayer, x: Tensor, form: str, chunks: tuple[int, ...] = ()) -> Tensor:
    """Attention of one request whose tokens come in one step, or in steps of these lengths."""
    page_size = 4
    kv_cache = torch.full((8, page_size, layer.config.kv_row_dim), torch.nan, dtype=x.dtype)
    out, done = [], 0
    for length in chunks or (x.shape[0],):
        step = Step.one_request(done, length, page_size)
        out.append(layer(x[done : done + length], kv_cache, step, form=form))
        done += length
    return torch.cat(out)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).sum() / len(x) + eps).sqrt() * weight


def turned(x: Tensor, position: int, config: RopeConfig) -> Tensor:
    cos, sin = (table[0] for table in rope_table(config, torch.tensor([position])))
    pairs = x.view(-1, 2) if config.interleaved else x.view(2, -1).T
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return result.flatten() if config.interleaved else result.T.flatten()


def by_hand(layer: MLALayer, x: Tensor) -> Tensor:
    """Token by token and head by head, every slice of every weight by its place in the matrix."""
    config, weights = layer.config, layer.state_dict()
    d_n, d_r, d_v, d_c = 6, 8, 5, 14
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    out = []
    for position, token in enumerate(x):
        if config.q_lora_rank is None:
            q = weights["q_proj.weight"] @ token
        else:
            q = weights["q_b_proj.weight"] @ normalised(
                weights["q_a_proj.weight"] @ token, weights["q_a_layernorm.weight"], 1e-3
            )
        kv = weights["kv_a_proj_with_mqa.weight"] @ token
        kv_b = weights["kv_b_proj.weight"] @ normalised(
            kv[:d_c], weights["kv_a_layernorm.weight"], 1e-3
        )
        k_pe = turned(kv[d_c:], position, config.rope)
        first_k = [h * (d_n + d_v) for h in range(3)]
        keys.append([torch.cat([kv_b[f : f + d_n], k_pe]) for f in first_k])
        values.append([kv_b[f + d_n : f + d_n + d_v] for f in first_k])
        heads = []
        for h in range(3):
            mine = q[h * (d_n + d_r) : (h + 1) * (d_n + d_r)]
            mine = torch.cat([mine[:d_n], turned(mine[d_n:], position, config.rope)])
            scores = torch.stack([mine @ key[h] for key in keys]) * config.softmax_scale
            heads.append(scores.softmax(0) @ torch.stack([value[h] for value in values]))
        out.append(weights["o_proj.weight"] @ torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("yarn", [None, YARN])
@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_both_forms_give_what_the_formulas_say(q_lora_rank, yarn, interleaved):
    layer = MLALayer.random(small_config(q_lora_rank, yarn, interleaved), 1, torch.float64)
    x = torch.randn(11, 20, dtype=torch.float64)
    expected = by_hand(layer, x)
    for form in FORMS:
        comparison = compare(attend(layer, x, form), expected)
        assert comparison.agrees(max_abs=1e-13), f"{form}: {comparison}"


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (4, 4, 3), (7, 1, 3)])
def test_decoding_from_the_cache_gives_what_one_prefill_gives(chunks):
    layer = MLALayer.random(small_config(), 2, torch.float64)
    x = torch.randn(11, 20, dtype=torch.float64)
    for form in FORMS:
        comparison = compare(attend(layer, x, form, chunks), by_hand(layer, x))
        assert comparison.agrees(max_abs=1e-13), f"{form}: {comparison}"


def test_bfloat16_weights_give_bfloat16_output():
    config = small_config()
    exact, low = MLALayer.random(config, 3), MLALayer.random(config, 3, torch.bfloat16)
    x = torch.randn(11, 20, dtype=torch.bfloat16)
    out = attend(low, x, "absorbed")
    assert out.dtype == torch.bfloat16
    comparison = compare(out, attend(exact, x.float(), "absorbed"))
    assert comparison.agrees(rel_l2=0.02), str(comparison)


def test_B080_inner_norms_take_the_eps_of_the_config():
    small, large = (
        MLALayer.random(dataclasses.replace(small_config(), rms_norm_eps=eps), 4)
        for eps in (1e-6, 1e-2)
    )
    # Small inputs, as a trained model may have them: there eps is not lost beside the mean square.
    x, positions = 0.1 * torch.randn(5, 20), torch.arange(5)
    for actual, expected in (
        (
            large.queries(large.query_latent(x), positions)[0],
            small.queries(small.query_latent(x), positions)[0],
        ),
        (large.kv_rows(x, positions)[:, :14], small.kv_rows(x, positions)[:, :14]),
    ):
        assert compare(actual, expected).rel_l2 > 0.1
        # A larger eps makes every row shorter.
        assert (actual.norm(dim=-1) < expected.norm(dim=-1)).all()


def test_the_first_token_stands_at_position_0():
    """Scores hold only differences of positions: a shift of all of them shows in the cache."""
    layer = MLALayer.random(small_config(), 5)
    x = torch.randn(2, 20)
    straight = layer.kv_a_proj_with_mqa(x)[:, 14:]
    k_pe = layer.kv_rows(x, torch.arange(2))[:, 14:]
    assert torch.equal(k_pe[0], straight[0])
    assert not torch.allclose(k_pe[1], straight[1], atol=0.1)


def test_the_rotary_key_is_not_normalised():
    layer = MLALayer.random(small_config(), 5)
    x, positions = torch.randn(5, 20), torch.arange(5)
    once, ten_times = layer.kv_rows(x, positions), layer.kv_rows(10 * x, positions)
    torch.testing.assert_close(ten_times[:, 14:], 10 * once[:, 14:])
    torch.testing.assert_close(ten_times[:, :14], once[:, :14], rtol=1e-2, atol=1e-2)


def test_up_projections_are_views_of_kv_b():
    layer = MLALayer.random(small_config(), 6)
    kv_b = layer.kv_b_proj.weight
    assert layer.w_uk.shape == (3, 6, 14) and layer.w_uv.shape == (3, 5, 14)
    assert layer.w_uk.data_ptr() == kv_b.data_ptr()
    torch.testing.assert_close(layer.w_uv[2], kv_b[-5:])


# --- random weights


def test_random_weights_repeat_and_differ_by_seed():
    config = small_config()
    first, again, other = (MLALayer.random(config, seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_random_attention_is_not_uniform():
    """With the usual standard deviation of 0.02 this variance is about 1e-5."""
    layer = MLALayer.random(preset("deepseek-v2-lite"), 9)
    x, positions = torch.randn(16, 2048), torch.arange(16)
    q = torch.cat(layer.queries(layer.query_latent(x), positions), dim=-1)
    rows = layer.kv_rows(x, positions)
    k_nope = torch.einsum("tc,hnc->thn", rows[:, :512], layer.w_uk)
    k = torch.cat([k_nope, rows[:, None, 512:].expand(-1, 16, -1)], dim=-1)
    scores = torch.einsum("shd,thd->hst", q, k) * layer.softmax_scale
    assert 0.5 < scores.std() < 4


def test_no_parameter_asks_for_a_gradient():
    """A cache written by such a layer would keep the graph of every step alive."""
    layer = MLALayer.random(small_config(), 10)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not attend(layer, torch.randn(3, 20), "absorbed").requires_grad


# --- checkpoints


def test_names_and_shapes_are_those_of_the_published_checkpoint():
    """As in the files of DeepSeek-V3.2; no memory is taken for the 187 million weights."""
    layer = MLALayer(preset("v3.2"), device="meta")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "q_a_proj.weight": (1536, 7168),
        "q_a_layernorm.weight": (1536,),
        "q_b_proj.weight": (24576, 1536),
        "kv_a_proj_with_mqa.weight": (576, 7168),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (32768, 512),
        "o_proj.weight": (7168, 16384),
    }
    lite = MLALayer(preset("deepseek-v2-lite"), device="meta")
    assert lite.q_proj.weight.shape == (3072, 2048) and not hasattr(lite, "q_a_proj")


def checkpoint(prefix: str = "", seed: int = 11) -> dict[str, Tensor]:
    weights = MLALayer.random(small_config(), seed).state_dict()
    return {prefix + name: weight for name, weight in weights.items()}


def test_layer_1_does_not_take_the_weights_of_layer_10():
    first, tenth = "model.layers.1.self_attn.", "model.layers.10.self_attn."
    both = checkpoint(first, seed=1) | checkpoint(tenth, seed=2)
    both["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(3)
    layer = MLALayer.from_state_dict(small_config(), both, prefix=first)
    assert torch.equal(layer.o_proj.weight, both[f"{first}o_proj.weight"])


def test_indexer_weights_are_skipped_by_name():
    weights = checkpoint() | {"indexer.wk.weight": torch.zeros(2)}
    MLALayer.from_state_dict(small_config(), weights)


def test_loading_copies_nothing_and_leaves_the_owner_trainable():
    owner = {name: torch.nn.Parameter(weight) for name, weight in checkpoint().items()}
    layer = MLALayer.from_state_dict(small_config(), owner)
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == owner[name].data_ptr()
        assert owner[name].requires_grad and not parameter.requires_grad


def without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: weight for key, weight in weights.items() if key != name}


@pytest.mark.parametrize(
    "weights, message",
    [
        (
            without(checkpoint("a."), "a.kv_b_proj.weight"),
            r"missing a\.kv_b_proj\.weight of shape \[33, 14\]",
        ),
        (
            checkpoint("a.") | {"a.q_a_proj.bias": torch.zeros(12)},
            r"unexpected a\.q_a_proj\.bias, a float32 tensor of shape \[12\]",
        ),
        (
            checkpoint("a.") | {"a.o_proj.weight_scale_inv": torch.zeros(1, 1)},
            r"unexpected a\.o_proj\.weight_scale_inv",
        ),
        (
            checkpoint("a.") | {"a.o_proj.weight": torch.zeros(15, 20)},
            r"a\.o_proj\.weight must have the shape \[20, 15\], got .*\[15, 20\]",
        ),
        (
            checkpoint("a.") | {"a.o_proj.weight": torch.zeros(20, 15, dtype=torch.float16)},
            "one dtype under 'a.', got torch.float16, torch.float32",
        ),
        (checkpoint("b."), "missing a.q_a_proj.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        MLALayer.from_state_dict(small_config(), weights, prefix="a.")


def test_quantised_weights_are_refused():
    weights = checkpoint()
    weights["o_proj.weight"] = weights["o_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"o_proj\.weight must be a float of 16.*dequantise"):
        MLALayer.from_state_dict(small_config(), weights)


# --- bad input


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("method", ["queries", "kv_rows"])
@pytest.mark.parametrize(
    "x, positions, error, message",
    [
        (torch.zeros(3, 19), torch.arange(3), ValueError, "x must have size 20"),
        (torch.zeros(3, 20), torch.arange(4), ValueError, "positions must have size 3"),
        (torch.zeros(3, 20), torch.zeros(3), TypeError, "positions must hold int32"),
        (torch.zeros(3, 20).half(), torch.arange(3), TypeError, "x must be torch.float32"),
        (torch.zeros(3, 20).long(), torch.arange(3), TypeError, "x must hold floating-point"),
    ],
)
def test_bad_rows_are_named(method, x, positions, error, message):
    # Without compression the query latent is x itself, and as wide.
    config = dataclasses.replace(small_config(), q_lora_rank=None)
    if method == "queries":
        message = message.replace("x must", "latent must")
    with pytest.raises(error, match=message):
        getattr(MLALayer.random(config, 12), method)(x, positions)


@pytest.mark.usefixtures("plain_calls")
def test_bad_rows_of_the_query_latent_are_named():
    with pytest.raises(ValueError, match="x must have size 20"):
        MLALayer.random(small_config(), 12).query_latent(torch.zeros(3, 19))


def test_the_layer_runs_where_the_protocol_is_asked_for():
    layer = MLALayer.random(small_config(), 13)
    x, step = torch.randn(3, 20), Step.one_request(0, 3, 4)
    cache = torch.zeros(1, 4, 22)
    assert torch.equal(
        attend_latent(layer, x, cache, step, form="absorbed"),
        layer(x, cache, step, form="absorbed"),
    )

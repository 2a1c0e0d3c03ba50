"""The whole model on tiny random weights: steps, shared lists, what it takes from a checkpoint.

tests/peers compares its logits with another library's.
"""

from typing import Any

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.layers.hf_config import mla_config_from_hf
from mla_ref.models.deepseek import DeepSeekModel
from mla_ref.models.feed_forward import GatedFeedForward, MixtureOfExperts
from mla_ref.models.language_model import require_ids
from mla_ref.numerics import compare

HIDDEN, VOCAB, LAYERS, TOPK, PAGE = 16, 31, 4, 5, 4
CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": TOPK,
    "indexer_types": ["full", "full", "shared", "shared"],
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}


def attention_shapes(full: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (12, HIDDEN),
        "q_a_layernorm": (12,),
        "q_b_proj": (2 * 10, 12),
        "kv_a_proj_with_mqa": (14, HIDDEN),
        "kv_a_layernorm": (10,),
        "kv_b_proj": (2 * 11, 10),
        "o_proj": (HIDDEN, 10),
    }
    if full:
        shapes |= {"indexer.wq_b": (8 * 16, 12), "indexer.wk": (16, HIDDEN)}
        shapes |= {"indexer.k_norm": (16,), "indexer.weights_proj": (8, HIDDEN)}
    return shapes


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every tensor of the model by its name in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (1 + 0.2 * drawn if len(shape) == 1 else drawn * shape[1] ** -0.5).to(dtype)

    def network(name: str) -> dict[str, Tensor]:
        return {
            f"{name}gate_proj.weight": weight(9, HIDDEN),
            f"{name}up_proj.weight": weight(9, HIDDEN),
            f"{name}down_proj.weight": weight(HIDDEN, 9),
        }

    state = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": weight(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for number, kind in enumerate(CONFIG["indexer_types"]):
        name = f"model.layers.{number}."
        for part, shape in attention_shapes(kind == "full").items():
            state[f"{name}self_attn.{part}.weight"] = weight(*shape)
        if kind == "full":
            state[f"{name}self_attn.indexer.k_norm.bias"] = weight(16) - 1
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}{norm}.weight"] = weight(HIDDEN)
        if number < CONFIG["first_k_dense_replace"]:
            state |= network(f"{name}mlp.")
            continue
        state[f"{name}mlp.gate.weight"] = weight(4, HIDDEN)
        state[f"{name}mlp.gate.e_score_correction_bias"] = weight(4) - 1
        for expert in ("shared_experts", *(f"experts.{i}" for i in range(4))):
            state |= network(f"{name}mlp.{expert}.")
    return state


def model(state: dict[str, Tensor] | None = None, **changes: Any) -> DeepSeekModel:
    return raw(DeepSeekModel.from_state_dict)(CONFIG | changes, state or checkpoint())


def run(
    made: DeepSeekModel,
    token_ids: Tensor,
    chunks: list[int],
    route: str = "extend",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and positions [tokens, layers, topk] of one request whose tokens come in chunks."""
    pages = -(-len(token_ids) // PAGE)
    table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(1))[None, :pages]
    caches = made.new_caches(pages + 2, PAGE, dtype)
    plan = made.plan(caches, max_rows=max(chunks))
    done, parts, lists = 0, [], []
    for chunk in chunks:
        step = Step.build([done], [chunk], table, PAGE)
        selected: list[Tensor] = []
        new = token_ids[done : done + chunk]
        hidden = made.forward(new, step, caches, getattr(plan, route), selected=selected)
        parts.append(made.logits(hidden))
        lists.append(torch.stack(selected, dim=1))
        done += chunk
    return torch.cat(parts), torch.cat(lists)


def prompt(count: int = 18) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(2))


def test_what_stands_in_which_layer() -> None:
    made = model()
    assert [layer.indexer is not None for layer in made.layers] == [True, True, False, False]
    kinds = [GatedFeedForward, GatedFeedForward, MixtureOfExperts, MixtureOfExperts]
    assert [type(layer.feed_forward) for layer in made.layers] == kinds
    kinds_named = model(mlp_layer_types=["dense", "dense", "sparse", "sparse"])
    assert [type(layer.feed_forward) for layer in kinds_named.layers] == kinds
    caches = made.new_caches(3, PAGE)
    assert [cache.index is not None for cache in caches] == [True, True, False, False]
    assert all(cache.kv.dtype == made.dtype == torch.float64 for cache in caches)


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("route", ["decode", "extend"])
@pytest.mark.parametrize("chunks", [[18], [7, 11], [15, 1, 1, 1], [14, 4]], ids=str)
def test_chunks_and_routes_give_the_same_logits(chunks: list[int], route: str) -> None:
    made = model()
    expected, lists = run(made, prompt(), [18])
    got, chosen = run(made, prompt(), chunks, route)
    assert torch.equal(chosen, lists)
    assert compare(got, expected).agrees(rel_l2=1e-12)


def test_a_list_of_all_keys_does_not_depend_on_the_indexer() -> None:
    """With a top-k beyond the context its weights change nothing; below it they do."""
    state, other = checkpoint(), checkpoint()
    for name in other:
        if "indexer" in name:
            other[name] = other[name].flip(0)
    for topk, same in ((18, True), (TOPK, False)):
        one, two = (run(model(s, index_topk=topk), prompt(), [18])[0] for s in (state, other))
        assert compare(one, two).agrees(rel_l2=1e-12) is same


def test_shared_layers_take_the_list_of_the_nearest_full_layer_before_them() -> None:
    _, lists = run(model(), prompt(), [18])
    assert torch.equal(lists[:, 2], lists[:, 1]) and torch.equal(lists[:, 3], lists[:, 1])
    assert not torch.equal(lists[:, 0], lists[:, 1])


def test_B153_looking_at_the_lists_changes_nothing() -> None:
    made, token_ids = model(), prompt()
    caches = made.new_caches(5, PAGE)
    plan, step = made.plan(caches, max_rows=18), Step.one_request(0, 18, PAGE)
    selected: list[Tensor] = []
    plain = made.forward(token_ids, step, caches, plan.extend)
    looked = made.forward(token_ids, step, caches, plan.extend, selected=selected)
    assert torch.equal(looked, plain)
    lists = torch.stack(selected, dim=1)
    assert lists.shape == (18, LAYERS, TOPK) and lists.dtype == torch.int32
    # The last row sees the whole context, its own token included.
    for i, row in enumerate(lists):
        assert int(row.max()) <= i
        assert row.ge(0).sum(dim=1).tolist() == [min(i + 1, TOPK)] * LAYERS


def test_a_ragged_batch_gives_each_request_its_own_logits() -> None:
    made, lens = model(), [9, 1, 6]
    prompts = [prompt(18)[i : i + n] for i, n in enumerate(lens)]
    caches = made.new_caches(9, PAGE)
    table = torch.tensor([[8, 2, 5], [0, 7, 7], [1, 4, 7]])
    plan, step = made.plan(caches, max_rows=16), Step.build([0, 0, 0], lens, table, PAGE)
    hidden = made.forward(torch.cat(prompts), step, caches, plan.decode)
    alone = torch.cat([run(made, token_ids, [len(token_ids)])[0] for token_ids in prompts])
    assert compare(made.logits(hidden), alone).agrees(rel_l2=1e-12)


def test_the_module_behind_the_last_layer_is_not_looked_at() -> None:
    """Checkpoints carry the draft module of multi-token prediction as layer num_hidden_layers."""
    plain = checkpoint()
    behind = {
        name.replace("layers.1.", f"layers.{LAYERS}."): tensor.flip(0)
        for name, tensor in plain.items()
        if "layers.1." in name
    }
    behind[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.zeros(3, 5, dtype=torch.float16)
    behind[f"model.layers.{LAYERS}.shared_head.norm.weight"] = torch.zeros(1)
    expected = run(model(plain), prompt(), [18])
    got = run(model(plain | behind), prompt(), [18])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_fp8_caches_hold_the_served_dimensions() -> None:
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    caches = raw(bare_model(changes).new_caches)(2, PAGE, torch.uint8)
    assert caches[0].kv.shape == (2, PAGE, 656)
    assert caches[0].index is not None and caches[0].index.shape == (2, PAGE * 132)
    assert caches[2].index is None


def test_caches_lie_where_the_weights_are() -> None:
    """On the device "meta", which any machine has."""
    for cache in raw(bare_model({}, torch.device("meta")).new_caches)(2, PAGE, torch.float32):
        assert cache.kv.device.type == "meta"
        assert cache.index is None or cache.index.device.type == "meta"


def test_ids_are_looked_at_on_the_host_alone_and_told_by_their_ends() -> None:
    require_ids("token_ids", torch.tensor([0, VOCAB - 1]), VOCAB)
    require_ids("token_ids", torch.zeros(0, dtype=torch.int64), VOCAB)
    require_ids("token_ids", torch.empty(3, dtype=torch.int64, device="meta"), VOCAB)
    made, step = model(), Step.one_request(0, 3, PAGE)
    caches = made.new_caches(1, PAGE)
    plan = made.plan(caches, max_rows=3)
    with pytest.raises(ValueError, match=r"token_ids must lie in 0 \.\. 30, got -1 \.\. 31$"):
        raw(made.forward)(torch.tensor([31, 3, -1]), step, caches, plan.extend)


def bare_model(changes: dict[str, Any], device: torch.device | None = None) -> DeepSeekModel:
    """A model without weights, for what depends on its dimensions alone."""
    nothing = torch.empty(0, 0, device=device)
    return raw(DeepSeekModel)(mla_config_from_hf(CONFIG | changes), nothing, (), nothing, nothing)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.3.mlp.experts.2.up_proj.weight",
        "model.layers.0.self_attn.indexer.k_norm.bias",
        "model.layers.3.self_attn.o_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    state = checkpoint()
    del state[name]
    with pytest.raises(ValueError, match=f"missing {name}"):
        model(state)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.mlp.experts.1.gate_proj.weight",
    ],
)
def test_a_packed_or_cut_tensor_is_named(name: str) -> None:
    state = checkpoint()
    with pytest.raises(TypeError, match=f"{name} must be a float of 16, 32 or 64 bits"):
        model(state | {name: state[name].to(torch.uint8)})
    with pytest.raises(ValueError, match=f"{name} must have the shape"):
        model(state | {name: state[name][..., :-1]})


def test_B045_indexer_weights_in_the_wrong_layers_are_named() -> None:
    """A port that counts the shared layers otherwise would look for weights that are not there."""
    with pytest.raises(ValueError, match=r"missing model.layers.3.self_attn.indexer.wq_b.weight"):
        model(indexer_types=["full", "full", "shared", "full"])


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type must be of a model with an indexer"):
        model(model_type="deepseek_v3")


def test_input_that_does_not_fit_is_named() -> None:
    made = model()
    caches = made.new_caches(5, PAGE)
    plan, step = made.plan(caches, max_rows=3), Step.one_request(0, 3, PAGE)
    forward = raw(made.forward)
    for name, args in (
        ("token_ids", (prompt(4), step, caches, plan.extend)),
        ("token_ids", (prompt(3).float(), step, caches, plan.extend)),
        ("token_ids", (torch.tensor([0, 1, VOCAB]), step, caches, plan.extend)),
        ("token_ids", (torch.tensor([0, 1, -1]), step, caches, plan.extend)),
        ("caches", (prompt(3), step, caches[:3], plan.extend)),
        ("attend", (prompt(3), step, caches, "extend")),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            forward(*args)
    with pytest.raises(ValueError, match="4 rows, but the plan is for 3 at most"):
        forward(prompt(4), Step.one_request(0, 4, PAGE), caches, plan.extend)
    for name, args in (("num_pages", (-1, 4)), ("page_size", (1, 0))):
        with pytest.raises(ValueError, match=name):
            raw(made.new_caches)(*args)

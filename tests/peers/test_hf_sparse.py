"""DeepSeekModel against transformers' DeepSeek-V3.2 and GLM-MoE-DSA: logits of the whole model.

Small random models whose index_topk is far below the length, so that the choice of keys matters.
At least 8 index heads: with fewer, the ReLU gives so many equal scores that the peer disagrees with
itself between a prefill and its own decode steps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.models.deepseek import DeepSeekModel
from mla_ref.numerics import compare

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("plain_calls")]

LENGTH, PAGE_SIZE = 40, 5
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "attn_implementation": "eager",
}
DENSE = {"first_k_dense_replace": 4, "n_routed_experts": 4}
MOE = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SHARED = {"indexer_types": ["full", "full", "shared", "shared"]}
# (config class, model class, what is special)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "v3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM", DENSE | {"rope_parameters": PLAIN}),
    "v3.2-moe-yarn": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        MOE | {"rope_parameters": YARN, "index_n_heads": 16},
    ),
    "glm": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", DENSE | {"rope_parameters": PLAIN}),
    "glm-shared-moe": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        MOE | SHARED | {"rope_parameters": PLAIN},
    ),
}


@pytest.fixture(params=KINDS)
def peer(request: pytest.FixtureRequest) -> torch.nn.Module:
    import transformers

    config_class, model_class, extra = KINDS[request.param]
    settings = COMMON | extra | {"rope_parameters": dict(extra["rope_parameters"])}
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 1.0 if "embed" in name else 0.15, generator=generator)
    return model


def ours(peer: torch.nn.Module) -> DeepSeekModel:
    return DeepSeekModel.from_state_dict(peer.config.to_dict(), peer.state_dict())


def logits_in_steps(
    model: DeepSeekModel, token_ids: Tensor, chunks: list[int], route: str
) -> tuple[Tensor, list[Tensor]]:
    """Logits of one request whose tokens come in chunks, on pages in an order of their own."""
    pages = -(-len(token_ids) // PAGE_SIZE)
    table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(1))[None, :pages]
    caches = model.new_caches(pages + 2, PAGE_SIZE)
    plan = model.plan(caches, max_rows=len(token_ids))
    done, parts, chosen = 0, [], []
    for chunk in chunks:
        step = Step.build([done], [chunk], table, PAGE_SIZE)
        selected: list[Tensor] = []
        hidden = model.forward(
            token_ids[done : done + chunk], step, caches, getattr(plan, route), selected=selected
        )
        parts.append(model.logits(hidden))
        chosen.append(torch.stack(selected, dim=1))
        done += chunk
    return torch.cat(parts), torch.cat(chosen)


@torch.inference_mode()
def test_logits_of_prefill_chunks_and_single_tokens(peer: torch.nn.Module) -> None:
    token_ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(2))
    expected = peer(token_ids[None]).logits[0]
    model = ours(peer)
    for chunks, route in (
        ([LENGTH], "extend"),
        ([21, 15, 4], "extend"),
        ([30] + [1] * 10, "decode"),
    ):
        logits, chosen = logits_in_steps(model, token_ids, chunks, route)
        found = compare(logits, expected)
        assert found.agrees(rel_l2=2e-5), (chunks, found)
        assert chosen.shape == (LENGTH, 4, 8)  # tokens, layers, index_topk


@torch.inference_mode()
def test_the_choice_of_keys_matters(peer: torch.nn.Module) -> None:
    """Without it the test above would pass with any indexer."""
    token_ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(2))
    expected = peer(token_ids[None]).logits[0]
    state = dict(peer.state_dict())
    name = "model.layers.1.self_attn.indexer.k_norm.bias"
    state[name] = state[name].flip(0)
    changed = DeepSeekModel.from_state_dict(peer.config.to_dict(), state)
    logits, _ = logits_in_steps(changed, token_ids, [LENGTH], "extend")
    assert compare(logits, expected).rel_l2 > 1e-3

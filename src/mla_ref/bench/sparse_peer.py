"""transformers' own attention layer of DeepSeek-V3.2, on the weights and the cache of the others.

It keeps the latent in its cache and expands it to the keys and values of all heads in every step;
the indexer's choice is a mask over them. That is right for training and for comparing, and it is
what a reader of the reference code would run.
"""

from typing import Any

import torch
from torch import Tensor

from mla_ref.bench.sparse_step import DecodeStep, Layer, StepResult
from mla_ref.layers import MLAConfig
from mla_ref.platform import require


class PeerStep:
    """The peer's decode step. `fill` restores its cache, which grows with every step."""

    def __init__(self, problem: DecodeStep) -> None:
        """Build the layer around the same tensors; nothing is copied but the cache.

        Raises:
            ImportError: transformers is missing; the message names the extra.
        """
        self._problem = problem
        self._transformers = require("transformers")
        self._config = self._transformers.DeepseekV32Config(**_settings(problem.layer.config))
        self._attention = _attention(self._config, problem.layer)
        self._chosen: list[Tensor] = []
        self._attention.indexer.register_forward_hook(
            lambda module, args, chosen: self._chosen.append(chosen[0])
        )
        positions = problem.step.positions[None]
        modeling = require("transformers.models.deepseek_v32.modeling_deepseek_v32")
        self._rope = modeling.DeepseekV32RotaryEmbedding(self._config)(problem.x, positions)
        self._mask = (torch.arange(problem.length) <= positions[..., None])[:, None]
        self._cache: Any = None

    def fill(self) -> None:
        """Put all tokens before this step into a new cache, outside the clock."""
        problem, config = self._problem, self._problem.layer.config
        old = len(problem.rows) - len(problem.x)
        latent, k_pe = problem.rows[:old].tensor_split([config.kv_lora_rank], dim=1)
        if config.rope.interleaved:  # the peer keeps the first of each pair, then the second
            k_pe = torch.cat([k_pe[:, 0::2], k_pe[:, 1::2]], dim=1)
        self._chosen.clear()
        self._cache = self._transformers.DynamicCache(config=self._config)
        self._cache.update(latent[None, None], k_pe[None, None], 0)
        self._cache.update_indexer(problem.keys[None, :old], 0)

    def __call__(self) -> StepResult:
        """Run the step once."""
        out, _ = self._attention(self._problem.x[None], self._rope, self._mask, cache=self._cache)
        return StepResult(out[0], self._chosen[-1])


def _settings(config: MLAConfig) -> dict[str, Any]:
    """The peer's configuration of these dimensions."""
    indexer, yarn = config.indexer, config.rope.yarn
    if indexer is None:
        raise ValueError(f"{config.name} has no indexer")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if yarn is not None:
        rope = {
            "rope_type": "yarn",
            "rope_theta": config.rope.theta,
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
        "max_position_embeddings": 163840,
        "rope_parameters": rope,
        "attn_implementation": "sdpa",  # what transformers itself takes
    }


def _attention(config: Any, layer: Layer) -> Any:
    modeling = require("transformers.models.deepseek_v32.modeling_deepseek_v32")
    with torch.device("meta"):
        attention: Any = modeling.DeepseekV32Attention(config, layer_idx=0)
    indexer = {f"indexer.{name}": t for name, t in layer.indexer.state_dict().items()}
    attention.load_state_dict({**layer.attention.state_dict(), **indexer}, assign=True)
    return attention.eval().requires_grad_(False)

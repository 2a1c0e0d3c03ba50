"""A whole model of the DeepSeek-V3.2 and GLM-5.2 family: token ids to logits, sparse and paged.

    embedding ──> [ norm, sparse latent attention, norm, feed-forward ] x layers ──> norm ──> head

The attention is this library's; everything else is there so that a checkpoint's own logits come
out. A layer without an indexer takes the positions that the nearest layer before it chose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from mla_ref.backends import AttnSpec, Backend, Plan, TorchBackend
from mla_ref.batching import Step
from mla_ref.checks import require_count, require_integer, require_size
from mla_ref.layers import MLAConfig, index_source, rms_norm
from mla_ref.layers.hf_config import mla_config_from_hf
from mla_ref.models.feed_forward import GatedFeedForward, MixtureOfExperts, MoEConfig
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.language_model import require_ids
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.sparse import Attend, SparseCache, attend_sparse
from mla_ref.models.state_dict import module_tensors


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's parts.

    Attributes:
        attention: Linear maps of the attention.
        indexer: Its indexer, or None where it shares a list.
        feed_forward: One network or a mixture of experts.
        input_norm: Weight of the norm before the attention.
        post_attention_norm: Weight of the norm before the feed-forward part.
    """

    attention: MLALayer
    indexer: IndexerLayer | None
    feed_forward: GatedFeedForward | MixtureOfExperts
    input_norm: Float[Tensor, " hidden"]
    post_attention_norm: Float[Tensor, " hidden"]


@dataclass(frozen=True)
class DeepSeekModel:
    """The model.

    Attributes:
        config: Dimensions of the attention.
        embedding: One row a token.
        layers: In order.
        norm: Weight of the last norm.
        head: One row a token, for the logits.
    """

    config: MLAConfig
    embedding: Float[Tensor, "vocab hidden"]
    layers: tuple[DecoderLayer, ...]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]

    @classmethod
    def from_state_dict(
        cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]
    ) -> "DeepSeekModel":
        """A model that holds the tensors of a checkpoint.

        Args:
            config: The parsed config.json, of type deepseek_v32 or glm_moe_dsa.
            state_dict: All tensors, by their names in the checkpoint. A tensor behind the last
                layer, which is the MTP module's, is not looked at.

        Raises:
            ValueError: The configuration is not of a sparse model, or a tensor is missing,
                unexpected or of another shape.
            TypeError: A tensor is not of 16, 32 or 64 bits.
        """
        mla = mla_config_from_hf(config)
        if mla.indexer is None:
            raise ValueError(f"model_type must be of a model with an indexer, got {mla.name}")
        layers = tuple(
            _decoder_layer(config, mla, state_dict, number) for number in range(mla.num_layers)
        )
        hidden = mla.hidden_size
        embedding = _weight(state_dict, "model.embed_tokens.", "vocab", hidden)
        return cls(
            config=mla,
            embedding=embedding,
            layers=layers,
            norm=_weight(state_dict, "model.norm.", hidden),
            head=_weight(state_dict, "lm_head.", embedding.shape[0], hidden),
        )

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are held in."""
        return self.embedding.dtype

    def new_caches(
        self, num_pages: int, page_size: int, dtype: torch.dtype | None = None
    ) -> list[SparseCache]:
        """An empty cache for each layer, where the weights are.

        Args:
            num_pages: Pages.
            page_size: Tokens a page.
            dtype: uint8 for FP8 rows and keys; default: as the weights.
        """
        require_count("num_pages", num_pages)
        require_count("page_size", page_size, at_least=1)
        return [
            SparseCache.new(
                self.config,
                layer,
                num_pages,
                page_size,
                dtype or self.dtype,
                self.embedding.device,
            )
            for layer in range(self.config.num_layers)
        ]

    def plan(
        self, caches: Sequence[SparseCache], max_rows: int, backend: Backend | None = None
    ) -> Plan:
        """A plan that all layers share, for steps of at most `max_rows` new tokens."""
        kv, indexer = caches[0].kv, self.config.indexer
        spec = AttnSpec(
            num_heads=self.config.num_heads,
            kv_lora_rank=self.config.kv_lora_rank,
            qk_rope_head_dim=self.config.qk_rope_head_dim,
            topk=indexer.topk if indexer else 1,
            page_size=kv.shape[1],
            cache_format="fp8" if kv.dtype == torch.uint8 else "bf16",
            q_dtype=self.dtype,
        )
        backend = backend or TorchBackend()
        return backend.plan(spec, max_rows=max_rows, max_requests=max_rows, device=kv.device)

    def forward(
        self,
        token_ids: Int[Tensor, " padded_tokens"],
        step: Step,
        caches: Sequence[SparseCache],
        attend: Attend,
        *,
        selected: list[Tensor] | None = None,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Run the new tokens of a step; their rows and index keys are written into the caches.

        Args:
            token_ids: The new tokens, one request after the other, as the step describes. Ids
                that lie on a device are not looked at (see `can_look`).
            step: The batch.
            caches: From `new_caches`.
            attend: `decode` or `extend` of a plan from `plan`, or attention along a route.
            selected: Where given, each layer's positions [num_tokens, topk] are appended, for a
                look at what the indexers chose; nothing else changes.

        Returns:
            Hidden states after the last norm, for `logits`.
        """
        require_integer("token_ids", token_ids, "num_tokens")
        require_size("token_ids", token_ids, 0, step.positions.shape[0], "the tokens of the step")
        require_ids("token_ids", token_ids, self.embedding.shape[0])
        if len(caches) != len(self.layers):
            raise ValueError(
                f"caches must be one a layer, {len(self.layers)}, got {len(caches)} of them"
            )
        x, eps = self.embedding[token_ids], self.config.rms_norm_eps
        chosen: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            source = index_source(number, self._full)
            attended, chosen[number] = attend_sparse(
                layer.attention,
                layer.indexer,
                rms_norm(x, layer.input_norm, eps=eps),
                caches[number],
                step,
                attend,
                selected=chosen.get(source),
            )
            x = x + attended
            x = x + layer.feed_forward(rms_norm(x, layer.post_attention_norm, eps=eps))
        if selected is not None:
            selected.extend(chosen.values())
        return rms_norm(x, self.norm, eps=eps)

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""
        return linear(hidden, self.head)

    @property
    def _full(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.indexer is not None)


def _decoder_layer(
    config: Mapping[str, Any], mla: MLAConfig, state_dict: Mapping[str, Tensor], number: int
) -> DecoderLayer:
    name = f"model.layers.{number}."
    attention = MLALayer.from_state_dict(mla, state_dict, prefix=f"{name}self_attn.")
    indexer = None
    if mla.indexer is not None and number in mla.indexer.full_layers:
        indexer = IndexerLayer.from_state_dict(mla, state_dict, prefix=f"{name}self_attn.indexer.")
    kinds = config.get("mlp_layer_types")
    dense = number < config["first_k_dense_replace"] if kinds is None else kinds[number] == "dense"
    feed_forward: GatedFeedForward | MixtureOfExperts
    if dense:
        feed_forward = GatedFeedForward.from_state_dict(state_dict, f"{name}mlp.")
    else:
        moe = MoEConfig(
            num_experts=config["n_routed_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            n_group=config["n_group"],
            topk_group=config["topk_group"],
            routed_scaling_factor=config["routed_scaling_factor"],
            norm_topk_prob=config["norm_topk_prob"],
        )
        feed_forward = MixtureOfExperts.from_state_dict(moe, state_dict, f"{name}mlp.")
    return DecoderLayer(
        attention,
        indexer,
        feed_forward,
        _weight(state_dict, f"{name}input_layernorm.", mla.hidden_size),
        _weight(state_dict, f"{name}post_attention_layernorm.", mla.hidden_size),
    )


def _weight(state_dict: Mapping[str, Tensor], prefix: str, *shape: int | str) -> Tensor:
    """The one tensor of a module that has no other."""
    return module_tensors(state_dict, {"weight": shape}, prefix=prefix)["weight"]

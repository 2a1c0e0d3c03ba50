"""What climbs the ladder: one layer's queries, keys and latents, from a real text or at random."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.attention import expand_kv
from mla_ref.checks import require_choice, require_count
from mla_ref.layers import PRESETS, MLAConfig, index_source, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.projections import LatentProjections
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import load_indexers

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
RANDOM_MODELS = tuple(name for name in PRESETS if name != "smollm2-packed")
MODELS = ("smollm2", *RANDOM_MODELS)


@dataclass(frozen=True)
class LatentView:
    """A layer's attention in MLA form.

    Attributes:
        name: "packed", "split" (two exact MLA forms of SmolLM2) or the model's name.
        q_nope: Part of the queries without positions.
        q_pe: Part of the queries turned by RoPE.
        kv_rows: Row to cache of each token.
        w_uk: Up-projection to each head's key.
        w_uv: Up-projection to each head's value.
    """

    name: str
    q_nope: Float[Tensor, "n h d_n"]
    q_pe: Float[Tensor, "n h d_r"]
    kv_rows: Float[Tensor, "n d_row"]
    w_uk: Float[Tensor, "h d_n d_c"]
    w_uv: Float[Tensor, "h d_v d_c"]

    @classmethod
    def of(
        cls, name: str, layer: LatentProjections, x: Float[Tensor, "n hidden"], dtype: torch.dtype
    ) -> "LatentView":
        """Project a layer's input and round everything to `dtype`."""
        positions = torch.arange(x.shape[0])
        q_nope, q_pe = layer.queries(layer.query_latent(x), positions)
        tensors = (q_nope, q_pe, layer.kv_rows(x, positions), layer.w_uk, layer.w_uv)
        return cls(name, *(t.to(dtype) for t in tensors))


@dataclass(frozen=True)
class IndexView:
    """What the indexer that serves a layer makes of the text.

    Attributes:
        q: Index queries, turned.
        weights: Factors of the index heads.
        k: Index keys.
        topk: Keys that a row chooses.
        scale_rule: Of the FP8 scales.
    """

    q: Float[Tensor, "n index_heads d_i"]
    weights: Float[Tensor, "n index_heads"]
    k: Float[Tensor, "n d_i"]
    topk: int
    scale_rule: str

    @classmethod
    def of(
        cls, indexer: IndexerLayer, latent: Float[Tensor, "n d_q"], x: Float[Tensor, "n hidden"]
    ) -> "IndexView":
        """Run an indexer. A row chooses a quarter of the text at most: some are left out."""
        positions, config = torch.arange(x.shape[0]), indexer.config
        q, weights = indexer.queries(latent, x, positions)
        topk = min(config.topk, max(x.shape[0] // 4, 1))
        return cls(q, weights, indexer.keys(x, positions), topk, config.scale_rule)


@dataclass(frozen=True)
class LayerActivations:
    """One layer's inputs for every rung.

    Attributes:
        layer: Index in the model.
        q: Queries as rungs 1 to 4 take them.
        k: Keys.
        v: Values.
        latent: The same layer in MLA form; rung 5 takes each, rung 6 the last.
        softmax_scale: Factor on q·k.
        index: The indexer's view, or None where the model has none.
    """

    layer: int
    q: Float[Tensor, "n h_q d_qk"]
    k: Float[Tensor, "n h_kv d_qk"]
    v: Float[Tensor, "n h_kv d_v"]
    latent: tuple[LatentView, ...]
    softmax_scale: float
    index: IndexView | None = None


def smollm2_activations(
    model: SmolLM2, token_ids: list[int], layers: tuple[int, ...], dtype: torch.dtype
) -> list[LayerActivations]:
    """Run a text through SmolLM2 and take the attention inputs of some layers.

    The trunk runs in the model's own dtype; q, k, v and latents are rounded to `dtype`.
    """
    config = preset("smollm2-packed")
    indexers = load_indexers(config, dtype=model.dtype) if _is_smollm2(model, config) else {}
    sources = {layer: index_source(layer, tuple(indexers)) for layer in layers if indexers}
    inputs = model.attention_inputs(token_ids, tuple({*layers, *sources.values()}))
    result = []
    for layer in layers:
        x = inputs[layer]
        gqa = model.gqa(layer)
        q, k, v = gqa.qkv(x, torch.arange(len(token_ids)))
        views = tuple(
            LatentView.of(name, projections, x, dtype)
            for name, projections in (
                ("split", model.split(layer)),
                ("packed", model.packed(layer)),
            )
        )
        index = None
        if layer in sources:
            source = inputs[sources[layer]]
            index = IndexView.of(indexers[sources[layer]], source, source)
        qkv = (q.to(dtype), k.to(dtype), v.to(dtype))
        result.append(LayerActivations(layer, *qkv, views, gqa.softmax_scale, index))
    return result


def random_activations(
    model: str, tokens: int, layers: tuple[int, ...], dtype: torch.dtype
) -> list[LayerActivations]:
    """A published model's full head geometry with random weights and a random residual stream.

    Keys and values for rungs 1 to 4 are expanded from the latents. The layer's index is its seed.
    """
    config = preset(require_choice("model", model, RANDOM_MODELS))
    require_count("tokens", tokens, at_least=1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    result = []
    for layer in layers:
        projections = MLALayer.random(config, seed=layer, dtype=wide)
        generator = torch.Generator().manual_seed(layer)
        x = torch.randn(tokens, config.hidden_size, generator=generator, dtype=wide)
        with torch.inference_mode():
            view = LatentView.of(model, projections, x, dtype)
            k, v = expand_kv(view.kv_rows, view.w_uk, view.w_uv)
            index = None
            if config.indexer is not None:
                indexer = IndexerLayer.random(config, seed=layer, dtype=wide)
                index = IndexView.of(indexer, projections.query_latent(x), x)
        q = torch.cat([view.q_nope, view.q_pe], dim=-1)
        result.append(LayerActivations(layer, q, k, v, (view,), config.softmax_scale, index))
    return result


def _is_smollm2(model: SmolLM2, config: MLAConfig) -> bool:
    """Whether the indexers of this package were trained on a model of these dimensions."""
    return (model.config.num_layers, model.config.hidden_size) == (
        config.num_layers,
        config.hidden_size,
    )

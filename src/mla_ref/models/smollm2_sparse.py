"""SmolLM2 with sparse attention: the packed form, a trained indexer, and a backend.

The indexers were trained for this project on the model's own attention (`mla_ref.training`). As in
GLM-5.2 only some layers have one, and the layers behind each share its list. Nothing else of the
model is changed: with `topk` as long as the text, it is SmolLM2.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from mla_ref.backends import AttnSpec, Backend, TorchBackend
from mla_ref.batching import (
    Route,
    ScratchPlan,
    ServingLimits,
    SpecMode,
    Step,
    attend_along,
    plan_scratch,
    route,
    route_per_request,
)
from mla_ref.checks import require_choice, require_count
from mla_ref.layers import MLAConfig, index_source, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.models.sparse import Attend, SparseCache, attend_sparse
from mla_ref.models.sparse_parts import SparseParts

CACHE_DTYPES = {"fp8": torch.uint8, "fp32": torch.float32}


@dataclass(frozen=True)
class SparseState:
    """What a run holds.

    Attributes:
        caches: Each layer's cache.
        scratch: Buffers of both kernels, which all layers share.
    """

    caches: list[SparseCache]
    scratch: ScratchPlan

    @property
    def nbytes(self) -> int:
        """Bytes of all caches; the buffers are not counted."""
        return sum(
            part.nbytes
            for cache in self.caches
            for part in (cache.kv, cache.index)
            if part is not None
        )


class SparseSmolLM2:
    """The model, with the interface of `SmolLM2`, so that `generate` runs it.

    Attributes:
        dense: The model whose weights it shares.
        attention: Dimensions, with those of the indexer.
        indexers: The full layers' indexers, by layer.
        backend: Who computes the attention.
        parts: Who does the steps around it: the backend where it can.
        cache_format: "fp8", rows of 656 bytes and index keys of 132, or "fp32".
        max_rows: New tokens a step at most, where a cache is made without limits.
    """

    def __init__(
        self,
        dense: SmolLM2,
        indexers: Mapping[int, IndexerLayer],
        *,
        attention: MLAConfig | None = None,
        backend: Backend | None = None,
        cache_format: str = "fp8",
        max_rows: int = 256,
    ) -> None:
        """Put the parts together.

        Args:
            dense: The model.
            indexers: One for each of `attention.indexer.full_layers`.
            attention: Dimensions; left out, those of the preset "smollm2-packed".
            backend: Left out, the torch backend.
            cache_format: How rows and index keys are stored.
            max_rows: New tokens a step at most, where a cache is made without limits.

        Raises:
            ValueError: The indexers are not those that the dimensions ask for, or a choice is
                unknown.
        """
        self.dense = dense.with_attention("packed")
        self.attention = attention or preset("smollm2-packed")
        self.indexers = dict(indexers)
        self.backend = backend or TorchBackend()
        self.parts = SparseParts.of(self.backend.parts)
        self.cache_format = require_choice("cache_format", cache_format, tuple(CACHE_DTYPES))
        self.max_rows = require_count("max_rows", max_rows, at_least=1)
        if self.attention.indexer is None:
            raise ValueError(f"attention must have an indexer, {self.attention.name} has none")
        if tuple(sorted(self.indexers)) != self.attention.indexer.full_layers:
            raise ValueError(
                f"indexers must be those of layers {self.attention.indexer.full_layers}, got "
                f"{tuple(sorted(self.indexers))}"
            )

    @classmethod
    def trained(
        cls, dense: SmolLM2, *, topk: int | None = None, **kwargs: object
    ) -> "SparseSmolLM2":
        """The model with the indexers that come with this package.

        Args:
            dense: SmolLM2-135M.
            topk: Keys that a row attends to; left out, the preset's 256.
            **kwargs: As in the constructor.
        """
        attention = preset("smollm2-packed")
        if topk is not None and attention.indexer is not None:
            attention = replace(attention, indexer=replace(attention.indexer, topk=topk))
        indexers = {
            layer: indexer.to(dense.device)
            for layer, indexer in load_indexers(attention, dtype=dense.dtype).items()
        }
        return cls(dense, indexers, attention=attention, **kwargs)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "SparseSmolLM2":
        """The same model with its weights on another device."""
        return SparseSmolLM2(
            self.dense.to(device),
            {layer: deepcopy(indexer).to(device) for layer, indexer in self.indexers.items()},
            attention=self.attention,
            backend=self.backend,
            cache_format=self.cache_format,
            max_rows=self.max_rows,
        )

    @property
    def config(self) -> SmolLM2Config:
        """The model's dimensions."""
        return self.dense.config

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and so caches and steps."""
        return self.dense.device

    @property
    def captures(self) -> bool:
        """Whether `forward` can be captured in a graph: the lists have a fixed shape."""
        return True

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        *,
        limits: ServingLimits | None = None,
        mode: str | None = None,
    ) -> SparseState:
        """Empty caches for all layers, and buffers for both kernels.

        Args:
            num_pages: Pages for all requests together.
            page_size: Tokens a page.
            dtype: Overrides what `cache_format` says: uint8 for FP8.
            limits: What the server is configured for; left out, steps of at most `max_rows`
                tokens and no drafts.
            mode: Where verifier batches go, "auto" (default), "0" or "1"; see `SpecMode`.
        """
        require_count("num_pages", num_pages)
        require_count("page_size", page_size, at_least=1)
        dtype = dtype or CACHE_DTYPES[self.cache_format]
        config, indexer = self.attention, self.attention.indexer
        caches = [
            SparseCache.new(config, layer, num_pages, page_size, dtype, self.device)
            for layer in range(config.num_layers)
        ]
        spec = AttnSpec(
            num_heads=config.num_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            topk=indexer.topk if indexer else 1,
            page_size=page_size,
            cache_format="fp8" if dtype == torch.uint8 else "bf16",
            q_dtype=self.dense.dtype,
        )
        scratch = plan_scratch(
            self.backend,
            spec,
            limits or ServingLimits(self.max_rows, self.max_rows),
            mode or SpecMode.AUTO,
            device=self.device,
        )
        return SparseState(caches, scratch)

    def route(self, step: Step, cache: SparseState, *, per_request: bool = False) -> Route:
        """Which kernel takes which rows of a step, and why.

        Args:
            step: The batch.
            cache: From `new_cache`, with the buffers and the mode.
            per_request: Each request to the kernel that it would get alone, so that a chunk of a
                prompt does not take the verifier's rows with it.
        """
        return (route_per_request if per_request else route)(step, cache.scratch)

    def forward(
        self,
        token_ids: Int[Tensor, " padded_tokens"],
        step: Step,
        cache: SparseState,
        *,
        route: Route | None = None,
        selected: list[Tensor] | None = None,
        attend: Attend | None = None,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Run the new tokens of a step; rows and index keys are written into the caches.

        Args:
            token_ids: The new tokens, one request after the other, as the step describes.
            step: The batch.
            cache: From `new_cache`.
            route: From `route`; left out, one kernel for the batch, by `route`.
            selected: Where given, each layer's positions are appended; nothing else changes.
            attend: Who attends, in place of the backend and without a route.

        Returns:
            Hidden states after the last norm, for `logits`.
        """
        x = self.dense.embed(token_ids, step)
        if attend is None:
            attend = partial(attend_along, route or self.route(step, cache), cache.scratch)
        full = tuple(sorted(self.indexers))
        chosen: dict[int, Tensor] = {}
        for layer, weights in enumerate(self.dense.layers):
            attended, chosen[layer] = attend_sparse(
                weights.packed(),
                self.indexers.get(layer),
                weights.attention_input(x),
                cache.caches[layer],
                step,
                attend,
                selected=chosen.get(index_source(layer, full)),
                parts=self.parts,
            )
            x = weights.feed_forward(x + attended)
        if selected is not None:
            selected.extend(chosen.values())
        return self.dense.last_norm(x)

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""
        return self.dense.logits(hidden)


def load_indexers(
    config: MLAConfig, path: Path | None = None, dtype: torch.dtype = torch.float32
) -> dict[int, IndexerLayer]:
    """Trained indexers by layer.

    Args:
        config: The dimensions.
        path: A safetensors file; left out, the one in this package.
        dtype: What to hold the weights in; the file has bfloat16.

    Raises:
        ValueError: A tensor is missing or does not fit.
    """
    package = files("mla_ref.models") / "data" / "smollm2_indexer.safetensors"
    with as_file(package) if path is None else nullcontext(path) as found:
        state = {name: tensor.to(dtype) for name, tensor in load_file(found).items()}
    full = config.indexer.full_layers if config.indexer else ()
    return {
        layer: IndexerLayer.from_state_dict(config, state, prefix=f"layers.{layer}.indexer.")
        for layer in full
    }

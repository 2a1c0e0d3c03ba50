"""Multi-token prediction (MTP): one small layer that guesses the token after the next.

DeepSeek-V3's module (arXiv:2412.19437, section 2.2), as DeepSeek-V3.2 and GLM-5.2 serve it. It
knows what the model does not know yet: the token that was just chosen.

    e = embedding of token t+1            h = the model's hidden state at position t
    x = W [norm(e) ; norm(h)]             the embedding first
    h' = decoder layer(x) at position t, with a cache of its own
    logits of token t+2 = shared head(norm(h'))

Ids are shifted left by one against positions, so position 0 holds token 1, a real token, and its
embedding counts like any other (vllm#33299 zeroed it). To guess n tokens, the layer runs n times:
h' of one pass is h of the next, one position further.

The head is the model's own. Its 49,152 rows are 113 MB in float32 and the whole module 17 MB, so
drafts come from the rows of the most frequent tokens alone: 8,192 of them, 19 MB. A token outside
them is never guessed and still chosen by the model: drafts decide the speed, never the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import as_file, files
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.checks import describe, require_integer, require_size
from mla_ref.layers import project, rms_norm
from mla_ref.models.language_model import require_ids
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import LayerWeights, SmolLM2Config, layer_shapes


@dataclass(frozen=True)
class MTPWeights:
    """The module's own tensors; embedding and head are the model's.

    Attributes:
        embedding_norm: Of the new token's embedding.
        hidden_norm: Of the hidden state.
        projection: From both, the embedding first, to one row.
        layer: The decoder layer.
        head_norm: Before the head.
        draft_tokens: The tokens that can be guessed, rising.
    """

    embedding_norm: Float[Tensor, " hidden"]
    hidden_norm: Float[Tensor, " hidden"]
    projection: Float[Tensor, "hidden two_hidden"]
    layer: LayerWeights
    head_norm: Float[Tensor, " hidden"]
    draft_tokens: Int[Tensor, " draft_vocab"]

    @classmethod
    def random(
        cls, config: SmolLM2Config, draft_tokens: Int[Tensor, " draft_vocab"], seed: int = 0
    ) -> "MTPWeights":
        """Weights to start training from: the projection passes the hidden state on, with noise."""
        generator = torch.Generator().manual_seed(seed)
        shapes = _shapes(config)

        def draw(name: str) -> Tensor:
            shape = shapes[name]
            if len(shape) == 1:
                return torch.ones(shape)
            noise = torch.randn(shape, generator=generator) * 0.5 * shape[-1] ** -0.5
            if name == "projection":
                noise[:, shape[0] :] += torch.eye(shape[0])
            return noise

        return cls.from_named(
            {name: draw(name) for name in shapes} | {"draft_tokens": draft_tokens}
        )

    @classmethod
    def read(
        cls, config: SmolLM2Config, path: Path | None = None, dtype: torch.dtype = torch.float32
    ) -> "MTPWeights":
        """Trained weights.

        Args:
            config: Dimensions of the model.
            path: A safetensors file; left out, the one in this package.
            dtype: What to hold the weights in; the file has bfloat16.

        Raises:
            ValueError: A tensor is missing or does not fit the model.
        """
        package = files("mla_ref.models") / "data" / "smollm2_mtp.safetensors"
        if path is not None:
            named = load_file(path)
        else:
            with as_file(package) as found:
                named = load_file(found)
        for name, shape in _shapes(config).items():
            if name not in named or tuple(named[name].shape) != shape:
                raise ValueError(
                    f"{path or package}: {name} must be of shape {list(shape)}, got "
                    f"{describe(named.get(name))}"
                )
        tokens = named.get("draft_tokens")
        if tokens is None or tokens.ndim != 1 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{path or package}: draft_tokens must be int32 or int64 numbers of shape "
                f"[draft_vocab], got {describe(tokens)}"
            )
        return cls.from_named(named).to(dtype=dtype)

    @classmethod
    def from_named(cls, named: Mapping[str, Tensor]) -> "MTPWeights":
        """From tensors by the names of `named`."""
        layer = {f.name: named[f"layer.{f.name}"] for f in fields(LayerWeights)}
        others = {f.name: named[f.name] for f in fields(cls) if f.name != "layer"}
        return cls(layer=LayerWeights(**layer), **others)

    def named(self) -> dict[str, Tensor]:
        """Every tensor by name, as the file holds them."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer"}
        return own | {f"layer.{f.name}": getattr(self.layer, f.name) for f in fields(LayerWeights)}

    def to(
        self, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> "MTPWeights":
        """The same weights elsewhere or in another dtype; the tokens stay integers."""
        integers = "draft_tokens"
        return self.from_named(
            {
                name: tensor.to(device=device, dtype=None if name == integers else dtype)
                for name, tensor in self.named().items()
            }
        )

    def mix(
        self, embedding: Float[Tensor, "*s hidden"], hidden: Float[Tensor, "*s hidden"], eps: float
    ) -> Float[Tensor, "*s hidden"]:
        """What the decoder layer takes, from a token's embedding and the state before it."""
        parts = (
            rms_norm(embedding, self.embedding_norm, eps=eps),
            rms_norm(hidden, self.hidden_norm, eps=eps),
        )
        return project(torch.cat(parts, dim=-1), self.projection)


class MTPModule:
    """The module on its model, with a paged cache of one layer.

    Attributes:
        model: Whose embedding, head and hidden states it takes; its weights are shared.
        weights: The module's own.
        head: Rows of the model's head for the tokens that can be guessed.
    """

    def __init__(self, model: SmolLM2, weights: MTPWeights) -> None:
        """Put the parts together.

        Raises:
            TypeError: An argument is not what its name says.
            ValueError: There is no token to guess, or one is not in the model's vocabulary.
        """
        if not isinstance(model, SmolLM2):
            raise TypeError(f"model must be a SmolLM2, got {describe(model)}")
        if not isinstance(weights, MTPWeights):
            raise TypeError(f"weights must be MTPWeights, got {describe(weights)}")
        vocab = model.config.vocab_size
        tokens = require_integer("draft_tokens", weights.draft_tokens, "draft_vocab")
        if not tokens.numel():
            raise ValueError("draft_tokens must hold a token at least, got none")
        # Looked at wherever they lie, once and before any step; on "meta" they are nowhere.
        if tokens.device.type != "meta":
            require_ids("draft_tokens", tokens.cpu(), vocab)
        self.model, self.weights = model, weights
        self._layer = model.new_layer(weights.layer)
        self.head = model.weights.embedding[tokens.long()]

    @classmethod
    def trained(cls, model: SmolLM2) -> "MTPModule":
        """With the weights that this package holds, for SmolLM2-135M."""
        weights = MTPWeights.read(model.config, dtype=model.dtype)
        return cls(model, weights.to(device=model.device))

    def new_cache(
        self, num_pages: int, page_size: int, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*rows"]:
        """An empty cache, with the pages of the model's own.

        The block table of a request serves both: position t of the module lies in the slot of
        position t of the model.
        """
        shape = self._layer.cache_shape(num_pages, page_size)
        return torch.zeros(shape, dtype=dtype or self.model.dtype, device=self.model.device)

    def forward(
        self,
        next_ids: Int[Tensor, " num_tokens"],
        hidden: Float[Tensor, "num_tokens hidden"],
        step: Step,
        cache: Float[Tensor, "*rows"],
    ) -> Float[Tensor, "num_tokens hidden"]:
        """Run some positions; their rows are written into the module's cache.

        Args:
            next_ids: The token *after* each position.
            hidden: The model's hidden state at each position, or this module's, one position back.
            step: The positions.
            cache: From `new_cache`.

        Returns:
            Hidden states, for `logits` and for the next pass.

        Raises:
            ValueError: There are not as many ids or states as tokens in the step, or an id is not
                in the vocabulary.
            TypeError: Ids are not integers, or states not of the model's dtype.
        """
        self._require_hidden(hidden)
        if hidden.ndim != 2:
            raise ValueError(f"hidden must have the shape [s, hidden], got {describe(hidden)}")
        require_size("hidden", hidden, 0, len(step.positions), "one row a token of the step")
        embedding = self.model.embed(next_ids, step, name="next_ids")
        x = self.weights.mix(embedding, hidden, self.model.config.rms_norm_eps)
        return self._layer.forward(x, step, cache)

    def logits(self, hidden: Float[Tensor, "*s hidden"]) -> Float[Tensor, "*s draft_vocab"]:
        """Scores of the token after the next one, over the tokens that can be guessed."""
        self._require_hidden(hidden)
        eps = self.model.config.rms_norm_eps
        return project(rms_norm(hidden, self.weights.head_norm, eps=eps), self.head)

    def guess(self, hidden: Float[Tensor, "*s hidden"]) -> Int[Tensor, "*s"]:
        """The likeliest token of each row, as an id of the whole vocabulary."""
        return self.weights.draft_tokens[self.logits(hidden).argmax(dim=-1)].long()

    def _require_hidden(self, hidden: object) -> None:
        """Raise unless these can be hidden states of the model."""
        size, dtype = self.model.config.hidden_size, self.weights.projection.dtype
        if not isinstance(hidden, Tensor) or hidden.dtype != dtype:
            raise TypeError(f"hidden must be a tensor of {dtype}, got {describe(hidden)}")
        if hidden.ndim == 0:
            raise ValueError(f"hidden must have the shape [..., hidden], got {describe(hidden)}")
        require_size("hidden", hidden, hidden.ndim - 1, size, "the model's hidden size")


def _shapes(config: SmolLM2Config) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    own = {
        "embedding_norm": (hidden,),
        "hidden_norm": (hidden,),
        "projection": (hidden, 2 * hidden),
        "head_norm": (hidden,),
    }
    return own | {f"layer.{name}": shape for name, shape in layer_shapes(config).items()}

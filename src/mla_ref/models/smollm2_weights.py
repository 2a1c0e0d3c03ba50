"""SmolLM2's dimensions and weights (arXiv:2502.02737), from a GGUF file or at random.

The architecture is Llama's: RMSNorm, grouped-query attention with rotary positions in interleaved
pairs, a gated SiLU feed-forward. SmolLM2-135M has 30 layers of width 576, 9 query heads and 3 KV
heads of 64, and 134,515,008 parameters; its embedding is also the last projection.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_count, require_scale
from mla_ref.layers import RopeConfig
from mla_ref.models.gguf_file import GGUFFile


@dataclass(frozen=True)
class SmolLM2Config:
    """Dimensions of a model; the defaults make one that is small enough for a test.

    Attributes:
        num_layers: Layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head; even.
        intermediate_size: Width of the feed-forward.
        vocab_size: Tokens.
        context_length: Positions the model was trained for.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Of every RMSNorm.
    """

    num_layers: int = 3
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 80
    vocab_size: int = 101
    context_length: int = 256
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raise a ValueError that names the dimension which cannot be."""
        for field in fields(self):
            if field.type is int:
                require_count(field.name, getattr(self, field.name), at_least=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        require_scale("rms_norm_eps", self.rms_norm_eps)
        _ = self.rope  # checks head_dim and rope_theta

    @property
    def rope(self) -> RopeConfig:
        """Rotary positions of a whole head, pairs (2i, 2i+1)."""
        return RopeConfig(self.head_dim, self.rope_theta, interleaved=True)

    @classmethod
    def read(cls, file: GGUFFile) -> "SmolLM2Config":
        """The dimensions that a GGUF file states.

        Raises:
            ValueError: A dimension is missing, or the file is of another architecture or stretches
                its context, which would run and be wrong.
        """
        if (architecture := file.get("general.architecture", str)) != "llama":
            raise ValueError(f"{file.path}: the architecture is {architecture!r}, expected 'llama'")
        stretched = [key for key in file.metadata if key.startswith("llama.rope.scaling.")]
        if stretched:
            raise ValueError(f"{file.path}: rotary scaling is not known here: {stretched[0]}")
        hidden_size = file.get("llama.embedding_length", int)
        num_heads = file.get("llama.attention.head_count", int)
        head_dim = hidden_size // max(num_heads, 1)
        for key in ("llama.rope.dimension_count", "llama.attention.key_length"):
            if file.metadata.get(key, head_dim) != head_dim:
                raise ValueError(f"{file.path}: {key} is {file.metadata[key]}, expected {head_dim}")
        return cls(
            num_layers=file.get("llama.block_count", int),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=file.get("llama.attention.head_count_kv", int),
            head_dim=head_dim,
            intermediate_size=file.get("llama.feed_forward_length", int),
            vocab_size=len(file.get("tokenizer.ggml.tokens", list)),
            context_length=file.get("llama.context_length", int),
            rope_theta=file.get("llama.rope.freq_base", float),
            rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
        )


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors under their GGUF names; a matrix maps its last dimension to its first."""

    attn_norm: Float[Tensor, " hidden"]
    attn_q: Float[Tensor, "q_width hidden"]
    attn_k: Float[Tensor, "kv_width hidden"]
    attn_v: Float[Tensor, "kv_width hidden"]
    attn_output: Float[Tensor, "hidden q_width"]
    ffn_norm: Float[Tensor, " hidden"]
    ffn_gate: Float[Tensor, "intermediate hidden"]
    ffn_up: Float[Tensor, "intermediate hidden"]
    ffn_down: Float[Tensor, "hidden intermediate"]


@dataclass(frozen=True)
class SmolLM2Weights:
    """All tensors of a model.

    Attributes:
        config: Its dimensions.
        embedding: One row a token; also the last projection.
        layers: Every layer's tensors.
        output_norm: Weight of the RMSNorm before the last projection.
    """

    config: SmolLM2Config
    embedding: Float[Tensor, "vocab hidden"]
    layers: tuple[LayerWeights, ...]
    output_norm: Float[Tensor, " hidden"]

    @classmethod
    def read(cls, file: GGUFFile, dtype: torch.dtype = torch.float32) -> "SmolLM2Weights":
        """Dequantise the tensors of a GGUF file.

        Args:
            file: The file.
            dtype: What to hold them in. SmolLM2-135M takes 538 MB in float32.

        Raises:
            ValueError: A tensor is missing or of another shape than the dimensions say, or the
                file holds one that this architecture does not use.
        """
        config = SmolLM2Config.read(file)
        unused = set(file.tensors)

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            unused.discard(name)
            return file.tensor(name, shape, dtype)

        weights = cls._collect(config, read)
        if unused:
            raise ValueError(
                f"{file.path}: the tensor {min(unused)} has no place in this "
                "architecture; without it the model would be another one"
            )
        return weights

    @classmethod
    def random(
        cls, config: SmolLM2Config, seed: int, dtype: torch.dtype = torch.float32
    ) -> "SmolLM2Weights":
        """Random weights whose activations keep their size; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)

        def draw(_: str, shape: tuple[int, ...]) -> Tensor:
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            weight = noise * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * noise
            return weight.to(dtype)

        return cls._collect(config, draw)

    def to(self, device: torch.device) -> "SmolLM2Weights":
        """The same tensors on another device."""
        tensors = {name: tensor.to(device) for name, tensor in self._named().items()}
        return self._collect(self.config, lambda name, _: tensors[name])

    def _named(self) -> dict[str, Tensor]:
        """Every tensor by its GGUF name."""
        named = {
            f"blk.{layer}.{name}.weight": getattr(weights, name)
            for layer, weights in enumerate(self.layers)
            for name in layer_shapes(self.config)
        }
        return named | {
            "token_embd.weight": self.embedding,
            "output_norm.weight": self.output_norm,
        }

    @classmethod
    def _collect(
        cls, config: SmolLM2Config, tensor: Callable[[str, tuple[int, ...]], Tensor]
    ) -> "SmolLM2Weights":
        """Ask `tensor` for every tensor of the architecture, by GGUF name and shape."""
        hidden, shapes = config.hidden_size, layer_shapes(config)
        return cls(
            config=config,
            embedding=tensor("token_embd.weight", (config.vocab_size, hidden)),
            layers=tuple(
                LayerWeights(
                    **{
                        name: tensor(f"blk.{layer}.{name}.weight", shape)
                        for name, shape in shapes.items()
                    }
                )
                for layer in range(config.num_layers)
            ),
            output_norm=tensor("output_norm.weight", (hidden,)),
        )


def layer_shapes(config: SmolLM2Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, by the names of `LayerWeights`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (q_width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, q_width),
        "ffn_norm": (hidden,),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
    }

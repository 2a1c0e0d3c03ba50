"""The dimensions of a model's lightning indexer, and which layers have one."""

from dataclasses import dataclass

from mla_ref.checks import describe, require_choice, require_count
from mla_ref.numerics.float8 import SCALE_RULES


@dataclass(frozen=True)
class IndexerConfig:
    """Dimensions of the lightning indexer (DeepSeek-V3.2 paper; GLM-5.2's IndexShare).

    Attributes:
        num_heads: Index heads, `index_n_heads` in a checkpoint's configuration.
        full_layers: Layers that compute their own top-k; the others reuse the nearest one before
            them and have no indexer weights.
        head_dim: Width of an index head and of the one key a token, `index_head_dim`.
        topk: Keys that a row attends to, `index_topk`.
        rope_interleaved: Pairs (2i, 2i+1) for GLM, (i, i + d/2) for DeepSeek-V3.2, whose main
            attention is interleaved all the same (sglang#13495): one flag cannot serve both.
        hadamard: Turn queries and keys by a Hadamard matrix before they are quantised. Scores do
            not change, FP8 error does. One switch for both sides (ROCm/ATOM#1507).
        scale_rule: How the FP8 scales of keys and queries are made, see `group_scale`.
    """

    num_heads: int
    full_layers: tuple[int, ...]
    head_dim: int = 128
    topk: int = 2048
    rope_interleaved: bool = False
    hadamard: bool = False
    scale_rule: str = "pow2-floor"

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        for name in ("num_heads", "head_dim", "topk"):
            require_count(name, getattr(self, name), at_least=1)
        for name in ("rope_interleaved", "hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {describe(getattr(self, name))}")
        require_choice("scale_rule", self.scale_rule, SCALE_RULES)
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise ValueError(f"head_dim must be a power of two for hadamard, got {self.head_dim}")
        layers = self.full_layers
        if not isinstance(layers, tuple):
            raise TypeError(f"full_layers must be a tuple of ints, got {describe(layers)}")
        for layer in layers:
            require_count("full_layers", layer)
        if not layers or layers[0] != 0 or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"full_layers must rise from 0, since layer 0 has none before it to take a list "
                f"from, got {describe(layers)}"
            )

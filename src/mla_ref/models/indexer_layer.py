"""The lightning indexer of one layer, with the weights of a checkpoint (DeepSeek-V3.2, GLM-5.2).

It has linear maps of its own and shares the query latent with the attention:

    q        per head  [ rope d_r | rest ]    from the query latent
    k        one       [ rope d_r | rest ]    from x, after a LayerNorm with bias
    weights  one number a head                from x, in float32

The rotary part stands first here and last in the attention's queries. Its pairs are half-split for
DeepSeek-V3.2 and interleaved for GLM, while the attention of both is interleaved: `IndexerConfig`
says which, and a port that used one for both lost accuracy on long texts (sglang#13495).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_ref.checks import describe, require_float, require_integer, require_size
from mla_ref.layers import (
    IndexerConfig,
    MLAConfig,
    Projection,
    RopeConfig,
    apply_rope,
    inverse_frequencies,
    layer_norm,
    rope_table,
)
from mla_ref.models.state_dict import module_tensors
from mla_ref.numerics import hadamard

# Of the key's LayerNorm, in every published indexer, whatever rms_norm_eps says.
K_NORM_EPS = 1e-6


class IndexerLayer(nn.Module):
    """Index queries, keys and head weights of one layer.

    The submodules carry the names of Hugging Face checkpoints. The parameters ask for no gradient,
    as those of `MLALayer`; who trains an indexer switches them on.
    """

    def __init__(
        self,
        config: IndexerConfig,
        rope: RopeConfig,
        *,
        hidden_size: int,
        query_width: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        """Make a layer of uninitialised weights.

        Args:
            config: The indexer's dimensions.
            rope: The attention's rotary embedding; how numbers pair is `config`'s.
            hidden_size: Width of x.
            query_width: Width of the query latent.
            dtype: Of the weights; those of `weights_proj` are float32 or wider.
            device: Where.
        """
        super().__init__()
        self.config = config
        self.rope = replace(rope, interleaved=config.rope_interleaved)
        wide = torch.promote_types(dtype, torch.float32)
        heads, d_i = config.num_heads, config.head_dim

        def linear(d_in: int, d_out: int, dtype: torch.dtype) -> Projection:
            return Projection(d_in, d_out, dtype=dtype, device=device)

        self.wq_b = linear(query_width, heads * d_i, dtype)
        self.wk = linear(hidden_size, d_i, dtype)
        self.k_norm = nn.LayerNorm(d_i, eps=K_NORM_EPS, dtype=dtype, device=device)
        # In bfloat16, keys whose scores differ by 1e-4 change places (sglang#13459).
        self.weights_proj = linear(hidden_size, heads, wide)
        self.requires_grad_(False)
        # By device: what is made on the host is moved once, since a captured step cannot.
        self._frequencies: dict[torch.device, Tensor] = {}
        self._mixing: dict[torch.device, Tensor] = {}

    @classmethod
    def for_model(cls, config: MLAConfig, **kwargs: object) -> "IndexerLayer":
        """A layer for a model of these dimensions; other arguments as in the constructor.

        Raises:
            ValueError: The model has no indexer.
        """
        if config.indexer is None:
            raise ValueError(f"{config.name} has no indexer: its attention is dense")
        width = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        return cls(
            config.indexer,
            config.rope,
            hidden_size=config.hidden_size,
            query_width=width,
            **kwargs,  # type: ignore[arg-type]
        )

    @classmethod
    def from_state_dict(
        cls, config: MLAConfig, state_dict: Mapping[str, Tensor], *, prefix: str = ""
    ) -> "IndexerLayer":
        """A layer that holds the tensors of a checkpoint.

        Nothing is copied but `weights_proj`, which checkpoints ship in bfloat16 and which is
        computed in float32.

        Args:
            config: The model's dimensions.
            state_dict: Tensors of the checkpoint.
            prefix: What stands before the names: "model.layers.0.self_attn.indexer." for example.

        Raises:
            ValueError: A key is missing, unexpected or of another shape, or dtypes differ.
            TypeError: A weight is not of 16, 32 or 64 bits.
        """
        layer = cls.for_model(config, device="meta")
        wanted = {name: parameter.shape for name, parameter in layer.named_parameters()}
        apart = "weights_proj.weight"
        rest = {name: shape for name, shape in wanted.items() if name != apart}
        found = module_tensors(state_dict, rest, prefix=prefix, skip=("weights_proj.",))
        head = f"{prefix}weights_proj."
        weight = module_tensors(state_dict, {"weight": wanted[apart]}, prefix=head)["weight"]
        wide = torch.promote_types(found["wk.weight"].dtype, torch.float32)
        layer.load_state_dict({**found, apart: weight.to(wide)}, assign=True)
        return layer

    @classmethod
    def random(
        cls, config: MLAConfig, seed: int, dtype: torch.dtype = torch.float32
    ) -> "IndexerLayer":
        """A layer with random weights whose scores differ from key to key."""
        generator = torch.Generator().manual_seed(seed)
        layer = cls.for_model(config, dtype=dtype)
        for name, parameter in layer.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name == "k_norm.weight":
                drawn = 1 + 0.2 * drawn
            elif parameter.ndim == 2:
                drawn *= parameter.shape[1] ** -0.5
            parameter.copy_(drawn)
        return layer

    def queries(
        self,
        latent: Float[Tensor, "s d_q"],
        x: Float[Tensor, "s hidden"],
        positions: Int[Tensor, " s"],
    ) -> tuple[Float[Tensor, "s index_heads d_i"], Float[Tensor, "s index_heads"]]:
        """Index queries, turned to their positions, and the factor of each head.

        Args:
            latent: The attention's query latent.
            x: Input of the attention.
            positions: Of each row.

        Returns:
            Queries in the dtype of the weights, and factors in float32 (float64 for float64) that
            hold index_heads^-0.5 * d_i^-0.5 already.
        """
        self._require_rows("latent", latent, self.wq_b.in_features, positions)
        self._require_rows("x", x, self.wk.in_features, positions)
        q = self.wq_b(latent).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype))
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        return self._placed(q, positions), weights * scale

    def keys(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s d_i"]:
        """The index key of each token, for all index heads: normalised, then turned."""
        self._require_rows("x", x, self.wk.in_features, positions)
        norm = self.k_norm
        return self._placed(layer_norm(self.wk(x), norm.weight, norm.bias, eps=norm.eps), positions)

    def _placed(self, x: Float[Tensor, "s *h d_i"], positions: Int[Tensor, " s"]) -> Tensor:
        """The first numbers turned to their position, and all of them mixed if the config says."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = inverse_frequencies(self.rope).to(device)
            if self.config.hadamard:
                self._mixing[device] = hadamard(self.config.head_dim).to(device)
        cos, sin = rope_table(self.rope, positions, frequencies=self._frequencies[device])
        head, rest = x.tensor_split([self.rope.dim], dim=-1)
        turned = apply_rope(head, cos, sin, interleaved=self.rope.interleaved)
        placed = torch.cat([turned, rest], dim=-1)
        if not self.config.hadamard:
            return placed
        return placed @ self._mixing[device].to(placed.dtype)

    def _require_rows(self, name: str, x: Tensor, width: int, positions: Tensor) -> None:
        require_float(name, x, "s width")
        require_size(name, x, 1, width, "what the indexer takes")
        require_integer("positions", positions, "s")
        require_size("positions", positions, 0, x.shape[0], f"one a row of {name}")
        if x.dtype != self.wk.weight.dtype:
            raise TypeError(
                f"{name} must be {self.wk.weight.dtype}, as the weights, got {describe(x)}"
            )

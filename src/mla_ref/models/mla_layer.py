"""One MLA attention layer of the DeepSeek and GLM family, with the weights of a checkpoint.

What makes it easy to get wrong is the order in which things are packed (DeepSeek-V3,
`inference/model.py`):

    q      per head   [ q_nope d_n | q_pe d_r ]      the part with positions last
    kv_a              [ latent d_c | k_pe d_r ]      the latent first
    kv_b   per head   [ k_nope d_n | v d_v ]         the key first

The latent is normalised before it is cached, k_pe is not. Positions are turned in q_pe and k_pe
only. `mla_ref.models.projections.attend_latent` runs the attention itself.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_ref.batching import Step
from mla_ref.checks import describe, require_float, require_integer, require_size
from mla_ref.layers import MLAConfig, Projection, apply_rope, rms_norm, rope_table
from mla_ref.models.projections import attend_latent
from mla_ref.models.state_dict import module_tensors


class LatentNorm(nn.Module):
    """The RMSNorm of a latent: `q_a_layernorm` and `kv_a_layernorm`."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Normalise each row."""
        return rms_norm(x, self.weight, eps=self.eps)


class MLALayer(nn.Module):
    """Linear maps, norms and rotary positions of one attention layer; a `LatentProjections`.

    The submodules carry the names of Hugging Face checkpoints. The inner norms take
    `config.rms_norm_eps`, as vLLM's layer does. transformers builds them with its class default
    1e-6 whatever the file says (transformers#44261), which differs for GLM (1e-5).

    The parameters ask for no gradient: a cache that kept the graph of every step would never be
    freed.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        super().__init__()
        self.config = config
        heads, d_q = config.num_heads, config.q_lora_rank

        def linear(d_in: int, d_out: int) -> Projection:
            return Projection(d_in, d_out, dtype=dtype, device=device)

        if d_q is None:
            self.q_proj = linear(config.hidden_size, heads * config.qk_head_dim)
        else:
            self.q_a_proj = linear(config.hidden_size, d_q)
            self.q_a_layernorm = LatentNorm(d_q, config.rms_norm_eps, dtype, device)
            self.q_b_proj = linear(d_q, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_row_dim)
        self.kv_a_layernorm = LatentNorm(config.kv_lora_rank, config.rms_norm_eps, dtype, device)
        self.kv_b_proj = linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.requires_grad_(False)

    @classmethod
    def from_state_dict(
        cls, config: MLAConfig, state_dict: Mapping[str, Tensor], *, prefix: str = ""
    ) -> "MLALayer":
        """A layer that holds the tensors of a checkpoint; nothing is copied.

        Args:
            config: The dimensions the tensors must have.
            state_dict: Tensors of the checkpoint.
            prefix: What stands before the names here, "model.layers.0.self_attn." for example.
                What follows in `indexer.` is another module's and is skipped.

        Raises:
            ValueError: A key is missing, unexpected or of another shape, or dtypes differ.
            TypeError: A weight is not of 16, 32 or 64 bits.
        """
        # On the meta device the parameters have shapes and no memory.
        layer = cls(config, device="meta")
        wanted = {name: parameter.shape for name, parameter in layer.named_parameters()}
        found = module_tensors(state_dict, wanted, prefix=prefix, skip=("indexer.",))
        layer.load_state_dict(found, assign=True)
        return layer

    @classmethod
    def random(cls, config: MLAConfig, seed: int, dtype: torch.dtype = torch.float32) -> "MLALayer":
        """A layer with random weights whose attention is not uniform.

        A weight has the standard deviation 1 / sqrt(its inputs), so inputs of variance 1 stay so
        and scores vary by about 1. With the usual 0.02 every query sees an average, and most
        errors with it. The norms' weights lie in 0.5 .. 1.5, so a forgotten one shows.
        DeepSeek-V3's size takes 0.75 GB in float32 and about 2 seconds.
        """
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, parameter in cls(config, device="meta").named_parameters():
            if parameter.ndim == 1:
                weight = torch.rand(parameter.shape, generator=generator) + 0.5
            else:
                weight = torch.randn(parameter.shape, generator=generator)
                weight *= parameter.shape[1] ** -0.5
            weights[name] = weight.to(dtype)
        return cls.from_state_dict(config, weights)

    @property
    def softmax_scale(self) -> float:
        """Factor on q·k before the softmax."""
        return self.config.softmax_scale

    @property
    def w_uk(self) -> Float[Tensor, "h d_n d_c"]:
        """Up-projection from the latent to each head's key: the first d_n rows of its kv_b."""
        return self._kv_b()[:, : self.config.qk_nope_head_dim]

    @property
    def w_uv(self) -> Float[Tensor, "h d_v d_c"]:
        """Up-projection from the latent to each head's value: the last d_v rows of its kv_b."""
        return self._kv_b()[:, self.config.qk_nope_head_dim :]

    def query_latent(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s d_q"]:
        """The compressed, normalised query, or x itself where queries are not compressed."""
        self._require_rows("x", x, self.config.hidden_size)
        return x if self.config.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))

    def queries(
        self, latent: Float[Tensor, "s d_q"], positions: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, "s h d_n"], Float[Tensor, "s h d_r"]]:
        """q_nope, and q_pe turned to its position."""
        compressed = self.config.q_lora_rank
        self._require_rows("latent", latent, compressed or self.config.hidden_size, positions)
        q = self.q_proj(latent) if compressed is None else self.q_b_proj(latent)
        q = q.unflatten(-1, (self.config.num_heads, self.config.qk_head_dim))
        q_nope, q_pe = q.tensor_split([self.config.qk_nope_head_dim], dim=-1)
        return q_nope, self._turn(q_pe, positions)

    def kv_rows(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s d_row"]:
        """The row to cache of each token: [normalised latent d_c | turned rotary key d_r]."""
        self._require_rows("x", x, self.config.hidden_size, positions)
        latent, k_pe = self.kv_a_proj_with_mqa(x).tensor_split([self.config.kv_lora_rank], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), self._turn(k_pe, positions)], dim=-1)

    def output(self, heads: Float[Tensor, "s h d_v"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream."""
        return self.o_proj(heads.flatten(-2))

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden"],
        kv_cache: Float[Tensor, "pages page_size d_row"],
        step: Step,
        *,
        form: str,
    ) -> Float[Tensor, "num_tokens hidden"]:
        """Write the new rows and attend: see `attend_latent`."""
        return attend_latent(self, x, kv_cache, step, form=form)

    def _kv_b(self) -> Float[Tensor, "h d_kv d_c"]:
        return self.kv_b_proj.weight.unflatten(0, (self.config.num_heads, -1))

    def _turn(self, x: Float[Tensor, "s *h d_r"], positions: Int[Tensor, " s"]) -> Tensor:
        cos, sin = rope_table(self.config.rope, positions)
        return apply_rope(x, cos, sin, interleaved=self.config.rope.interleaved)

    def _require_rows(
        self, name: str, x: Tensor, width: int, positions: Tensor | None = None
    ) -> None:
        require_float(name, x, "s width")
        require_size(name, x, 1, width, "what the layer takes")
        dtype = self.kv_b_proj.weight.dtype
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, as the layer's weights, got {describe(x)}")
        if positions is not None:
            require_integer("positions", positions, "s")
            require_size("positions", positions, 0, x.shape[0], f"one a row of {name}")

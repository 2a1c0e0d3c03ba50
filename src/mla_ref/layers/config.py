"""The dimensions of one MLA attention layer, and its softmax scale."""

from dataclasses import dataclass

from mla_ref.checks import require_count, require_scale
from mla_ref.layers.indexer_config import IndexerConfig
from mla_ref.layers.rope import RopeConfig, YarnConfig, yarn_mscale


def default_softmax_scale(
    qk_nope_head_dim: int, qk_rope_head_dim: int, yarn: YarnConfig | None
) -> float:
    """(qk_nope + qk_rope)^-0.5, times mscale^2 where YaRN stretches the context.

    The head dimension is the one before absorption: 192 for DeepSeek, never the 576 of the cached
    row (ollama#13893). mscale^2 comes from `mscale_all_dim` (Megatron-LM#1429): 1.87 for
    DeepSeek-V3, invisible at position 0, where one key takes all the weight whatever the scale.
    """
    head_dim = qk_nope_head_dim + qk_rope_head_dim
    mscale = yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
    return head_dim**-0.5 * mscale**2


@dataclass(frozen=True)
class MLAConfig:
    """Dimensions of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        name: What the errors and tables call it.
        hidden_size: Width of the residual stream.
        num_layers: Layers of the whole model.
        num_heads: Query heads.
        q_lora_rank: Width of the compressed query, or None where q is projected directly.
        kv_lora_rank: Width of the latent that is cached in place of K and V.
        qk_nope_head_dim: Numbers a head compares without positions.
        qk_rope_head_dim: Numbers a head compares with positions; their key is shared by all heads.
        v_head_dim: Width of a head's value.
        rope: Rotary embedding of the qk_rope part.
        rms_norm_eps: Of every RMSNorm, the inner ones of the latents too.
        softmax_scale: Factor on q·k. Stated, never derived from a cached row's width.
        indexer: Dimensions of the lightning indexer; None for dense attention.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    softmax_scale: float
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError that names the dimension which cannot be."""
        for name in ("hidden_size", "num_layers", "num_heads", "kv_lora_rank", "v_head_dim"):
            require_count(name, getattr(self, name), at_least=1)
        if self.q_lora_rank is not None:
            require_count("q_lora_rank", self.q_lora_rank, at_least=1)
        require_count("qk_nope_head_dim", self.qk_nope_head_dim)
        require_count("qk_rope_head_dim", self.qk_rope_head_dim)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if self.rope.dim != self.qk_rope_head_dim:
            raise ValueError(
                f"rope.dim must be qk_rope_head_dim = {self.qk_rope_head_dim}, got {self.rope.dim}"
            )
        if self.qk_nope_head_dim + self.qk_rope_head_dim == 0:
            raise ValueError("qk_nope_head_dim and qk_rope_head_dim must not both be 0")
        require_scale("softmax_scale", self.softmax_scale)
        require_scale("rms_norm_eps", self.rms_norm_eps)
        if self.indexer is not None:
            self._require_indexer(self.indexer)

    @property
    def qk_head_dim(self) -> int:
        """Numbers a head compares before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_row_dim(self) -> int:
        """Numbers cached for one token and layer: the latent, then the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _require_indexer(self, indexer: IndexerConfig) -> None:
        if indexer.head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"indexer.head_dim must hold the {self.qk_rope_head_dim} rotary numbers, got "
                f"{indexer.head_dim}"
            )
        if indexer.full_layers[-1] >= self.num_layers:
            raise ValueError(
                f"indexer.full_layers must lie below num_layers = {self.num_layers}, got "
                f"{indexer.full_layers[-1]}"
            )

"""One decoder layer of SmolLM2: norm, attention, norm, gated feed-forward.

The trunk has thirty of them and the multi-token prediction module one. Only the attention is a
choice: as trained ("gqa", rung 4), or exactly rewritten as MLA ("split", "packed": rungs 5 and 6).
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu

from mla_ref.batching import Step
from mla_ref.layers import project, rms_norm
from mla_ref.models.gqa_as_mla import PackedMLA, Packing, SplitMLA
from mla_ref.models.projections import attend_latent
from mla_ref.models.smollm2_attention import GQAProjections, attend_grouped
from mla_ref.models.smollm2_weights import LayerWeights, SmolLM2Config

ATTENTIONS = ("gqa", "split", "packed")


def reads_no_lengths(attention: str, form: str | None) -> bool:
    """Whether attention leaves lengths on the device, so that a step can be captured in a graph.

    "gqa" and the form "expanded" go from page to page on the host.
    """
    return attention != "gqa" and form != "expanded"


class SmolLM2Layer:
    """A layer's weights, and how its attention is computed.

    Attributes:
        weights: Its tensors.
        gqa: Its attention as trained.
        view: Its attention as chosen.
        form: How MLA is computed, "expanded" or "absorbed"; None for "gqa".
    """

    projections: type[GQAProjections] = GQAProjections

    def __init__(
        self,
        weights: LayerWeights,
        config: SmolLM2Config,
        rope: tuple[Float[Tensor, "positions half_dim"], Float[Tensor, "positions half_dim"]],
        *,
        attention: str,
        form: str | None,
        packing: Packing | None = None,
    ) -> None:
        """Choose how attention is computed.

        Args:
            weights: The layer's tensors.
            config: The model's dimensions.
            rope: cos and sin from `rope_table`, one row for each position there can be.
            attention: One of `ATTENTIONS`.
            form: "expanded" or "absorbed" for MLA, None for "gqa".
            packing: What the packed layers of a model share; None: made for this layer.
        """
        self.weights, self.form = weights, form
        self._eps, self._packing = config.rms_norm_eps, packing
        self.gqa = self.projections(
            w_q=weights.attn_q,
            w_k=weights.attn_k,
            w_v=weights.attn_v,
            w_o=weights.attn_output,
            cos=rope[0],
            sin=rope[1],
            head_dim=config.head_dim,
        )
        views: dict[str, Callable[[], GQAProjections | SplitMLA | PackedMLA]] = {
            "gqa": lambda: self.gqa,
            "split": self.split,
            "packed": self.packed,
        }
        self.view = views[attention]()

    def split(self) -> SplitMLA:
        """The attention as MLA, values as latent and keys as rotary key."""
        return SplitMLA(self.gqa)

    def packed(self) -> PackedMLA:
        """The attention as MLA in the geometry of DeepSeek-V3.2 and GLM-5.2."""
        return PackedMLA(self.gqa, self._packing)

    def cache_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of this layer's cache."""
        return self.view.cache_shape(num_pages, page_size)

    def attention_input(self, x: Float[Tensor, "*s hidden"]) -> Float[Tensor, "*s hidden"]:
        """What the attention gets to see of the residual stream."""
        return rms_norm(x, self.weights.attn_norm, eps=self._eps)

    def feed_forward(self, x: Float[Tensor, "*s hidden"]) -> Float[Tensor, "*s hidden"]:
        """The residual stream after the feed-forward part, from that after the attention."""
        weights = self.weights
        h = rms_norm(x, weights.ffn_norm, eps=self._eps)
        gated = silu(project(h, weights.ffn_gate)) * project(h, weights.ffn_up)
        return x + project(gated, weights.ffn_down)

    def forward(
        self, x: Float[Tensor, "s hidden"], step: Step, cache: Tensor
    ) -> Float[Tensor, "s hidden"]:
        """Attention over the cache, then feed-forward, each added to the residual stream.

        Args:
            x: The residual stream, one row a new token.
            step: The batch.
            cache: Of this layer, of `cache_shape`; the step's slots are overwritten in place.
        """
        attention_input = self.attention_input(x)
        if isinstance(self.view, GQAProjections):
            x = x + attend_grouped(self.view, attention_input, cache, step)
        else:
            x = x + attend_latent(self.view, attention_input, cache, step, form=self.form or "")
        return self.feed_forward(x)

"""SmolLM2 with its linear maps in the formats in which GLM-5.2 is served.

    feed-forward            NVFP4 weights, activations as they are: "W4A16"
    q, k, v and output      online MXFP8: weights and activations of the product
    the rest                embedding, head, norms, indexers and the MTP module stay as they are

The numbers are those of `W4A16Linear` and `OnlineMXFP8Linear`. A weight is dequantised to float32
once, from MXFP8 exactly and from NVFP4 with one rounding, and held in the dtype of the model in
place of its bytes: nothing is saved here, and nothing is gained in speed. The activations of an
MXFP8 product pass through the format in every forward pass, token by token. "A16" activations are
float32 here where a server has bfloat16, and every product is summed in float32.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from mla_ref.layers import OnlineMXFP8Linear, W4A16Linear
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_attention import GQAProjections
from mla_ref.models.smollm2_layer import SmolLM2Layer
from mla_ref.models.smollm2_weights import SmolLM2Weights
from mla_ref.numerics.mxfp8 import dequantise_mxfp8, quantise_mxfp8

FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def served_weights(
    weights: SmolLM2Weights, *, nvfp4: bool = True, mxfp8: bool = True
) -> SmolLM2Weights:
    """The weights after a way through their formats, as plain numbers.

    Args:
        weights: As they were trained.
        nvfp4: Whether the feed-forward goes through NVFP4.
        mxfp8: Whether the attention's projections go through MXFP8. Their activations do so in
            `MXFP8SmolLM2` alone.

    Raises:
        ValueError: A row of a matrix is not whole groups of the format.
    """
    formats: dict[str, type[W4A16Linear] | type[OnlineMXFP8Linear]] = {}
    formats |= dict.fromkeys(FEED_FORWARD if nvfp4 else (), W4A16Linear)
    formats |= dict.fromkeys(ATTENTION if mxfp8 else (), OnlineMXFP8Linear)
    return replace(
        weights,
        layers=tuple(
            replace(
                layer,
                **{
                    name: kind.from_weight(getattr(layer, name))
                    .dequantised_weight()
                    .to(layer.attn_q.dtype)
                    for name, kind in formats.items()
                },
            )
            for layer in weights.layers
        ),
    )


@dataclass(frozen=True)
class MXFP8Projections(GQAProjections):
    """The attention's linear maps with their activations in MXFP8.

    The weights are those of `served_weights`. Each map then is an `OnlineMXFP8Linear`.
    """

    def output(self, heads: Float[Tensor, "s h_q d"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream, from the heads in MXFP8."""
        return super().output(through_mxfp8(heads.flatten(1)).unflatten(1, heads.shape[1:]))

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return super()._heads(through_mxfp8(x), weight)


class MXFP8Layer(SmolLM2Layer):
    """A decoder layer whose attention takes its activations in MXFP8."""

    projections = MXFP8Projections


class MXFP8SmolLM2(SmolLM2):
    """SmolLM2 of such layers, for weights from `served_weights`."""

    layer_type = MXFP8Layer


def through_mxfp8(x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """The numbers that MXFP8 keeps of each row, in the dtype of x."""
    return dequantise_mxfp8(quantise_mxfp8(x)).to(x.dtype)

"""A linear layer in MXFP8, made from a bfloat16 or float32 weight while a model loads."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mla_ref.checks import (
    describe,
    require_choice,
    require_float,
    require_same_device,
    require_tensor,
)
from mla_ref.layers.quantised_linear import QuantisedLinear
from mla_ref.numerics.mxfp8 import (
    MXFP8_GROUP,
    MXFP8_SCALE_RULES,
    MXFP8Tensor,
    dequantise_mxfp8,
    quantise_mxfp8,
    require_mxfp8,
)


class OnlineMXFP8Linear(QuantisedLinear):
    """Weight in MXFP8 (8.25 bits a number), activations quantised to MXFP8 in the forward pass.

    "Online" means without calibration: the weight's scales come from the weight while loading, the
    activations' from each token by itself, so a token's numbers do not depend on its batch. Groups
    of 32 lie along the input features in both operands. That is the dimension the product sums
    over, so each 32 products share one power of two, as the block-scaled tensor-core instructions
    have it. The product of two E4M3 numbers has 8 significant bits and the scales are powers of
    two: all rounding is in the float32 sum.

    Buffers: weight uint8 [out, in], weight_scale uint8 [out, in / 32] (E8M0).
    """

    def __init__(
        self,
        weight: MXFP8Tensor,
        bias: Float[Tensor, " out"] | None = None,
        *,
        scale_rule: str = "ceil",
    ):
        require_mxfp8(weight)
        data, scales = weight
        out_features, in_features = require_tensor("data", data, "out in").shape
        require_choice("scale_rule", scale_rule, MXFP8_SCALE_RULES)
        super().__init__(in_features, out_features, bias)
        self.scale_rule = scale_rule
        self.register_buffer("weight", data)
        self.register_buffer("weight_scale", scales)

    @classmethod
    def from_weight(
        cls,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None = None,
        *,
        scale_rule: str = "ceil",
    ) -> "OnlineMXFP8Linear":
        """Quantise a weight.

        Args:
            weight: In any float dtype, read as float32; `in` must be a multiple of 32.
            bias: Kept as it is.
            scale_rule: Of weight and activations, see `mxfp8_scale`.
        """
        require_float("weight", weight, "out in")
        if weight.shape[1] % MXFP8_GROUP:
            raise ValueError(
                f"weight must have a multiple of {MXFP8_GROUP} numbers a row, got "
                f"{describe(weight)}"
            )
        if isinstance(bias, Tensor):
            require_same_device({"weight": weight, "bias": bias})
        quantised = quantise_mxfp8(weight.detach(), scale_rule=scale_rule)
        return cls(quantised, bias, scale_rule=scale_rule)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, scale_rule: str = "ceil") -> "OnlineMXFP8Linear":
        """Quantise a plain layer's weight and keep its bias; the layer itself is not changed."""
        return cls.from_weight(linear.weight, linear.bias, scale_rule=scale_rule)

    def dequantised_weight(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The numbers that the weight stands for, in float32 or float64: exact."""
        return dequantise_mxfp8(MXFP8Tensor(self.weight, self.weight_scale), dtype)

    def activations(
        self, x: Float[Tensor, "*rows in"], dtype: torch.dtype
    ) -> Float[Tensor, "*rows in"]:
        """`x` through MXFP8. A token with NaN or infinity in it gives NaN, the others do not."""
        return dequantise_mxfp8(quantise_mxfp8(x, scale_rule=self.scale_rule), dtype)

"""A linear layer with its weight in NVFP4, as checkpoints of GLM-5.2's routed experts have it."""

from collections.abc import Mapping

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
from mla_ref.layers.quantised_linear import QuantisedLinear, require_dtype
from mla_ref.numerics.nvfp4 import (
    NVFP4_GROUP,
    NVFP4Tensor,
    dequantise_nvfp4,
    quantise_nvfp4,
    read_global_scale,
    require_nvfp4,
)

# The names of the weight and of its global scale, and how the latter is stored.
_LAYOUTS = {
    "modelopt": ("weight", "weight_scale_2", "factor"),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "reciprocal"),
}
CHECKPOINT_LAYOUTS = tuple(_LAYOUTS)
# Scales for quantised activations (W4A4). An A16 layer's activations are not quantised, so there
# is nothing to undo, and applying them would be a factor too many.
_ACTIVATION_SCALES = {"input_scale", "input_global_scale"}


class W4A16Linear(QuantisedLinear):
    """Weight in NVFP4 (4.5 bits a number, and 4 bytes), activations as they are.

    The weight is dequantised in the forward pass. Its buffers have ModelOpt's names and dtypes, so
    `state_dict()` is what such a checkpoint holds: weight uint8 [out, in / 2], weight_scale
    float8_e4m3fn [out, in / 16], weight_scale_2 float32.
    """

    weight_scale_2: Tensor

    def __init__(self, weight: NVFP4Tensor, bias: Float[Tensor, " out"] | None = None):
        require_nvfp4(weight)
        require_tensor("data", weight.data, "out half")
        super().__init__(2 * weight.data.shape[1], weight.data.shape[0], bias)
        self.register_buffer("weight", weight.data)
        self.register_buffer("weight_scale", weight.scales.view(torch.float8_e4m3fn))
        self.register_buffer("weight_scale_2", weight.global_scale)

    @classmethod
    def from_weight(
        cls,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None = None,
        *,
        global_scale: float | None = None,
    ) -> "W4A16Linear":
        """Quantise a weight.

        Args:
            weight: In any float dtype, read as float32; `in` must be a multiple of 16.
            bias: Kept as it is.
            global_scale: See `quantise_nvfp4`.
        """
        require_float("weight", weight, "out in")
        if weight.shape[1] % NVFP4_GROUP:
            raise ValueError(
                f"weight must have a multiple of {NVFP4_GROUP} numbers a row, got "
                f"{describe(weight)}"
            )
        if isinstance(bias, Tensor):
            require_same_device({"weight": weight, "bias": bias})
        return cls(quantise_nvfp4(weight.detach(), global_scale=global_scale), bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "W4A16Linear":
        """Quantise a plain layer's weight and keep its bias; the layer itself is not changed."""
        return cls.from_weight(linear.weight, linear.bias)

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        prefix: str = "",
        *,
        layout: str = "modelopt",
    ) -> "W4A16Linear":
        """The layer from a checkpoint's tensors, of which only the bias is copied.

        Args:
            state_dict: Any number of tensors; those outside `prefix` are not looked at.
            prefix: What stands before the names, with its dot: "mlp.experts.0.gate_proj.".
            layout: "modelopt" (weight, weight_scale, weight_scale_2) or "compressed-tensors"
                (weight_packed, weight_scale, and weight_global_scale, which is one over the
                factor). Both may have a bias, and an input_scale (input_global_scale), which is
                accepted and not used: it belongs to kernels that quantise activations to FP4.

        Raises:
            ValueError: A key is missing or unexpected, the shapes do not fit each other, or the
                global scale is not a number that a factor can be.
            TypeError: A tensor is of another dtype.
        """
        weight, global_scale, reader = _LAYOUTS[
            require_choice("layout", layout, CHECKPOINT_LAYOUTS)
        ]
        found = {
            key.removeprefix(prefix): tensor
            for key, tensor in state_dict.items()
            if key.startswith(prefix)
        }
        needed = {weight, "weight_scale", global_scale}
        missing = sorted(needed - set(found))
        unexpected = sorted(set(found) - needed - _ACTIVATION_SCALES - {"bias"})
        if missing or unexpected:
            raise ValueError(
                f"state_dict does not fit the layout {layout} under {prefix!r}: missing "
                f"{', '.join(missing) or 'none'}; unexpected {', '.join(unexpected) or 'none'}"
            )
        require_dtype(prefix + weight, found[weight], torch.uint8)
        scales, factor = found["weight_scale"], found[global_scale]
        require_dtype(f"{prefix}weight_scale", scales, torch.float8_e4m3fn, torch.uint8)
        require_dtype(prefix + global_scale, factor, torch.float32)
        if factor.numel() != 1:
            raise ValueError(f"{prefix + global_scale} must be one number, got {factor.tolist()}")
        factor = read_global_scale(factor.reshape(()), reader, name=prefix + global_scale)
        return cls(NVFP4Tensor(found[weight], scales.view(torch.uint8), factor), found.get("bias"))

    def dequantised_weight(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The numbers that the weight stands for: exact in float64, rounded once in float32."""
        scales = self.weight_scale.view(torch.uint8)
        return dequantise_nvfp4(NVFP4Tensor(self.weight, scales, self.weight_scale_2), dtype)

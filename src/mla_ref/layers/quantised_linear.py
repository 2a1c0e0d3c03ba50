"""Linear layers whose weight is stored in a block-scaled format: what they share.

Which parts of a served GLM-5.2 they stand for:

    routed experts         NVFP4 in the checkpoint: `W4A16Linear`. "A16" says that the activations
                           stay bfloat16. An expert has 3 x 2048 x 6144 numbers: 75.5 MB in
                           bfloat16, 21.2 MB in NVFP4, and in decode reading them is the cost.
    attention projections  bfloat16 in the checkpoint. Served so, or quantised while loading:
                           `OnlineMXFP8Linear`. Never NVFP4.
    the rest               Router, norms, indexer and lm_head stay bfloat16 or float32.

Both compute what such a kernel computes, one rounding at a time; they are slower than a plain
layer, not faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mla_ref.checks import describe, require_float, require_size
from mla_ref.numerics import compute_dtype


class QuantisedLinear(nn.Module, ABC):
    """The product, the bias, and buffers that keep their dtypes. Inference only: no gradients.

    Attributes:
        weight: Bytes of the weight, one row an output.
        weight_scale: Scales of its groups.
        bias: One number an output, or None.
        in_features: Numbers of an input row, before any packing.
        out_features: Numbers of an output row.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        if bias is not None:
            require_float("bias", bias, "out")
            require_size("bias", bias, 0, out_features, "one number a row of the weight")
            bias = bias.detach().clone()
        self.register_buffer("bias", bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's state: weight, scales and bias."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @abstractmethod
    def dequantised_weight(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The numbers that the weight stands for, in float32 or float64."""

    def activations(
        self, x: Float[Tensor, "*rows in"], dtype: torch.dtype
    ) -> Float[Tensor, "*rows in"]:
        """The numbers that the product sees of `x`."""
        return x.to(dtype)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Give x Wᵀ + bias, summed in float32 (float64 for float64 input), in x's dtype."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating-point tensor [..., in], got {describe(x)}")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must have the layer's {self.in_features} numbers in the last dimension, got "
                f"{describe(x)}"
            )
        dtype = compute_dtype(x)
        out = self.activations(x, dtype) @ self.dequantised_weight(dtype).T
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        """What print shows of the layer."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedLinear":
        # `model.bfloat16()` casts every floating-point buffer: the float32 scale of a tensor would
        # be rounded to 8 bits, E4M3 scales would turn into two bytes each. Devices may change,
        # dtypes may not.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # torch copies with a silent cast: a bfloat16 weight of 0.02 would become the byte 0.
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            if name != "bias" and buffer is not None and given is not None:
                require_dtype(prefix + name, given, buffer.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise a TypeError unless `tensor` has one of the dtypes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be a {wanted} tensor, got {describe(tensor)}")

"""What every kernel of this folder asks before it is launched: where it runs, where it writes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.platform import interpreter_active


def require_runnable(name: str, tensor: Tensor) -> None:
    """Raise a ValueError unless a kernel can reach the tensor."""
    if tensor.device.type != "cuda" and not interpreter_active():
        raise ValueError(
            f"{name} must lie on a GPU, or TRITON_INTERPRET=1 must be set before triton is "
            f"imported; it lies on {tensor.device}"
        )


def divide(
    workspace: Tensor, parts: Sequence[tuple[int, torch.dtype]], like: Tensor
) -> tuple[Tensor, ...]:
    """Parts of a workspace, one behind the other: so many bytes, seen as numbers of a dtype.

    Raises:
        ValueError: It is too small, lies elsewhere than `like`, has gaps or begins at an odd place.
    """
    total = sum(size for size, _ in parts)
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or workspace.numel() < total:
        raise ValueError(
            f"workspace must be {total} uint8 bytes at least, got {describe(workspace)}"
        )
    if workspace.device != like.device:
        raise ValueError(f"workspace must lie on {like.device}, it lies on {workspace.device}")
    if not workspace.is_contiguous() or workspace.data_ptr() % 8:
        raise ValueError(
            "workspace must be contiguous and begin at a multiple of 8 bytes, got stride "
            f"{workspace.stride(0)} and address {workspace.data_ptr()}"
        )
    found = workspace[:total].split([size for size, _ in parts])
    return tuple(part.view(dtype) for part, (_, dtype) in zip(found, parts, strict=True))


def out_or_new(
    name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> Tensor:
    """`out` if it can hold the result, or a new tensor on the device of `like`.

    Raises:
        TypeError: `out` is no tensor or has another dtype.
        ValueError: It has another shape or device, or gaps.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if not isinstance(out, Tensor) or out.dtype != dtype:
        raise TypeError(f"{name} must be a {dtype} tensor, got {describe(out)}")
    if out.shape != shape or out.device != like.device or not out.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, of shape {list(shape)} and on {like.device}, got "
            f"{describe(out)} on {out.device}"
        )
    return out

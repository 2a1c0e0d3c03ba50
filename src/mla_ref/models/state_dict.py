"""The tensors of one module out of a checkpoint, complete and of the right shapes, or an error."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mla_ref.checks import describe

# Sub-byte and 8-bit weights need their scales; they are dequantised before they come here.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def module_tensors(
    state_dict: Mapping[str, Tensor],
    wanted: Mapping[str, Sequence[int | str]],
    *,
    prefix: str = "",
    skip: Collection[str] = (),
    one_dtype: bool = True,
) -> dict[str, Tensor]:
    """The tensors under `prefix`, by their names behind it; nothing is copied.

    Args:
        state_dict: Any number of tensors; those outside `prefix` are not looked at.
        wanted: Name and shape of every tensor that must be there. A word stands for a size that
            is not known, the same one wherever the word is.
        prefix: What stands before the names, with its dot: "model.layers.0.self_attn.".
        skip: Beginnings of names, behind the prefix, that belong to another module.
        one_dtype: Whether all must have the same dtype.

    Raises:
        ValueError: A key is missing, unexpected or of another shape, or the tensors differ in
            dtype. An unexpected key is often a weight's scale, without which the weight is
            meaningless, or a bias.
        TypeError: A tensor is not of 16, 32 or 64 bits.
    """
    # Detached: loading must not switch off the gradients of the checkpoint's owner.
    found = {
        key.removeprefix(prefix): tensor.detach()
        for key, tensor in state_dict.items()
        if key.startswith(prefix) and not key.removeprefix(prefix).startswith(tuple(skip))
    }
    sizes: dict[str, int] = {}
    problems = [
        f"missing {prefix}{name} of shape {_said(shape, sizes)}"
        for name, shape in wanted.items()
        if name not in found
    ]
    problems += [
        f"unexpected {prefix}{name}, {describe(found[name])}"
        for name in sorted(found)
        if name not in wanted
    ]
    problems += [
        f"{prefix}{name} must have the shape {_said(shape, sizes)}, got {describe(found[name])}"
        for name, shape in wanted.items()
        if name in found and not _fits(found[name].shape, shape, sizes)
    ]
    if problems:
        raise ValueError(f"state_dict does not fit: {'; '.join(problems)}")
    for name, tensor in found.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{prefix}{name} must be a float of 16, 32 or 64 bits, got {describe(tensor)}: "
                "dequantise it first"
            )
    dtypes = sorted({str(tensor.dtype) for tensor in found.values()})
    if one_dtype and len(dtypes) > 1:
        raise ValueError(
            f"state_dict must hold one dtype under {prefix!r}, got {', '.join(dtypes)}"
        )
    return found


def _fits(shape: torch.Size, wanted: Sequence[int | str], sizes: dict[str, int]) -> bool:
    """Whether a shape is the wanted one; a word takes the first size that it meets."""
    return len(shape) == len(wanted) and all(
        size == (sizes.setdefault(want, size) if isinstance(want, str) else want)
        for size, want in zip(shape, wanted, strict=True)
    )


def _said(wanted: Sequence[int | str], sizes: Mapping[str, int]) -> str:
    """A wanted shape for an error, with the sizes that are known."""
    known = (sizes.get(want, want) if isinstance(want, str) else want for want in wanted)
    return f"[{', '.join(map(str, known))}]"

"""Checks of input at a public edge: each raises an error that names the argument.

A wrong kind of thing (no tensor, integers where floats belong) is a TypeError, a wrong size or
value is a ValueError. Every message holds the argument's name, what it was and what was expected,
so that a reader can mend the call without opening this library.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor


def describe(value: object) -> str:
    """Say in a few words what a value is: a tensor by shape and dtype, anything else by type."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def require_tensor(name: str, value: object, dims: str) -> Tensor:
    """Return `value` if it is a tensor with as many dimensions as `dims` names.

    Args:
        name: The argument's name, for the message.
        value: What the caller passed.
        dims: The expected dimensions as in a jaxtyping signature, for example "s_q h_q d".

    Raises:
        TypeError: `value` is not a tensor.
        ValueError: It has another number of dimensions.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor [{dims}], got {describe(value)}")
    if value.ndim != len(dims.split()):
        raise ValueError(f"{name} must have the shape [{dims}], got {describe(value)}")
    return value


def require_float(name: str, value: object, dims: str) -> Tensor:
    """As `require_tensor`, and the tensor holds floating-point numbers."""
    tensor = require_tensor(name, value, dims)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers, got {describe(value)}")
    return tensor


def require_integer(name: str, value: object, dims: str) -> Tensor:
    """As `require_tensor`, and the tensor holds int32 or int64 numbers."""
    tensor = require_tensor(name, value, dims)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must hold int32 or int64 numbers, got {describe(value)}")
    return tensor


def require_size(name: str, tensor: Tensor, dim: int, expected: int, why: str) -> None:
    """Raise a ValueError unless `tensor` has size `expected` in dimension `dim`."""
    if tensor.shape[dim] != expected:
        raise ValueError(
            f"{name} must have size {expected} in dimension {dim} ({why}), got {describe(tensor)}"
        )


def can_look(tensor: Tensor) -> bool:
    """Whether a check may look at a tensor's numbers: on the CPU, where that waits for nobody.

    Elsewhere the host would stand still until the device has done all that was asked of it, once a
    check, and a step that is captured in a graph would fail. There whoever makes the numbers, on
    the host, looks at them.
    """
    return tensor.device.type == "cpu"


def require_same_device(tensors: dict[str, Tensor]) -> None:
    """Raise a ValueError unless all named tensors lie on one device."""
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"tensors must lie on one device, got {devices}")


def require_same_dtype(tensors: dict[str, Tensor]) -> None:
    """Raise a TypeError unless all named tensors have one dtype."""
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"tensors must have one dtype, got {dtypes}")


def require_scale(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite positive number that float32 can hold.

    A scale of 1e-50 passes a check in double precision and is 0 where a kernel reads it as a
    float32 (flashinfer#4676), so the check is made in float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    try:
        # Without torch: this stands in steps that must read nothing back.
        (as_float32,) = struct.unpack("f", struct.pack("f", float(value)))
    except OverflowError:  # too large for a float32, or an int that not even a double can hold
        as_float32 = math.inf
    if not (math.isfinite(as_float32) and as_float32 > 0):
        raise ValueError(f"{name} must be finite and greater than 0 in float32, got {value!r}")
    return float(value)


def require_count(name: str, value: object, *, at_least: int = 0) -> int:
    """Return `value` if it is an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if value >= 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {value}")
    return value


def require_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`, else a ValueError that lists them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {describe(value)}")
    return value


def require_utf8(name: str, data: bytes) -> str:
    """Return the text of a file: UTF-8, without the byte-order mark that some editors write.

    Args:
        name: The file, for the message.
        data: Its bytes.

    Raises:
        ValueError: They are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error

"""Exact accounting of the tensor memory that a piece of code allocates, on any device.

An allocator's peak depends on its rounding, its cache and whatever ran before. This counts tensors
instead, so the same code gives the same number of bytes every time and a test may ask for equality.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch.tensor(...) and torch.from_numpy(...) build their tensor out of sight, then hand it to this
# operator as an argument: that argument is new, although it looks as if it was there before.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


@dataclass(frozen=True)
class CreatedTensor:
    """The size of a tensor at the moment its storage was created."""

    shape: tuple[int, ...]
    numel: int
    nbytes: int


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of tensor storages created inside its `with` block.

    A storage counts once, from its creation until nothing refers to it any more: views and in-place
    operations add nothing, and dropping a tensor while a view of it lives frees nothing. Tensors
    made before the block, such as the inputs, never count.

    What it does not see: scratch that an operator allocates and frees inside itself (the workspace
    of a matrix product, the tiles of a fused attention), memory that a custom kernel takes without
    torch, the rounding and the cache of the device's allocator, and other threads. Only strided
    tensors can be counted. The peak is therefore a lower bound of what the device must hold.

    Example:
        >>> q, k = torch.randn(1024, 64), torch.randn(1024, 64)
        >>> with TensorMemory() as memory:
        ...     scores = q @ k.T
        >>> memory.peak_bytes  # 1024 * 1024 * 4
        4194304
        >>> memory.largest_tensor.shape
        (1024, 1024)

    Attributes:
        live_bytes: Bytes of the storages created in the block that are still alive. It falls as
            they are freed, after the block too.
        peak_bytes: The largest `live_bytes` so far.
        largest_tensor: The tensor with the most elements that was created with a storage of its
            own, whether or not it is still alive; shape (0,) while there is none. A view cannot be
            it: `expand` makes a large shape without memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_tensor = CreatedTensor(shape=(0,), numel=0, nbytes=0)
        self._nbytes_of: dict[int, int] = {}  # id of a live storage -> its bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, says torch's own hook: a yes imports torch._dynamo at the first operator, for 2 s."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        known = set() if func is _LIFT_FRESH else _storage_ids((args, kwargs))
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._record(tensor, known)
        return result

    def _record(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._nbytes_of:
            if key in known:
                return  # made before the block: an argument, or a view of one
            # torch keeps one Python object per storage for as long as the storage lives, whoever
            # holds it, so the finaliser runs when the memory goes and not when this name does.
            weakref.finalize(storage, self._free, key).atexit = False
            self._nbytes_of[key] = 0
        grown_by = storage.nbytes() - self._nbytes_of[key]  # an old storage grows by resize_
        self._nbytes_of[key] += grown_by
        self.live_bytes += grown_by
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if grown_by > 0 and tensor.numel() > self.largest_tensor.numel:
            shape = tuple(tensor.shape)
            self.largest_tensor = CreatedTensor(shape, tensor.numel(), storage.nbytes())

    def _free(self, key: int) -> None:
        self.live_bytes -= self._nbytes_of.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage_ids(tree: Any) -> set[int]:
    return {id(tensor.untyped_storage()) for tensor in _tensors(tree)}

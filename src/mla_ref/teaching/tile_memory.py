"""A GPU's memory as the tile model sees it: bytes at addresses, and loads with a mask.

Only what was placed exists, so an address far beyond 2^31 costs nothing, and a load from where
nothing lies is an error, as it is on a GPU that is lucky. One that hits somebody else's bytes is
none, here as there.
"""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mla_ref.checks import describe
from mla_ref.numerics.float8 import from_e4m3

Array: TypeAlias = NDArray[Any]

E4M3 = from_e4m3(torch.arange(256, dtype=torch.uint8)).numpy()


class Memory:
    """Pieces of bytes, each at an address."""

    def __init__(self) -> None:
        """Without anything placed."""
        self._pieces: list[tuple[int, Array]] = []

    def place(self, address: int, data: Array) -> None:
        """Put bytes at an address; a view of them, so that later changes show.

        Raises:
            TypeError: They are no contiguous uint8 array.
            ValueError: Another piece lies there.
        """
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise TypeError(f"data must be a contiguous uint8 array, got {describe(data)}")
        flat = data.reshape(-1)
        for start, piece in self._pieces:
            if address < start + len(piece) and start < address + len(flat):
                raise ValueError(f"address {address}: a piece of {len(piece)} bytes is at {start}")
        self._pieces.append((address, flat))

    def load(self, at: Array, dtype: str, mask: Array) -> Array:
        """One number from each address, and 0 where the mask is False: nothing is read for it.

        Args:
            at: Addresses in bytes, int64 or int32, of any shape.
            dtype: "e4m3", "float32" or "bfloat16". The bytes of E4M3 become float16 and bfloat16
                becomes float32; both are exact.
            mask: As `at` in shape.

        Raises:
            IndexError: An address that is not masked has no memory.
        """
        size = {"e4m3": 1, "bfloat16": 2, "float32": 4}[dtype]
        wanted = at[mask].astype(np.int64)
        raw, found = np.zeros((len(wanted), size), np.uint8), np.zeros(len(wanted), bool)
        for start, piece in self._pieces:
            inside = (wanted >= start) & (wanted + size <= start + len(piece))
            raw[inside] = piece[(wanted[inside] - start)[:, None] + np.arange(size)]
            found |= inside
        if not found.all():
            raise IndexError(f"illegal memory access at byte {wanted[~found][0]:,}")
        numbers = _decode(raw, dtype)
        result = np.zeros(at.shape, numbers.dtype)
        result[mask] = numbers
        return result


def _decode(raw: Array, dtype: str) -> Array:
    if dtype == "e4m3":
        return E4M3[raw[:, 0]].astype(np.float16)
    if dtype == "float32":
        return raw.view(np.float32)[:, 0]
    # bfloat16 is the upper half of a float32.
    return (raw.view(np.uint16)[:, 0].astype(np.uint32) << 16).view(np.float32)

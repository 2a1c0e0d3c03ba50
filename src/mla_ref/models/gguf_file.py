"""A GGUF file: a model's dimensions, its tokenizer and its quantised tensors in one place."""

import os
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.models.gguf_header import read_header
from mla_ref.platform import model_file, require


def default_gguf() -> Path:
    """The model to run where none is named, SmolLM2-135M: see `mla_ref.platform.model_file`."""
    return model_file()


class GGUFFile:
    """A GGUF file behind a memory map: a tensor's bytes are read when it is asked for.

    Attributes:
        path: Where it lies.
        metadata: Every key with its value: a number, a bool, a string, or a list of these.
        tensors: Every tensor's header entry by name.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The package `gguf` is missing; the message names the extra.
        ValueError: It is no GGUF file, or is truncated or damaged; the message says where.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._bytes = _map(self.path)
        header = read_header(self.path, self._bytes)
        self.metadata, self.tensors = header.metadata, header.tensors
        self._places = self._find_bytes(header.end)

    def get(self, key: str, kind: type) -> Any:
        """Return a metadata value that must be there and be an int, float, bool, str or list."""
        value = self.metadata.get(key)
        # type() and not isinstance(): to Python, True is an int.
        if type(value) is not kind:
            found = "is missing" if value is None else f"is {value!r:.60}"
            raise ValueError(f"{self.path}: {key} {found}, expected a value of {kind.__name__}")
        return value

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "..."]:
        """Read one tensor and dequantise it.

        Args:
            name: Such as "blk.0.attn_q.weight".
            shape: What it must be, outermost dimension first.
            dtype: What to return; the values are computed in float32.

        Raises:
            ValueError: No such tensor, another shape, or a format that `gguf` cannot dequantise.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        entry = self.tensors[name]
        if entry.shape != shape:
            raise ValueError(
                f"{self.path}: {name} has the shape {list(entry.shape)}, expected {list(shape)}"
            )
        offset, num_bytes = self._places[name]
        raw = np.frombuffer(self._bytes, np.uint8, num_bytes, offset).reshape(*shape[:-1], -1)
        kind = require("gguf.constants").GGMLQuantizationType(entry.kind)
        try:
            values = require("gguf.quants").dequantize(raw, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} is {kind.name}, which gguf cannot dequantise ({error})"
            ) from error
        # An F32 tensor comes as a view of the read-only map, which torch must not have.
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"])).to(dtype)

    def _find_bytes(self, header_end: int) -> dict[str, tuple[int, int]]:
        """Where each tensor's bytes begin in the file, and how many they are."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0:
            raise ValueError(f"{self.path}: general.alignment is {alignment!r:.60}")
        start = -(-header_end // alignment) * alignment
        blocks = require("gguf.constants").GGML_QUANT_SIZES
        places = {}
        for name, entry in self.tensors.items():
            if entry.kind not in blocks:
                raise ValueError(f"{self.path}: {name} has the unknown number format {entry.kind}")
            values, block_bytes = blocks[entry.kind]
            if entry.shape[-1] % values:
                raise ValueError(
                    f"{self.path}: {name} has the shape {list(entry.shape)}, but its "
                    f"format stores rows in blocks of {values}"
                )
            offset, num_bytes = start + entry.offset, prod(entry.shape) // values * block_bytes
            if offset + num_bytes > len(self._bytes):
                raise ValueError(
                    f"{self.path} is truncated: {name} ends at byte "
                    f"{offset + num_bytes}, the file at {len(self._bytes)}"
                )
            places[name] = offset, num_bytes
        return places


def _map(path: Path) -> mmap:
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a GGUF file")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is not a GGUF file: it is empty")
    with path.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_READ)

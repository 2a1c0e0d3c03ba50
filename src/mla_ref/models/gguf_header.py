"""The header of a GGUF file: what stands where, read with nothing but `struct`.

The format is ggml's (docs/gguf.md in ggml-org/ggml). Little-endian, one part after the other:

    "GGUF", version u32, number of tensors u64, number of metadata keys u64
    metadata: key, type u32, value
    tensors: name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    padding up to `general.alignment`, then the bytes of the tensors

A string is its length as u64 and its bytes. The package `gguf` has a reader too, but it makes a
NumPy view of each of the tokenizer's 98,000 strings, which takes seconds, and tells of a truncated
file by a failed reshape.
"""

import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The codes of a metadata value's type, and how `struct` reads each scalar.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
# ggml's own limit. A damaged file can claim any number.
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorEntry:
    """What the header says about one tensor.

    Attributes:
        shape: Outermost dimension first, as torch has it; the file has it the other way round.
        kind: ggml's number for the number format: 0 is F32, 3 is Q4_1, 8 is Q8_0.
        offset: Of its first byte from the start of the tensors' part.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """All that a GGUF file says before its tensors' bytes.

    Attributes:
        metadata: Every key with its value: a number, a bool, a string, or a list of these.
        tensors: Every tensor by name.
        end: Bytes of the header, without the padding.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    end: int


def read_header(path: Path, data: mmap | bytes) -> Header:
    """Read the header at the start of `data`.

    Args:
        path: Where the data come from, for the messages.
        data: The whole file.

    Raises:
        ValueError: This is no GGUF file, or it is truncated or damaged; the message says where.
    """
    if (magic := data[:4]) != _MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}")
    cursor = _Cursor(path, data, position=4)
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise ValueError(f"{path} is GGUF version {version}, expected 2 or 3")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        cursor.add(metadata, key, cursor.value(cursor.scalar("I")))
    tensors: dict[str, TensorEntry] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        cursor.add(tensors, name, cursor.tensor_entry(name))
    return Header(metadata, tensors, cursor.position)


@dataclass
class _Cursor:
    """A position in the file, and how to read each kind of thing that may stand there."""

    path: Path
    data: mmap | bytes
    position: int

    def take(self, num_bytes: int) -> int:
        """Move past `num_bytes`, if the file has them, and return the position before."""
        start = self.position
        if start + num_bytes > len(self.data):
            raise self.too_short(start, num_bytes)
        self.position += num_bytes
        return start

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.take(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        # In one piece and without the calls above: a tokenizer has 100,000 strings.
        start = self.position + 8
        length = int.from_bytes(self.data[self.position : start], "little")
        self.position = start + length
        if self.position > len(self.data):
            raise self.too_short(start, length)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the string at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind == _STRING:
                return [self.string() for _ in range(count)]
            return list(self.scalars(self.code(kind), count))
        return self.scalar(self.code(kind))

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"the metadata before byte {self.position} have the type {kind}")
        return _SCALARS[kind]

    def tensor_entry(self, name: str) -> TensorEntry:
        dimensions = self.scalar("I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = self.scalars("Q", dimensions)[::-1]
        return TensorEntry(shape, kind=self.scalar("I"), offset=self.scalar("Q"))

    def add(self, table: dict[str, Any], name: str, value: Any) -> None:
        if name in table:
            raise self.damaged(f"it has {name} twice")
        table[name] = value

    def too_short(self, start: int, num_bytes: int) -> ValueError:
        return ValueError(
            f"{self.path} is truncated or damaged: its header needs {num_bytes} bytes at byte "
            f"{start}, but the file ends at {len(self.data)}"
        )

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {what}")

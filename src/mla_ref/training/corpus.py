"""Text to train on, and text held out: whole files, never pieces of the same file."""

import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.models.tokenizer import Tokenizer

# One file in so many is held out, by a checksum of its name: the same on every machine.
HELD_OUT_ONE_IN = 20


def standard_library(root: Path | None = None) -> list[Path]:
    """The Python files of a standard library, this interpreter's if None, tests left out: 12 MB.

    Text that is on every machine already (PSF licence). It differs a little from one Python
    release to the next.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))


def text_files(paths: Iterable[Path]) -> list[Path]:
    """The files named, and all files in the folders named, in order."""
    found = [p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [path for path in found if path.is_file()]


@dataclass(frozen=True)
class Corpus:
    """Token ids, file after file with the end token between them.

    Attributes:
        train: To train on.
        held_out: To measure on.
    """

    train: Int[Tensor, " n"]
    held_out: Int[Tensor, " m"]

    @classmethod
    def read(cls, paths: Iterable[Path], tokenizer: Tokenizer) -> "Corpus":
        """Tokenise files; a file that is not UTF-8 is read with replacement characters.

        Raises:
            ValueError: There is no text to train on.
        """
        parts: dict[bool, list[int]] = {True: [], False: []}
        for path in paths:
            held_out = zlib.crc32(path.name.encode()) % HELD_OUT_ONE_IN == 0
            text = path.read_text(encoding="utf-8", errors="replace")
            parts[held_out] += [*tokenizer.encode(text), tokenizer.eos_id]
        if not parts[False]:
            raise ValueError("paths must name text files, got none that is not held out")
        return cls(torch.tensor(parts[False]), torch.tensor(parts[True], dtype=torch.int64))

    def batch(self, step: int, *, windows: int, length: int) -> Int[Tensor, "windows length"]:
        """Windows from random places of the training text; the same for the same step."""
        return random_windows(self.train, step, windows=windows, length=length)


def random_windows(
    tokens: Int[Tensor, " n"], seed: int, *, windows: int, length: int
) -> Int[Tensor, "windows length"]:
    """Windows from random places of a text; the same for the same seed.

    Raises:
        ValueError: The text is shorter than a window.
    """
    require_count("windows", windows, at_least=1)
    require_count("length", length, at_least=1)
    last = tokens.shape[0] - length
    if last < 0:
        raise ValueError(
            f"length must be at most the text's {tokens.shape[0]} tokens, got {length}"
        )
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(last + 1, (windows,), generator=generator)
    return tokens[first[:, None] + torch.arange(length)]


def windows_of(tokens: Int[Tensor, " n"], length: int, most: int) -> Int[Tensor, "windows length"]:
    """At most `most` windows that follow each other, from the beginning; the rest is left out."""
    count = min(tokens.shape[0] // require_count("length", length, at_least=1), most)
    return tokens[: count * length].reshape(count, length)

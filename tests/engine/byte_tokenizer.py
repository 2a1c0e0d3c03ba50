"""A tokenizer without a file: each byte is a token, and 0 ends a text."""

from collections.abc import Iterable

from mla_ref.models.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """What the engine and the command line ask of a tokenizer."""

    def __init__(self, file: object = None) -> None:
        self.vocab_size, self.eos_id, self.special_ids = 256, 0, frozenset([0])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Iterable[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

"""What a request has written, as text, token by token."""

from collections.abc import Sequence

from mla_ref.models.tokenizer import StreamDecoder, Tokenizer


class Transcript:
    """Tokens of one request and their text, up to where it ends.

    Attributes:
        token_ids: Tokens so far, the one that ends the text included.
        text: Their characters; an end token has none.
        finish_reason: As the engine's, or "stop" where the stop text has come; None before.
    """

    def __init__(self, tokenizer: Tokenizer, stop_text: str | None = None) -> None:
        """Nothing written; with a stop text, it ends in front of that."""
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = StreamDecoder(tokenizer)
        self._stop_text = stop_text
        self._held = ""

    def add(self, token_ids: Sequence[int], finish_reason: str | None = None) -> list[str]:
        """Take the tokens of a step.

        Args:
            token_ids: The new tokens.
            finish_reason: The engine's, if they are the last.

        Returns:
            The characters that each token completes; none in the middle of a character, nor where
            the stop text may have begun. If the stop text comes, the list ends there.
        """
        pieces: list[str] = []
        for number, token_id in enumerate(token_ids, 1):
            if self.finish_reason is not None:
                break
            self.token_ids.append(token_id)
            if number == len(token_ids):
                self.finish_reason = finish_reason
            # The token that ends a text is a sign for the engine, not for the reader.
            if self.finish_reason not in ("eos", "stop"):
                self._held += self._decoder.add(token_id)
            if self.finish_reason is not None:
                self._held += self._decoder.finish()
            pieces.append(self._release())
        self.text += "".join(pieces)
        return pieces

    def _release(self) -> str:
        """What may be shown of the characters that are held."""
        stop, held = self._stop_text, self._held
        end = len(held)
        if stop and stop in held:
            end, self.finish_reason = held.index(stop), "stop"
        elif stop and self.finish_reason is None:
            end -= next((n for n in range(len(stop) - 1, 0, -1) if held.endswith(stop[:n])), 0)
        self._held = held[end:]
        return held[:end]

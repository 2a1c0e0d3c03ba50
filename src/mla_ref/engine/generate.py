"""Greedy generation for one request: prefill in chunks, then one token a step.

Both phases run the same `Step`: new tokens at the positions after those that the cache holds. A
chunk of the prompt is many tokens, so that a long prompt needs no large step; decode is one token,
the one just chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.tokenizer import StreamDecoder


@dataclass(frozen=True)
class Prefilled:
    """A chunk of the prompt has run.

    Attributes:
        done: Tokens of the prompt that the cache holds now.
        total: Tokens of the prompt.
        seconds: What this chunk took.
    """

    done: int
    total: int
    seconds: float


@dataclass(frozen=True)
class NewToken:
    """A token has been chosen.

    Attributes:
        token_id: Which.
        text: The characters that it completes; empty for the end token, or without a decoder.
        seconds: What its step took. The step of the first token is the last chunk of the prompt;
            only the choice is counted here.
        finish_reason: None, or for the last token "eos" (it is the end token) or "length" (no more
            were wanted).
    """

    token_id: int
    text: str
    seconds: float
    finish_reason: str | None


def generate(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    decoder: StreamDecoder | None = None,
    page_size: int = 64,
    chunk_size: int = 256,
    cache_dtype: torch.dtype | None = None,
    on_prefill: Callable[[Prefilled], None] | None = None,
) -> Iterator[NewToken]:
    """Continue a prompt, choosing the most likely token each time.

    Args:
        model: The model.
        prompt_ids: Tokens of the prompt, one at least.
        max_new_tokens: Tokens to choose at most.
        eos_id: Token that ends the text, itself the last one; None if there is no such token.
        decoder: Turns the new tokens into text; None: they come without text.
        page_size: Tokens a page of the cache.
        chunk_size: Tokens of the prompt that run in one step.
        cache_dtype: What the cache stores; default: as the weights.
        on_prefill: Called after each chunk of the prompt, for a progress display.

    Returns:
        An iterator of tokens. Its first step runs the prompt.

    Raises:
        ValueError: The prompt is empty, or with the new tokens it is longer than the model's
            context, or a number is less than 1. Raised by the call, not by the first step.
    """
    require_count("max_new_tokens", max_new_tokens, at_least=1)
    require_count("chunk_size", chunk_size, at_least=1)
    total, context = len(prompt_ids), model.config.context_length
    if total == 0:
        raise ValueError("the prompt must hold a token at least, got an empty one")
    if total + max_new_tokens > context:
        raise ValueError(
            f"prompt and new tokens must fit into the model's context of {context}, got {total} + "
            f"{max_new_tokens}"
        )
    # All pages now: no step allocates any. The last token is never run, so it needs no row.
    num_pages = pages_needed(total + max_new_tokens - 1, page_size)
    cache = model.new_cache(num_pages, page_size, cache_dtype)

    def run(token_ids: Sequence[int], computed_len: int) -> Float[Tensor, "1 hidden"]:
        step = Step.one_request(computed_len, len(token_ids), page_size)
        return model.forward(torch.tensor(token_ids), step, cache)[-1:]

    def tokens() -> Iterator[NewToken]:
        for first in range(0, total, chunk_size):
            start = perf_counter()
            chunk = prompt_ids[first : first + chunk_size]
            hidden = run(chunk, first)
            if on_prefill:
                on_prefill(Prefilled(first + len(chunk), total, perf_counter() - start))
        start = perf_counter()
        for count in range(1, max_new_tokens + 1):
            token_id = int(model.logits(hidden).argmax())
            reason = "eos" if token_id == eos_id else "length" if count == max_new_tokens else None
            text = _text(decoder, token_id, reason)
            yield NewToken(token_id, text, perf_counter() - start, reason)
            if reason:
                return
            start = perf_counter()
            hidden = run([token_id], total + count - 1)

    return tokens()


def _text(decoder: StreamDecoder | None, token_id: int, reason: str | None) -> str:
    """What a token shows; the last one also what is left of a character that is not whole."""
    if decoder is None:
        return ""
    text = "" if reason == "eos" else decoder.add(token_id)
    return text + decoder.finish() if reason else text

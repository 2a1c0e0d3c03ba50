"""Plain decoding: one request, greedy, the prompt in chunks and then one token a step.

No queue, no drafts, no pages that anybody else wants. The engine is checked against this loop, and
this loop against running the whole text again for every token.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.engine.request import Request
from mla_ref.models.language_model import LanguageModel


def generate(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    page_size: int = 64,
    chunk_size: int = 256,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[int]:
    """Continue a prompt, choosing the most likely token each time.

    Args:
        model: The model.
        prompt_ids: Tokens of the prompt, one at least.
        max_new_tokens: Tokens to choose at most.
        eos_id: Token that ends the text, itself the last one; None if there is no such token.
        page_size: Tokens a page of the cache.
        chunk_size: Tokens of the prompt that run in one step.
        cache_dtype: What the cache stores; default: as the weights.

    Returns:
        An iterator of tokens. Its first step runs the prompt.

    Raises:
        TypeError: A token is not an int.
        ValueError: The prompt is empty, a token is not in the vocabulary, or with the new tokens it
            is longer than the model's context, or a number is less than 1. Raised by the call, not
            by the first step.
    """
    request = Request("generate", prompt_ids, max_new_tokens, eos_id=eos_id)
    request.require_fits(model.config.vocab_size, model.config.context_length)
    require_count("chunk_size", chunk_size, at_least=1)
    prompt_ids, total = request.prompt_ids, len(request.prompt_ids)
    # All pages now: no step allocates any.
    num_pages = pages_needed(request.max_rows, page_size)
    cache = model.new_cache(num_pages, page_size, cache_dtype)

    def run(token_ids: Sequence[int], computed_len: int) -> Float[Tensor, "1 hidden"]:
        step = Step.one_request(computed_len, len(token_ids), page_size).to(model.device)
        return model.forward(torch.tensor(token_ids, device=model.device), step, cache)[-1:]

    def tokens() -> Iterator[int]:
        for first in range(0, total, chunk_size):
            hidden = run(prompt_ids[first : first + chunk_size], first)
        for length in range(total, total + max_new_tokens):
            token_id = int(model.logits(hidden).argmax())
            yield token_id
            if token_id == eos_id or length == total + max_new_tokens - 1:
                return
            hidden = run([token_id], length)

    return tokens()

"""The whole model in one screen, with its attention as an argument: hear what a bug sounds like."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.numerics import AttentionResult
from mla_ref.teaching.real_input import RealModel


@torch.inference_mode()
def continue_text(
    real: RealModel, prompt: str, attention: Callable[..., AttentionResult], num_tokens: int
) -> str:
    """Let the model go on with a text, greedily: the prompt in one call, then token by token.

    Args:
        real: From `real_model()`.
        prompt: The text to go on with.
        attention: Called as `causal_attention` is; the keys and values hold all tokens so far.
        num_tokens: Tokens to add.
    """
    require_count("num_tokens", num_tokens, at_least=1)
    model = real.model
    cache: list[tuple[Tensor, ...]] = [() for _ in model.layers]
    new = torch.tensor(real.tokenizer.encode(prompt))
    text: list[int] = []
    position = 0
    for _ in range(num_tokens):
        positions = torch.arange(position, position + len(new))
        x = model.weights.embedding[new]
        for i, layer in enumerate(model.layers):
            gqa, h = layer.gqa, layer.attention_input(x)
            added = gqa.keys(h, positions), gqa.values(h)
            old = cache[i]
            cache[i] = tuple(map(torch.cat, zip(old, added, strict=True))) if old else added
            out, _ = attention(
                gqa.queries(h, positions), *cache[i], softmax_scale=gqa.softmax_scale
            )
            x = layer.feed_forward(x + gqa.output(out))
        token = int(model.logits(model.last_norm(x[-1:])).argmax())
        text.append(token)
        position, new = position + len(new), torch.tensor([token])
    return real.tokenizer.decode(text)

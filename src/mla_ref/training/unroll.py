"""The MTP module over whole windows, run several times on its own output, as it drafts.

Anchor t is a position that the model has run. Pass j guesses token t+j+1 from token t+j and the
state of the pass before (the model's own for j = 1), at position t+j-1. What it may see is what
the cache holds when it drafts: the first pass's rows up to t, and this anchor's own later passes.
A module that is only ever trained on the model's states is at a loss in its second pass.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.models.mtp import MTPWeights
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.training.trunk import causal_mask


def unroll(
    model: SmolLM2,
    weights: MTPWeights,
    token_ids: Int[Tensor, "b s"],
    hidden: Float[Tensor, "b s hidden"],
    passes: int,
) -> Iterator[Float[Tensor, "b s hidden"]]:
    """Hidden states of each pass at every anchor, for `MTPModule.logits`.

    Args:
        model: The frozen model.
        weights: The module's.
        token_ids: Windows of text; it stands for drafts that were all accepted.
        hidden: The model's hidden states for them.
        passes: Tokens that are guessed from one anchor.

    Yields:
        The states of pass 1, 2, ... Of pass j, those of anchors beyond s - j - 1 are made from
        tokens that wrapped round, and are to be left out.
    """
    layer, eps = model.new_layer(weights.layer), model.config.rms_norm_eps
    (b, s), groups = token_ids.shape, model.config.num_kv_heads
    visible = causal_mask(s, hidden.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for number in range(1, passes + 1):
        embedding = model.weights.embedding[token_ids.roll(-number, dims=1)]
        x = weights.mix(embedding, hidden, eps)
        positions = torch.arange(s, device=hidden.device).repeat(b) + number - 1
        qkv = layer.gqa.qkv(layer.attention_input(x).flatten(0, 1), positions)
        q, k, v = (t.unflatten(0, (b, s)) for t in qkv)
        keys.append(k)
        values.append(v)
        q = q.unflatten(2, (groups, -1)) * layer.gqa.softmax_scale
        first = torch.einsum("bsgqd,btgd->bgqst", q, keys[0])
        own = [torch.einsum("bsgqd,bsgd->bgqs", q, later)[..., None] for later in keys[1:]]
        scores = torch.cat([first.masked_fill(~visible, -torch.inf), *own], dim=-1)
        shares = torch.softmax(scores, dim=-1)
        out = torch.einsum("bgqst,btgd->bsgqd", shares[..., :s], values[0])
        for i, later in enumerate(values[1:]):
            out = out + torch.einsum("bgqs,bsgd->bsgqd", shares[..., s + i], later)
        attended = layer.gqa.output(out.flatten(2, 3).flatten(0, 1)).unflatten(0, (b, s))
        hidden = layer.feed_forward(x + attended)
        yield hidden


def draft_loss(
    logits: Float[Tensor, "b s draft_vocab"], target: Float[Tensor, "b s draft_vocab"]
) -> Float[Tensor, ""]:
    """Mean KL(target || draft) in nats, both over the tokens that can be guessed."""
    log_p, log_q = torch.log_softmax(target, dim=-1), torch.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()


def matches(
    guesses: list[Int[Tensor, "b s"]], token_ids: Int[Tensor, "b s"], first_anchor: int
) -> Float[Tensor, " passes"]:
    """Share of anchors whose first j guesses are all the text's, for each j.

    On text that the model wrote greedily this is the acceptance rate by position, since a draft
    behind a rejected one does not count.

    Args:
        guesses: Of each pass.
        token_ids: The text.
        first_anchor: Anchors before it are left out: there the text is not the model's own.

    Raises:
        ValueError: No anchor is left that has a token for each guess.
    """
    n = len(guesses)
    last = token_ids.shape[1] - n - 1
    if require_count("first_anchor", first_anchor) >= last:
        raise ValueError(
            f"first_anchor must be below {last}, so that {n} guesses have their tokens in a text "
            f"of {token_ids.shape[1]}, got {first_anchor}"
        )
    right = torch.ones_like(token_ids[:, first_anchor:last], dtype=torch.bool)
    rates = []
    for number, guess in enumerate(guesses, start=1):
        wanted = token_ids[:, first_anchor + number + 1 : last + number + 1]
        right = right & (guess[:, first_anchor:last] == wanted)
        rates.append(right.double().mean())
    return torch.stack(rates)

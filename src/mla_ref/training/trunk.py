"""SmolLM2 over whole windows at once, with a look at every layer's attention.

`SmolLM2.forward` serves requests from pages. Here many windows of one length run side by side with
all attention weights in memory, which is what training and measuring need: they are the target of
the distillation, and a mask on them is sparse attention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.models.smollm2 import SmolLM2


@dataclass(frozen=True)
class LayerView:
    """One layer's attention, before it is computed.

    Attributes:
        layer: Its number.
        x: Input of the attention.
        q: Queries, turned.
        k: Keys, turned.
        softmax_scale: Factor on q·k.
    """

    layer: int
    x: Float[Tensor, "b s hidden"]
    q: Float[Tensor, "b s h_q d"]
    k: Float[Tensor, "b s h_kv d"]
    softmax_scale: float


Chooser = Callable[[LayerView], Tensor]


def causal_mask(length: int, device: torch.device) -> Bool[Tensor, "s s"]:
    """True where a row may see a key."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def attention_shares(
    view: LayerView, visible: Bool[Tensor, "*b s s"]
) -> Float[Tensor, "b h_q s s"]:
    """Attention weights of each head over the visible keys; they sum to 1."""
    q = view.q.unflatten(2, (view.k.shape[2], -1))
    scores = torch.einsum("bsgqd,btgd->bgqst", q * view.softmax_scale, view.k).flatten(1, 2)
    if visible.ndim == 3:
        visible = visible[:, None]
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


def run_trunk(
    model: SmolLM2,
    token_ids: Int[Tensor, "b s"],
    *,
    choose: Chooser | None = None,
    visit: Callable[[LayerView, Tensor], None] | None = None,
) -> Float[Tensor, "b s hidden"]:
    """Run windows of tokens, each from position 0.

    Args:
        model: On any device.
        token_ids: One window a row.
        choose: Gives the keys that each row of a layer may see, [b, s, s]; None: all before it.
            A row must see one key at least.
        visit: Called with each layer's view and attention weights [b, h_q, s, s].

    Returns:
        Hidden states after the last norm.
    """
    b, s = token_ids.shape
    x = model.weights.embedding[token_ids]
    positions = torch.arange(s, device=x.device).repeat(b)
    visible = causal_mask(s, x.device)
    for layer in range(model.config.num_layers):
        gqa = model.gqa(layer)
        attention_input = model.layers[layer].attention_input(x)
        q, k, v = (
            t.unflatten(0, (b, s)) for t in gqa.qkv(attention_input.flatten(0, 1), positions)
        )
        view = LayerView(layer, attention_input, q, k, gqa.softmax_scale)
        shares = attention_shares(view, visible if choose is None else choose(view) & visible)
        if visit is not None:
            visit(view, shares)
        grouped = shares.unflatten(1, (v.shape[2], -1))
        out = torch.einsum("bgqst,btgd->bsgqd", grouped, v).flatten(2, 3)
        x = x + gqa.output(out.flatten(0, 1)).unflatten(0, (b, s))
        x = model.layers[layer].feed_forward(x)
    return model.last_norm(x)

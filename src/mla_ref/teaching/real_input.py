"""A real model for the lessons, where it is installed, and random numbers where it is not."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer

# SmolLM2-135M: query heads, KV heads, head dimension.
_HEADS, _KV_HEADS, _DIM = 9, 3, 64


@dataclass(frozen=True)
class RealModel:
    """SmolLM2-135M, a small pretrained model, with its tokenizer.

    Attributes:
        model: The weights, float32.
        tokenizer: Text to token ids and back.
    """

    model: SmolLM2
    tokenizer: Tokenizer


@dataclass(frozen=True)
class LayerInput:
    """What the attention of one layer gets for a text.

    Attributes:
        q: Queries, RoPE applied.
        k: Keys, RoPE applied.
        v: Values.
        softmax_scale: Factor on q·k.
        tokens: The text's tokens as strings; "t0", "t1", ... for random numbers.
        origin: One line that says where the numbers come from.
    """

    q: Float[Tensor, "n h_q d_qk"]
    k: Float[Tensor, "n h_kv d_qk"]
    v: Float[Tensor, "n h_kv d_v"]
    softmax_scale: float
    tokens: tuple[str, ...]
    origin: str


def real_model() -> RealModel | None:
    """The model, or None where its file or the packages to read it are missing.

    It then prints one line that says why and what to install; a lesson goes on with random numbers.
    """
    try:
        path = default_gguf()
        return RealModel(SmolLM2.from_gguf(path, attention="gqa"), Tokenizer(GGUFFile(path)))
    except (ImportError, FileNotFoundError) as error:
        print(f"Random numbers in place of a real model: {error}")
        return None


def layer_input(real: RealModel | None, *, layer: int = 7, num_tokens: int = 128) -> LayerInput:
    """The attention inputs of a layer for the beginning of Jane Austen's "Emma", float32.

    Args:
        real: From `real_model()`. None gives random numbers of the same shapes.
        layer: Layer of the model, 0 .. 29; the seed of random numbers.
        num_tokens: Tokens from the beginning of the text.
    """
    require_count("layer", layer)
    require_count("num_tokens", num_tokens, at_least=1)
    if real is None:
        return _random(layer, num_tokens)
    ids = real.tokenizer.encode(passage())[:num_tokens]
    with torch.inference_mode():
        x = real.model.attention_inputs(torch.tensor(ids), (layer,))[layer]
        gqa, positions = real.model.gqa(layer), torch.arange(len(ids))
        q, k, v = gqa.queries(x, positions), gqa.keys(x, positions), gqa.values(x)
    return LayerInput(
        q.clone(),
        k.clone(),
        v.clone(),
        gqa.softmax_scale,
        tuple(real.tokenizer.decode([token]) for token in ids),
        f"real activations: SmolLM2-135M, layer {layer}, the first {len(ids)} tokens of Emma",
    )


def _random(layer: int, n: int) -> LayerInput:
    generator = torch.Generator().manual_seed(layer)
    q, k, v = (
        torch.randn(n, heads, _DIM, generator=generator) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    return LayerInput(
        q,
        k,
        v,
        _DIM**-0.5,
        tuple(f"t{i}" for i in range(n)),
        f"random numbers for {n} tokens",
    )

"""What an FP8 cache does to a whole model's predictions, for three ways to turn its rows first.

    python -m mla_ref.teaching.fp8_logits --tokens 512

makes the table of lesson 08 in about a minute.
"""

import argparse
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.checks import require_choice, require_count
from mla_ref.models import passage
from mla_ref.numerics import hadamard
from mla_ref.teaching.real_input import RealModel, real_model

ROTATIONS = ("none", "one of 512", "two of 256")
_BLOCK, _WIDTH = 256, 192  # half of a latent, and the numbers in it: 3 heads of 64


@dataclass(frozen=True)
class LogitError:
    """How far predictions moved.

    Attributes:
        rotation: One of `ROTATIONS`.
        mean_kl: Mean over the tokens of KL(exact, FP8), in nats.
        top1_agreement: Share of tokens whose most probable next token is the same.
    """

    rotation: str
    mean_kl: float
    top1_agreement: float


def rotation_matrix(rotation: str) -> Float[Tensor, "512 512"]:
    """The orthogonal matrix that a latent (v, 0, k, 0) is turned by before it is quantised.

    Args:
        rotation: "none"; "one of 512", a Hadamard matrix over keys and values together; "two of
            256", one over the values and one over the keys, as `PackedMLA` does.
    """
    require_choice("rotation", rotation, ROTATIONS)
    if rotation == "none":
        return torch.eye(2 * _BLOCK)
    if rotation == "one of 512":
        return hadamard(2 * _BLOCK).float()
    return torch.block_diag(hadamard(_BLOCK), hadamard(_BLOCK)).float()


@torch.inference_mode()
def logit_errors(
    real: RealModel, num_tokens: int, rotations: tuple[str, ...] = ROTATIONS
) -> list[LogitError]:
    """Run a text through SmolLM2 with exact rows and with FP8 rows, and compare predictions.

    Args:
        real: From `real_model()`.
        num_tokens: Tokens from the beginning of "Emma"; each predicts its successor.
        rotations: Which of `ROTATIONS`.
    """
    require_count("num_tokens", num_tokens, at_least=1)
    ids = torch.tensor(real.tokenizer.encode(passage())[:num_tokens])
    exact = _log_probabilities(real, ids, None)
    result = []
    for rotation in rotations:
        rounded = _log_probabilities(real, ids, rotation_matrix(rotation))
        kl = (exact.exp() * (exact - rounded)).sum(dim=-1).mean()
        same = (exact.argmax(dim=-1) == rounded.argmax(dim=-1)).float().mean()
        result.append(LogitError(rotation, float(kl), float(same)))
    return result


def _log_probabilities(real: RealModel, ids: Tensor, rotation: Tensor | None) -> Tensor:
    """The model as trained; with a rotation, each layer's rows pass through their 656 bytes."""
    model, positions = real.model, torch.arange(len(ids))
    x = model.weights.embedding[ids]
    for layer in range(model.config.num_layers):
        gqa, h = model.gqa(layer), model.layers[layer].attention_input(x)
        q, k, v = gqa.queries(h, positions), gqa.keys(h, positions), gqa.values(h)
        if rotation is not None:
            k, v = _through_bytes(k, v, rotation)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=gqa.softmax_scale, enable_gqa=True
        )
        x = model.layers[layer].feed_forward(x + gqa.output(out.transpose(0, 1)))
    return model.logits(model.last_norm(x)).log_softmax(dim=-1)


def _through_bytes(
    k: Float[Tensor, "s 3 64"], v: Float[Tensor, "s 3 64"], rotation: Float[Tensor, "512 512"]
) -> tuple[Float[Tensor, "s 3 64"], Float[Tensor, "s 3 64"]]:
    latent = k.new_zeros(k.shape[0], 2 * _BLOCK)
    latent[:, :_WIDTH], latent[:, _BLOCK : _BLOCK + _WIDTH] = v.flatten(1), k.flatten(1)
    back = unpack_fp8_rows(pack_fp8_rows(latent @ rotation.T))[:, : 2 * _BLOCK] @ rotation
    return (
        back[:, _BLOCK : _BLOCK + _WIDTH].unflatten(1, k.shape[1:]),
        back[:, :_WIDTH].unflatten(1, v.shape[1:]),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the text")
    arguments = parser.parse_args()
    if real := real_model():
        for row in logit_errors(real, arguments.tokens):
            print(f"{row.rotation:<11} KL {row.mean_kl:.4f}  top-1 {row.top1_agreement:.3f}")


if __name__ == "__main__":
    main()

"""How far a result may lie from the float64 definition: the precision rule, for each row and head.

The rule (`mla_ref.numerics.precision_rule`): twice the error of the same maths in torch, the twin,
plus one unit in the last place of the output dtype at the row's maximum. One thing is added. The
twin adds up a score of 576 products in one order and a kernel in another; where two keys compete,
the twin may be lucky. So a score may be off by what float32 summation does to it,

    noise = sqrt(576) * 2^-23 * softmax_scale * ||q|| * ||k||,

and with it the LSE by as much and the output by that times the spread of the values. For unit
normal numbers this is 1e-4 in the LSE, and far below one ulp of a bfloat16 output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.numerics import AttentionResult
from mla_ref.numerics.precision import ulp
from mla_ref.testing.definition import with_sink

FLOAT32_EPS = 2.0**-23


def twin(
    arguments: dict[str, Any],
    rows: Sequence[Float[Tensor, "_n d_row"]],
    maths: str,
    kv_lora_rank: int = 512,
) -> AttentionResult:
    """The same attention in float32, as plain torch computes it.

    With maths "bfloat16" queries, rows and weights are rounded to bfloat16 before each product and
    the sums are float32, as in a tensor core.
    """

    def operand(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float() if maths == "bfloat16" else x.float()

    outs, lses = [], []
    for queries, numbers in zip(arguments["q"], rows, strict=True):
        keys = operand(numbers)
        scores = operand(queries) @ keys.T * arguments["softmax_scale"]
        if not len(keys):
            outs.append(scores.new_zeros(len(queries), kv_lora_rank))
            lses.append(scores.new_full((len(queries),), -torch.inf))
            continue
        top = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        outs.append(operand(weights) @ keys[:, :kv_lora_rank] / total)
        lses.append((torch.log(total) + top)[:, 0])
    if not outs:
        shape = arguments["q"].shape[:2]
        return AttentionResult(torch.zeros(*shape, kv_lora_rank), torch.zeros(shape))
    result = AttentionResult(torch.stack(outs), torch.stack(lses))
    return with_sink(result, arguments.get("sink"))


def attention_limits(
    arguments: dict[str, Any],
    rows: Sequence[Float[Tensor, "_n d_row"]],
    plain: AttentionResult,
    expected: AttentionResult,
    *,
    maths: str,
    out_dtype: torch.dtype,
) -> AttentionResult:
    """The largest absolute error allowed in each row and head: of `out`, and of `lse`.

    Args:
        arguments: Of the call.
        rows: The numbers that each row sees.
        plain: The definition's result without the sink.
        expected: The same with the sink.
        maths: As in `twin`.
        out_dtype: Dtype of the output under test.
    """
    low = twin(arguments, rows, maths, expected.out.shape[-1])
    noise, spread = _score_noise(arguments, rows, plain)
    out = (
        2 * finite_part(low.out.to(out_dtype).double() - expected.out).abs().amax(dim=-1)
        + ulp(finite_part(expected.out).abs().amax(dim=-1), out_dtype)
        + 2 * noise * spread
    )
    lse = (
        2 * finite_part(low.lse.double() - expected.lse).abs()
        + ulp(finite_part(expected.lse), torch.float32)
        + noise
    )
    return AttentionResult(out, lse)


def _score_noise(
    arguments: dict[str, Any], rows: Sequence[Tensor], plain: AttentionResult
) -> tuple[Tensor, Tensor]:
    """What float32 summation may do to a score, and the spread of the values under the weights."""
    q, scale = arguments["q"].double(), arguments["softmax_scale"]
    noise, spread = torch.zeros(q.shape[:2]).double(), torch.zeros(q.shape[:2]).double()
    d_c = plain.out.shape[-1]
    for row, keys in enumerate(rows):
        if len(keys):
            longest = keys.norm(dim=-1).amax()
            noise[row] = q.shape[2] ** 0.5 * FLOAT32_EPS * scale * q[row].norm(dim=-1) * longest
            weights = torch.exp(q[row] @ keys.T * scale - plain.lse[row, :, None])
            squares = weights @ keys[:, :d_c] ** 2
            variance = (squares - plain.out[row] ** 2).clamp(min=0)
            spread[row] = variance.amax(dim=-1).sqrt()
    return noise, spread


def finite_part(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Zeros in place of NaN and infinity; where they stand is compared by itself."""
    return torch.where(x.isfinite(), x, 0.0)

"""Numerics and layers: the right result is the textbook formula in float64."""

import math

import torch
from hypothesis import strategies as st
from tests.edges.edge import FLOATS, Arguments, Draw, Edge, floats, small, some
from torch import Tensor

from mla_ref import layers, numerics
from mla_ref.numerics import AttentionResult


def parts_arguments(draw: Draw) -> Arguments:
    rows = draw(st.lists(some, max_size=2))
    shape = (draw(st.integers(0, 3)), *rows)
    lses = floats(draw, *shape, dtype=draw(st.sampled_from(FLOATS[:2])))
    if lses.numel() and draw(st.booleans()):
        lses.view(-1)[draw(st.integers(0, lses.numel() - 1))] = -math.inf
    return {"outs": floats(draw, *shape, draw(small)), "lses": lses}


def parts_right(a: Arguments) -> AttentionResult:
    outs, lses = a["outs"].double(), a["lses"].double()
    if not len(outs):
        return AttentionResult(outs.sum(0), lses.sum(0) - math.inf)
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(lse.isinf(), 0.0, lse)).exp()
    return AttentionResult((weights[..., None] * outs).sum(0), lse)


def two_arguments(draw: Draw) -> Arguments:
    rows = draw(st.lists(some, min_size=1, max_size=2))
    dtype, lse_dtype = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS[:2]))
    d = draw(small)
    return {
        "out_a": floats(draw, *rows, d, dtype=dtype),
        "lse_a": floats(draw, *rows, dtype=lse_dtype),
        "out_b": floats(draw, *rows, d, dtype=dtype),
        "lse_b": floats(draw, *rows, dtype=lse_dtype),
    }


def two_right(a: Arguments) -> AttentionResult:
    return parts_right(
        {
            "outs": torch.stack([a["out_a"], a["out_b"]]),
            "lses": torch.stack([a["lse_a"], a["lse_b"]]),
        }
    )


def sunk_arguments(draw: Draw) -> Arguments:
    rows, h = draw(small), draw(some)
    lse = floats(draw, rows, h, dtype=draw(st.sampled_from(FLOATS[:2])))
    return {
        "result": AttentionResult(floats(draw, rows, h, draw(small)), lse),
        "sink": floats(draw, h),
    }


def sunk_right(a: Arguments) -> Tensor:
    out, lse = (x.double() for x in a["result"])
    return out * (1 / (1 + (a["sink"].double() - lse).exp()))[..., None]


def blank_arguments(draw: Draw) -> Arguments:
    result = sunk_arguments(draw)["result"]
    rows = len(result.out)
    lens = draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))
    return {"result": result, "visible_lens": torch.tensor(lens, dtype=torch.int64)}


def blank_right(a: Arguments) -> AttentionResult:
    out, lse = (x.double().clone() for x in a["result"])
    for row, seen in enumerate(a["visible_lens"].tolist()):
        if seen <= 0:
            out[row], lse[row] = 0.0, -math.inf
    return AttentionResult(out, lse)


def rope_arguments(draw: Draw) -> Arguments:
    s, half = draw(small), draw(small)
    between = draw(st.lists(st.integers(0, 2), max_size=2))
    angles = floats(draw, s, half, dtype=torch.float64)
    return {
        "x": floats(draw, s, *between, 2 * half),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "interleaved": draw(st.booleans()),
    }


def rope_right(a: Arguments) -> Tensor:
    """Pair by pair as complex numbers, on a copy with the token's dimension last but one."""
    x, half = a["x"].double(), a["x"].shape[-1] // 2
    turned = x.clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if a["interleaved"] else (i, i + half)
        shape = (-1,) + (1,) * (x.ndim - 2) if len(x) else x[..., 0].shape
        turn = torch.complex(a["cos"][:, i].double(), a["sin"][:, i].double()).reshape(shape)
        pair = torch.complex(x[..., first], x[..., second]) * turn
        turned[..., first], turned[..., second] = pair.real, pair.imag
    return turned


def norm_arguments(draw: Draw) -> Arguments:
    d = draw(small)
    x = floats(draw, *draw(st.lists(small, max_size=2)), d)
    return {"x": x, "weight": floats(draw, d), "eps": draw(st.sampled_from([1e-6, 1e-5, 1]))}


def norm_right(a: Arguments) -> Tensor:
    x = a["x"].double()
    return (
        a["weight"].double()
        * x
        / (x.square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + a["eps"]).sqrt()
    )


def positions_arguments(draw: Draw) -> Arguments:
    yarn = layers.YarnConfig(4.0, 64) if draw(st.booleans()) else None
    config = layers.RopeConfig(2 * draw(small), 100.0, draw(st.booleans()), yarn)
    positions = draw(st.lists(st.integers(0, 2**20), max_size=4))
    return {"config": config, "positions": torch.tensor(positions, dtype=torch.int64)}


def positions_right(a: Arguments) -> AttentionResult:
    angles = a["positions"].double()[:, None] * layers.inverse_frequencies(a["config"])
    return AttentionResult(angles.cos(), angles.sin())


NUMBERS = {
    "merge": Edge(numerics.merge, two_arguments, two_right),
    "merge_many": Edge(numerics.merge_many, parts_arguments, parts_right),
    "apply_sink": Edge(numerics.apply_sink, sunk_arguments, sunk_right),
    "blank_empty_rows": Edge(numerics.blank_empty_rows, blank_arguments, blank_right),
    "apply_rope": Edge(layers.apply_rope, rope_arguments, rope_right),
    "rope_table": Edge(
        lambda **a: AttentionResult(*layers.rope_table(**a)), positions_arguments, positions_right
    ),
    "rms_norm": Edge(layers.rms_norm, norm_arguments, norm_right),
}

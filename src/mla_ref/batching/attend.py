"""Run attention along a route: each segment's rows to its kernel."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.batching.route import Route
from mla_ref.batching.scratch import ScratchPlan
from mla_ref.checks import describe, require_float, require_integer, require_size
from mla_ref.numerics import AttentionResult


def attend_along(
    route: Route,
    plan: ScratchPlan,
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows topk"],
    counts: Int[Tensor, " rows"] | None = None,
    *,
    softmax_scale: float,
    sink: Float[Tensor, " h"] | None = None,
) -> AttentionResult:
    """Sparse attention of a step, in as many calls as the route has segments.

    Args:
        route: Of this step.
        plan: Buffers.
        q: Absorbed queries of all rows, padding included. What a padded row holds matters to
            nobody, as long as its list is empty.
        kv_cache: As in `Plan.decode`.
        indices: As in `Plan.decode`; -1 in a padded row.
        counts: As in `Plan.decode`.
        softmax_scale: As in `Plan.decode`.
        sink: As in `Plan.decode`.

    Raises:
        ValueError: `q` has other rows than the route, or a segment more rows than its plan.
    """
    for name, value, wanted in (("route", route, Route), ("plan", plan, ScratchPlan)):
        if not isinstance(value, wanted):
            raise TypeError(f"{name} must be a {wanted.__name__}, got {describe(value)}")
    require_float("q", q, "rows h d_row")
    require_integer("indices", indices, "rows topk")
    rows = route.num_tokens_padded
    require_size("q", q, 0, rows, "the rows of the route")
    require_size("indices", indices, 0, rows, "the rows of the route")
    if counts is not None:
        require_size("counts", require_integer("counts", counts, "rows"), 0, rows, "as q")
    outs, lses = [], []
    for start, end, _, _, kind in route.segments:
        taken = plan.take(kind, end - start)
        part = (taken.decode if kind == "decode" else taken.extend)(
            q[start:end],
            kv_cache,
            indices[start:end],
            None if counts is None else counts[start:end],
            softmax_scale=softmax_scale,
            sink=sink,
        )
        outs.append(part.out)
        lses.append(part.lse)
    if len(outs) == 1:
        return AttentionResult(outs[0], lses[0])
    return AttentionResult(torch.cat(outs), torch.cat(lses))

"""The kernels of one configuration: decode with splits, decode with other splits, extend.

A server's decode plan cuts lists into splits, or there would be nothing to merge and nothing to
validate. How many is the backend's choice, by the rows of the plan: fewer rows, more splits. So
decode's plan is made for a whole step, or for one request, or for one row, whichever comes first
with more than one split; and the null control's plan for more rows, until it cuts otherwise.
"""

from dataclasses import dataclass, replace

import torch

from mla_ref.backends import AttnSpec, Backend, Plan
from mla_ref.models.sparse import Attend
from mla_ref.validation.paths import HeadShards, Kernel

# How many times more rows the null control's plan is made for, at most.
MOST_ROWS = 64


@dataclass(frozen=True)
class Kernels:
    """What a backend runs.

    Attributes:
        decode: Its decode.
        extend: Its extend.
        null: Its decode with other splits.
        splits: Of decode; None where the plan does not tell (no attribute `num_splits`).
        null_splits: Of the null control.
    """

    decode: Attend
    extend: Attend
    null: Attend
    splits: int | None
    null_splits: int | None


def plan_kernels(
    backend: Backend,
    spec: AttnSpec,
    *,
    max_requests: int,
    rows_per_request: int,
    shards: int = 1,
    device: torch.device | None = None,
) -> Kernels:
    """Plan all kernels, each rank's for its share of the heads.

    Args:
        backend: Whose.
        spec: Of all heads.
        max_requests: Requests of a step at most.
        rows_per_request: 1 + n.
        shards: Ranks; a divisor of the heads.
        device: Where the kernels run; None: the CPU.

    Raises:
        ValueError: The heads cannot be dealt evenly, the backend does not serve the spec, or no
            plan of it has more than one split.
    """
    if spec.num_heads % shards:
        raise ValueError(f"shards must divide the {spec.num_heads} heads, got {shards}")
    device = torch.device("cpu") if device is None else device
    spec = replace(spec, num_heads=spec.num_heads // shards)
    step_rows = max_requests * rows_per_request

    def plan(rows: int) -> Plan:
        return backend.plan(spec, max_rows=rows, max_requests=rows, device=device)

    def attend(plan: Plan, kind: str, rows: int) -> Attend:
        kernel = Kernel(plan, kind, min(rows, step_rows))
        return kernel if shards == 1 else HeadShards(kernel, shards)

    for rows in (step_rows, rows_per_request, 1):
        taken = plan(rows)
        splits = _splits(taken)
        if splits is None or splits > 1:
            break
    else:
        raise ValueError(
            f"backend {backend.name!r} cuts no list of {spec.topk} keys into splits, not even for "
            "one row: its decode has nothing to merge that could be validated"
        )
    factor = 2
    other = plan(factor * rows)
    while _splits(other) == splits and factor < MOST_ROWS:
        factor *= 2
        other = plan(factor * rows)
    return Kernels(
        decode=attend(taken, "decode", rows),
        extend=attend(taken if rows == step_rows else plan(step_rows), "extend", step_rows),
        # As many rows a call as decode, so that the splits are all that differs.
        null=attend(other, "decode", rows),
        splits=splits,
        null_splits=_splits(other),
    )


def _splits(plan: Plan) -> int | None:
    return getattr(plan, "num_splits", None)

"""Bugs in sharing a cache among ranks, as published libraries had them."""

import math
from typing import Any

from jaxtyping import Int
from torch import Tensor

from mla_ref.backends import Plan, TorchBackend
from mla_ref.numerics import AttentionResult
from mla_ref.parallel import local_lens


class Base2Plan:
    """The runs of `Base2Backend`."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.nbytes = plan, plan.nbytes

    def decode(self, *args: Any, **kwargs: Any) -> AttentionResult:
        """As the torch backend, but for the LSE."""
        out, lse = self.plan.decode(*args, **kwargs)
        return AttentionResult(out, lse / math.log(2))

    def extend(self, *args: Any, **kwargs: Any) -> AttentionResult:
        """As the torch backend, but for the LSE."""
        out, lse = self.plan.extend(*args, **kwargs)
        return AttentionResult(out, lse / math.log(2))


class Base2Backend(TorchBackend):
    """BUG: gives the LSE in base 2, as its kernel has it, and does not say so.

    Its output is right, so nothing shows on one rank. Merged with others as if it were natural, the
    part that weighs more gets too much: its share grows from Z to Z**1.44.
    """

    name = "base-2"

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """As the torch backend's, wrapped."""
        return Base2Plan(super().plan(*args, **kwargs))


def local_lens_counted_down(
    global_lens: Int[Tensor, " rows"], *, rank: int, world: int, interleave: int = 1
) -> Int[Tensor, " rows"]:
    """BUG: takes a rank's length for the last row of a request and counts down by one a row.

    Right for the last row, and on one rank. Elsewhere a row loses keys on every rank that did not
    get all of the rows after it: the newest ones, which it needs most.
    """
    last = local_lens(global_lens[-1:], rank=rank, world=world, interleave=interleave)
    return (last - (global_lens[-1] - global_lens)).clamp(min=0)

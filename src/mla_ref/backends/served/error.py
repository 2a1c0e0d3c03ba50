"""How far each rounding of a served kernel takes its result from float64."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.sparse_extend import sparse_extend
from mla_ref.backends.protocol import AttnSpec
from mla_ref.backends.served.backend import ServedBackend
from mla_ref.backends.served.profile import Arithmetic, ServedProfile
from mla_ref.numerics import Comparison, compare


@dataclass(frozen=True)
class ErrorStep:
    """The error after one more rounding.

    Attributes:
        rounding: "float32 sums", a field of `Arithmetic` with its value, or "output".
        out: The output against float64.
        lse: The LSE against float64.
    """

    rounding: str
    out: Comparison
    lse: Comparison

    def __str__(self) -> str:
        """One line of a table."""
        return f"{self.rounding:<24} out {self.out.rel_l2:.1e}  lse {self.lse.max_abs:.1e}"


def arithmetic_error(
    profile: ServedProfile,
    q: Float[Tensor, "rows h 576"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows topk"],
    counts: Int[Tensor, " rows"] | None = None,
    *,
    softmax_scale: float,
) -> tuple[ErrorStep, ...]:
    """The roundings of a profile switched on one after the other, by `decode`.

    The yardstick is float64 attention over the rows as they were written, with their scales as
    stored. What the writer of the cache lost is therefore not in it.

    Args:
        profile: Whose arithmetic.
        q: Absorbed queries in a dtype that the profile takes.
        kv_cache: Rows that the profile takes.
        indices: As in `Plan.decode`.
        counts: As in `Plan.decode`.
        softmax_scale: As in `Plan.decode`.

    Returns:
        Float32 sums alone, then each field of the profile's arithmetic that rounds, cumulated, then
        the rounding of the output to q's dtype.
    """
    exact = sparse_extend(q.double(), kv_cache, indices, counts, softmax_scale=softmax_scale)
    steps = []

    def measure(rounding: str, arithmetic: Arithmetic, out_dtype: torch.dtype) -> None:
        backend = ServedBackend(replace(profile, arithmetic=arithmetic))
        multiple = profile.topk_multiple
        spec = AttnSpec(
            num_heads=q.shape[1],
            topk=max(-(-indices.shape[1] // multiple), 1) * multiple,
            page_size=kv_cache.shape[1],
            cache_format="fp8" if kv_cache.dtype == torch.uint8 else "bf16",
            q_dtype=q.dtype,
        )
        plan = backend.plan(
            spec, max_rows=len(q), max_requests=len(q), device=q.device, kinds=("decode",)
        )
        got = plan.decode(
            q, kv_cache, indices, counts, softmax_scale=softmax_scale, out_dtype=out_dtype
        )
        steps.append(ErrorStep(rounding, compare(got.out, exact.out), compare(got.lse, exact.lse)))

    arithmetic = Arithmetic()
    measure("float32 sums", arithmetic, torch.float32)
    for f in fields(Arithmetic):
        value = getattr(profile.arithmetic, f.name)
        if value != getattr(arithmetic, f.name):
            arithmetic = replace(arithmetic, **{f.name: value})
            measure(f"{f.name}: {value}", arithmetic, torch.float32)
    measure("output", arithmetic, q.dtype)
    return tuple(steps)

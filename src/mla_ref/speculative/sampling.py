"""From logits to the law that a token is drawn from: temperature, top-k, top-p.

Temperature 0 is not a very small temperature but a law of its own, all mass on the highest logit.
So greedy requests pass through the same rejection rule as sampled ones, and nothing is ever divided
by 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.checks import describe, require_count, require_float
from mla_ref.speculative.noise import require_seed

SMALLEST_TEMPERATURE = 2.0**-126  # the smallest normal float32; below it 1 / T overflows


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: Divides the logits. 0: greedy, whatever else is set.
        top_k: Only the k highest logits may be drawn. None: all.
        top_p: Only the fewest tokens may be drawn that together have this mass. 1: all.
        seed: Of the request's noise, a signed int of 64 bits. Requests of one seed and one position
            draw alike, so give each its own, as `request_seed` does.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {describe(value)}")
        # In float32: 1e-50 is greater than 0 here and is 0 where it divides.
        largest = torch.finfo(torch.float32).max
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature <= largest:
            raise ValueError(
                f"temperature must be 0 or a normal float32 above 0, got {self.temperature!r}"
            )
        if self.top_k is not None:
            require_count("top_k", self.top_k, at_least=1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be greater than 0 and at most 1, got {self.top_p!r}")
        require_seed("seed", self.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken."""
        return self.temperature == 0


def target_probs(
    logits: Float[Tensor, "rows vocab"],
    params: Sequence[SamplingParams],
    *,
    validate: bool = True,
) -> Float[Tensor, "rows vocab"]:
    """The law of each row's token.

    The order is vLLM's: float32, temperature, top-k, top-p. See `probs_of_rows` for ties.

    Args:
        logits: In any float dtype. -inf: a token that may not be chosen.
        params: One a row, not one a request.
        validate: Look for rows without a law, which reads them back to the host. Without it such a
            row may be NaN; `rejection_sample` then gives some id of the vocabulary.

    Returns:
        float32, or float64 for float64 logits. Greedy rows are one-hot.

    Raises:
        ValueError: params has another length, or a row has NaN, +inf or nothing but -inf.
    """
    require_float("logits", logits, "rows vocab")
    require_params("params", params, logits.shape[0], "one a row of logits")
    if validate:
        require_law(logits)

    vocab, device = logits.shape[1], logits.device
    top_k = top_p = None
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    limits = [vocab if p.top_k is None else min(p.top_k, vocab) for p in params]
    if any(limit < vocab for limit in limits):
        top_k = torch.tensor(limits, device=device)
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    return probs_of_rows(logits, temperature, top_k, top_p)


def probs_of_rows(
    logits: Float[Tensor, "rows vocab"],
    temperature: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"] | None = None,
    top_p: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """The same from tensors alone: no value is read back, so it can be captured in a graph.

    Exactly k tokens pass top-k, and the lower id passes first among equal logits, there as in
    top-p. (vLLM's sorted path keeps all that equal the k-th.) A token passes top-p if those before
    it have less than p together, so the first always does.
    """
    x = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    greedy = (temperature == 0)[:, None]
    divisor = torch.where(greedy, 1.0, temperature[:, None]).to(x.dtype)
    # The maximum first: 0 / T is 0 and -1 / T at worst -inf, where 100 / T may be +inf.
    scaled = (x - x.amax(dim=1, keepdim=True)) / divisor
    if top_k is not None or top_p is not None:
        scaled = scaled.masked_fill(~_passes(scaled, top_k, top_p), -torch.inf)
    # argmax takes the lowest index among equals.
    one_hot = torch.zeros_like(x).scatter_(1, x.argmax(dim=1, keepdim=True), 1.0)
    return torch.where(greedy, one_hot, torch.softmax(scaled, dim=1))


def _passes(
    scaled: Float[Tensor, "rows vocab"],
    top_k: Int[Tensor, " rows"] | None,
    top_p: Float[Tensor, " rows"] | None,
) -> Bool[Tensor, "rows vocab"]:
    best, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    keep = torch.ones_like(best, dtype=torch.bool)
    if top_k is not None:
        keep = torch.arange(best.shape[1], device=best.device) < top_k[:, None]
    if top_p is not None:
        probs = torch.softmax(best.masked_fill(~keep, -torch.inf), dim=1).double()
        before = probs.cumsum(dim=1) - probs
        # p = 1 keeps all: a sum that rounds to 1 early must not cut the tail off.
        keep = keep & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def require_law(logits: Float[Tensor, "rows vocab"]) -> None:
    """Raise a ValueError if a row has NaN, +inf, or nothing but -inf; reads back to the host."""
    require_vocabulary(logits)
    # NaN is never below +inf, and amax hands it on.
    require_finite(logits.amax(dim=1).tolist() if logits.numel() else [])


def require_vocabulary(logits: Float[Tensor, "rows vocab"]) -> None:
    """Raise a ValueError if there are rows and no token to choose."""
    if logits.shape[1] == 0 and logits.shape[0]:
        raise ValueError(f"logits must have at least one token a row, got {describe(logits)}")


def require_finite(highest: Sequence[float]) -> None:
    """Raise a ValueError at the first row whose highest logit, as given here, makes no law."""
    for row, value in enumerate(highest):
        if not math.isfinite(value):
            why = (
                "holds only -inf, so no token may follow"
                if value == -math.inf
                else (f"holds {value}, which gives no probabilities")
            )
            raise ValueError(f"logits row {row} {why}")


def require_params(name: str, params: object, count: int, why: str) -> None:
    """Raise unless `params` is a sequence of `count` SamplingParams."""
    if not isinstance(params, Sequence):
        raise TypeError(f"{name} must be a sequence of SamplingParams, got {describe(params)}")
    if len(params) != count:
        raise ValueError(f"{name} must have {count} entries ({why}), got {len(params)}")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise TypeError(f"{name} must hold SamplingParams, got {describe(entry)}")

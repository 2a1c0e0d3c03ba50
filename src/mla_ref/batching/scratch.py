"""How many rows the buffers of the two kernels are made for, and the buffers.

Rows follow from what the server is configured for, not from what it happens to run: a plan is made
once, and a graph that was captured with it keeps its addresses (vllm#46067).
"""

from dataclasses import dataclass

import torch

from mla_ref.backends import KINDS, AttnSpec, Backend, Plan
from mla_ref.batching.modes import DEFAULT_MAX_Q, SpecMode, parse_mode
from mla_ref.checks import describe, require_choice, require_count


@dataclass(frozen=True)
class ServingLimits:
    """What a server is configured for.

    Attributes:
        max_num_seqs: Requests of a step at most.
        max_num_batched_tokens: New tokens of a step at most.
        num_speculative_tokens: Drafts that the MTP module proposes a request, n; 0: none.
        max_q: The most tokens a request that decode takes in any mode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    max_q: int = DEFAULT_MAX_Q

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_q"):
            require_count(name, getattr(self, name), at_least=1)
        require_count("num_speculative_tokens", self.num_speculative_tokens)


@dataclass(frozen=True)
class ScratchRows:
    """Rows of the two plans in one mode.

    Attributes:
        limits: What the server is configured for.
        mode: The mode that is planned for.
    """

    limits: ServingLimits
    mode: SpecMode = SpecMode.AUTO

    def __post_init__(self) -> None:
        """Raise a TypeError that names the field."""
        for name, wanted in (("limits", ServingLimits), ("mode", SpecMode)):
            if not isinstance(getattr(self, name), wanted):
                raise TypeError(
                    f"{name} must be a {wanted.__name__}, got {describe(getattr(self, name))}"
                )

    @property
    def rows_per_request(self) -> int:
        """1 in mode 0, 1 + n in auto; in mode 1 at least max_q, since short chunks come too.

        In auto max_q has no say: a generic maximum of 512 would cost 128 times the buffers of MTP3
        and never be used.
        """
        rows = 1
        if self.mode != SpecMode.OFF:
            rows += self.limits.num_speculative_tokens
        if self.mode == SpecMode.FORCED:
            rows = max(rows, self.limits.max_q)
        return rows

    @property
    def decode_rows(self) -> int:
        """Rows of the decode plan, never fewer than requests."""
        limits = self.limits
        rows = min(limits.max_num_seqs * self.rows_per_request, limits.max_num_batched_tokens)
        return max(rows, limits.max_num_seqs)

    @property
    def extend_rows(self) -> int:
        """Rows of the extend plan: any step fits."""
        return self.limits.max_num_batched_tokens

    def rows(self, kind: str) -> int:
        """Rows of the plan for "decode" or "extend"."""
        require_choice("kind", kind, KINDS)
        return self.decode_rows if kind == "decode" else self.extend_rows


@dataclass(frozen=True, kw_only=True)
class ScratchPlan(ScratchRows):
    """The rows, and a backend's plans for them. It never grows.

    Attributes:
        spec: What a layer needs.
        decode: Plan of the decode kernel.
        extend: Plan of the extend kernel.
    """

    spec: AttnSpec
    decode: Plan
    extend: Plan

    @property
    def nbytes(self) -> int:
        """Bytes that both plans have allocated."""
        return self.decode.nbytes + self.extend.nbytes

    def take(self, kind: str, rows: int) -> Plan:
        """The plan for "decode" or "extend", if it holds so many rows.

        Raises:
            ValueError: It does not; the message names both numbers. A step of 4 rows a request
                after a plan for 1 is refused here, and never cut (TensorRT-LLM#17247).
        """
        planned = self.rows(kind)
        if require_count("rows", rows) > planned:
            limits = self.limits
            raise ValueError(
                f"rows is {rows}, but {kind} is planned for {planned} at most (max_num_seqs "
                f"{limits.max_num_seqs}, max_num_batched_tokens {limits.max_num_batched_tokens}, "
                f"num_speculative_tokens {limits.num_speculative_tokens}, mode {self.mode})"
            )
        return self.decode if kind == "decode" else self.extend


def plan_scratch(
    backend: Backend,
    spec: AttnSpec,
    limits: ServingLimits,
    mode: str | SpecMode = SpecMode.AUTO,
    *,
    device: torch.device | None = None,
) -> ScratchPlan:
    """Allocate both plans, on the host and once: each for its kernel alone.

    Args:
        backend: Whose plans.
        spec: What a layer needs.
        limits: What the server is configured for.
        mode: The mode that is planned for.
        device: Where; None: the CPU. On the device "meta" torch's backend allocates nothing and
            still counts the bytes.

    Raises:
        ValueError: The backend does not serve the spec; its reason is in the message.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {describe(backend)}")
    rows = ScratchRows(limits, parse_mode("mode", mode))
    device = torch.device("cpu") if device is None else device
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a torch.device, got {describe(device)}")
    # The lengths of a verifier batch stand by row, so its plan must hold as many requests as rows.
    decode = backend.plan(
        spec,
        max_rows=rows.decode_rows,
        max_requests=rows.decode_rows,
        device=device,
        kinds=("decode",),
    )
    extend = backend.plan(
        spec,
        max_rows=rows.extend_rows,
        max_requests=limits.max_num_seqs,
        device=device,
        kinds=("extend",),
    )
    return ScratchPlan(limits, rows.mode, spec=spec, decode=decode, extend=extend)

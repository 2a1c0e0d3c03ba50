"""Does a kernel fit a GPU? A verdict with its reasons, from what the compiler said.

"Fits" is a claim about a compiled file. That the kernel runs, or how fast, no compiler can say.
"""

from dataclasses import dataclass

from mla_kernels.audit.cubin import CubinFacts
from mla_kernels.audit.occupancy import LIMITS, Occupancy, occupancy
from mla_ref.platform import Capability, sm_name


@dataclass(frozen=True)
class Verdict:
    """Whether a compiled kernel fits one compute capability.

    Attributes:
        reasons: why it does not fit; empty if it does.
        occupancy: how many of its blocks a multiprocessor holds.
    """

    reasons: tuple[str, ...]
    occupancy: Occupancy

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons


def judge(
    facts: CubinFacts, capability: Capability, *, threads: int, dynamic_shared_bytes: int
) -> Verdict:
    """Judge one function of a cubin that was made for `capability`.

    A spill outside all loops costs a few loads of a thread's life and is allowed; in a loop it is
    paid for every tile, and the load waits for itself.

    Args:
        facts: As `read_cubin` gives them.
        capability: One of `LIMITS`.
        threads: Of a block.
        dynamic_shared_bytes: What the launch asks for.

    Raises:
        ValueError: `capability` has no limits here.
    """
    if capability not in LIMITS:
        known = ", ".join(map(sm_name, LIMITS))
        raise ValueError(f"capability must be one of {known}, got {sm_name(capability)}")
    limits = LIMITS[capability]
    shared = facts.static_shared_bytes + dynamic_shared_bytes
    held = occupancy(limits, threads=threads, registers=facts.registers, shared=shared)
    reasons = []
    if shared > limits.shared_per_block:
        reasons.append(f"shared memory: {shared:,} B a block, at most {limits.shared_per_block:,}")
    if threads > limits.threads_per_block:
        reasons.append(f"threads: {threads:,} a block, at most {limits.threads_per_block:,}")
    if not held.blocks and not reasons:
        reasons.append(f"{held.limited_by}: not one block stands on a multiprocessor")
    if facts.spills_in_loops:
        reasons.append(f"spills: {facts.spills_in_loops} in loops")
    for feature, opcodes in facts.forbidden.items():
        reasons.append(f"{feature}: {', '.join(opcodes)}")
    return Verdict(tuple(reasons), held)

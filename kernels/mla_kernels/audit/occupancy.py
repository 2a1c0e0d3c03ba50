"""How many blocks of a kernel a multiprocessor holds at once, and which resource decides.

The arithmetic of NVIDIA's occupancy calculator (cuda_occupancy.h): shared memory by the block,
registers by the warp and by each of the four sub-partitions, warps and blocks by count.
"""

from dataclasses import dataclass

from mla_ref.checks import require_count
from mla_ref.platform import Capability, features

WARP = 32
# Registers and shared memory are handed out in these units.
REGISTERS_UNIT = 256  # of one warp
SHARED_UNIT = 128
# The driver keeps 1 KiB of shared memory for itself in every block, since compute capability 8.0.
SHARED_RESERVED = 1024
SUB_PARTITIONS = 4


@dataclass(frozen=True)
class SMLimits:
    """What one multiprocessor has, and what one block may take.

    Attributes:
        shared_per_sm: bytes of shared memory, what the driver keeps of each block included.
        shared_per_block: bytes that one block may ask for.
        registers: 32-bit registers.
        warps: resident warps.
        blocks: resident blocks.
        registers_per_thread: the most that an instruction can name.
        threads_per_block: the most of one block.
    """

    shared_per_sm: int
    shared_per_block: int
    registers: int
    warps: int
    blocks: int
    registers_per_thread: int = 255
    threads_per_block: int = 1024


def _limits(capability: Capability, shared_per_sm: int, warps: int, blocks: int) -> SMLimits:
    of_a_block = features(capability).shared_memory_per_block
    return SMLimits(shared_per_sm, of_a_block, 65_536, warps, blocks)


# CUDA C++ programming guide, "Technical specifications per compute capability".
LIMITS: dict[Capability, SMLimits] = {
    (9, 0): _limits((9, 0), 228 * 1024, warps=64, blocks=32),
    (12, 0): _limits((12, 0), 100 * 1024, warps=48, blocks=24),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks that stand on one multiprocessor at once.

    Attributes:
        blocks: 0 if not even one does.
        limited_by: "shared memory", "registers", "warps" or "blocks": the scarcest; the first of
            these where several are.
    """

    blocks: int
    limited_by: str


def occupancy(limits: SMLimits, *, threads: int, registers: int, shared: int) -> Occupancy:
    """Blocks on one multiprocessor at once.

    Args:
        limits: Of the multiprocessor.
        threads: Of a block.
        registers: Of a thread.
        shared: Bytes of a block, static and dynamic, without the 1 KiB of the driver.

    Raises:
        ValueError: A number is below what any kernel has.
    """
    warps = -(-require_count("threads", threads, at_least=1) // WARP)
    of_a_warp = _round_up(require_count("registers", registers, at_least=1) * WARP, REGISTERS_UNIT)
    of_a_block = _round_up(require_count("shared", shared) + SHARED_RESERVED, SHARED_UNIT)
    # A warp's registers come from one sub-partition, so what each of the four cannot fill is lost.
    warps_by_registers = limits.registers // SUB_PARTITIONS // of_a_warp * SUB_PARTITIONS
    held = {
        "shared memory": limits.shared_per_sm // of_a_block,
        "registers": warps_by_registers // warps,
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
    }
    scarcest = min(held, key=lambda name: held[name])
    return Occupancy(held[scarcest], scarcest)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

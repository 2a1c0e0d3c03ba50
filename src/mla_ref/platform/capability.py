"""What each CUDA compute capability has, as one table.

"Blackwell" is not one architecture. SM100 has tcgen05 and 227 KiB of shared memory a block; SM120
has neither, and code that asked only for "major >= 10" has crashed on it or run the wrong kernel
(sglang#36806, tilelang#797). So nothing here compares major numbers: a capability is looked up
whole, and one that is not in the table gets the features of the reference, which needs nothing.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability (shared
memory); PTX ISA, target notes of each instruction; CUDA release notes (first toolkit).
"""

from dataclasses import dataclass

Capability = tuple[int, int]
Version = tuple[int, int]


@dataclass(frozen=True)
class Features:
    """What one compute capability has, as far as an attention kernel cares.

    Attributes:
        family: NVIDIA's name of the architecture.
        min_cuda: the first CUDA toolkit whose ptxas and NVRTC know it; None for the reference.
        shared_memory_per_block: bytes, with the opt-in that kernels use. The driver's answer for
            a real device goes before this number; it serves where there is no device to ask.
        fp8_conversion: converts e4m3 to and from wider floats in hardware (8.9 and later). Before
            that Triton's fp8e4nv casts do not compile (vllm#45829).
        fp8_mma: multiplies e4m3 on tensor cores. On 9.0 only wgmma does: its fp8 mma.sync is
            assembled into conversions and fp16 products.
        wgmma: warpgroup products. Hopper alone; no Blackwell has them.
        tcgen05: tensor memory and its products. Data-centre Blackwell alone.
        block_scaled_mma: products of MXFP8 or NVFP4 operands with their scales.
    """

    family: str
    min_cuda: Version | None
    shared_memory_per_block: int
    fp8_conversion: bool = False
    fp8_mma: bool = False
    wgmma: bool = False
    tcgen05: bool = False
    block_scaled_mma: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        """The flags that are set, by name."""
        flags = ("fp8_conversion", "fp8_mma", "wgmma", "tcgen05", "block_scaled_mma")
        return tuple(flag for flag in flags if getattr(self, flag))


# 48 KiB is what every CUDA device gives a block without opting in.
REFERENCE = Features("reference", None, 48 * 1024)

_FP8 = {"fp8_conversion": True, "fp8_mma": True}
_SM100 = {**_FP8, "tcgen05": True, "block_scaled_mma": True}
_SM120 = {**_FP8, "block_scaled_mma": True}

TABLE: dict[Capability, Features] = {
    (8, 0): Features("Ampere", (11, 0), 163 * 1024),
    (8, 6): Features("Ampere", (11, 1), 99 * 1024),
    (8, 9): Features("Ada", (11, 8), 99 * 1024, **_FP8),
    (9, 0): Features("Hopper", (11, 8), 227 * 1024, **_FP8, wgmma=True),
    (10, 0): Features("Blackwell", (12, 8), 227 * 1024, **_SM100),
    (10, 3): Features("Blackwell Ultra", (12, 9), 227 * 1024, **_SM100),
    (12, 0): Features("Blackwell RTX", (12, 8), 99 * 1024, **_SM120),
    (12, 1): Features("Blackwell GB10", (12, 9), 99 * 1024, **_SM120),
}


def features(capability: Capability | None) -> Features:
    """Look up what a compute capability has; `REFERENCE` for None or one that is not known."""
    return REFERENCE if capability is None else TABLE.get(capability, REFERENCE)


def arch_names(capability: Capability) -> tuple[str, str]:
    """The virtual (PTX) and the real (cubin) name: (12, 0) gives compute_120 and sm_120."""
    digits = f"{capability[0]}{capability[1]}"
    return f"compute_{digits}", f"sm_{digits}"


def sm_name(capability: Capability) -> str:
    """The real architecture's name: (12, 0) gives sm_120."""
    return arch_names(capability)[1]


def version_text(version: Version) -> str:
    """A toolkit's version as people write it: (12, 8) gives 12.8."""
    return f"{version[0]}.{version[1]}"


def toolkit_gap(tool: str, version: Version, capability: Capability) -> str | None:
    """Say why a compiler of one CUDA toolkit cannot build for a capability, or None if it can.

    Asked beforehand, since the compilers answer with a bare "invalid value for --gpu-architecture"
    (NVRTC, cupy#9475) or "Value 'sm_121' is not defined" (ptxas, triton#8539).

    Args:
        tool: the compiler's name for the message.
        version: the CUDA version it comes from.
        capability: the compute capability to build for; one outside the table is not judged.
    """
    needed = features(capability).min_cuda
    if needed is None or version >= needed:
        return None
    return (
        f"{tool} {version_text(version)} does not know {sm_name(capability)}: "
        f"needs CUDA >= {version_text(needed)}"
    )

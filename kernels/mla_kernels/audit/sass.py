"""What a kernel's machine code consists of, read from the text that `nvdisasm` prints.

SASS, unlike PTX, is what runs: here a spill is a load, and an instruction that the target lacks
has been replaced or refused.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# "/*0080*/  @!P0 LDGSTS.E.BYPASS.128 [R5], ... ;": the opcode with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)(.*)$")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_CLUSTER = re.compile(r"EIATTR_CTA_PER_CLUSTER")

# What SM120 lacks, or what a kernel that claims SM120 does not use, by the start of the opcode.
FORBIDDEN = {
    "wgmma": ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "WARPGROUP"),
    "tcgen05": ("UTC", "LDTM", "STTM"),
    "setmaxnreg": ("USETMAXREG",),
    # No sign of a cluster: UTMALDG and UBLKCP (SM120 has TMA within one block), SR_CgaCtaId (read
    # wherever shared memory is addressed), CGAERRBAR (part of any __threadfence()).
    "clusters": ("UCGABAR", "MAPA", "UMAPA"),
}
# Modifiers that ask for other blocks of a cluster, on instructions that are fine without.
FORBIDDEN_MODIFIERS = {"clusters": ("MULTICAST",), "tcgen05": ("2CTA",)}

# The classes worth counting, by the exact opcode.
CLASSES = {
    "tensor core 16 bit": ("HMMA",),
    "tensor core 8 bit": ("QMMA", "IMMA"),
    "tensor core 4 bit": ("OMMA",),
    "tensor core fp64": ("DMMA",),
    "load matrix": ("LDSM",),
    "shared load": ("LDS",),
    "shared store": ("STS", "STSM"),
    "global load": ("LDG",),
    "global to shared": ("LDGSTS", "UBLKCP", "UTMALDG"),
    "global store": ("STG",),
    "conversion": ("F2F", "F2FP", "I2F", "I2FP", "F2I"),
    "byte permute": ("PRMT",),
    "transpose": ("MOVM",),
    "shuffle": ("SHFL",),
    "special function": ("MUFU",),
    "barrier": ("BAR",),
    "local load": ("LDL",),
    "local store": ("STL",),
}


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: its opcode with modifiers, and in how many loops it stands."""

    opcode: str
    depth: int

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]


def read_instructions(text: str) -> list[Instruction]:
    """The instructions of one function, in order.

    A branch to an earlier label closes a loop; all that stands between the two is in it. Padding
    and the branch to itself that follow the last EXIT belong to no loop.

    Args:
        text: What `nvdisasm` prints for one function.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := _INSTRUCTION.match(line):
            target = _TARGET.search(found[2])
            if target and found[1].startswith("BRA"):
                start = labels.get(target[1])
                if start is not None and start < len(opcodes):
                    loops.append((start, len(opcodes)))
            opcodes.append(found[1])
    return [
        Instruction(opcode, sum(start <= i <= end for start, end in loops))
        for i, opcode in enumerate(opcodes)
    ]


def count_classes(instructions: Iterable[Instruction], *, in_loops: bool = False) -> dict[str, int]:
    """How many instructions of each class there are, classes without any left out.

    Args:
        instructions: Of one function.
        in_loops: Count only those that stand in a loop.
    """
    names = Counter(i.name for i in instructions if i.depth or not in_loops)
    counts = {kind: sum(names[name] for name in names_) for kind, names_ in CLASSES.items()}
    return {kind: count for kind, count in counts.items() if count}


def find_forbidden(text: str) -> dict[str, tuple[str, ...]]:
    """What the code uses that SM120 lacks: the opcodes found, by the feature they belong to.

    Args:
        text: What `nvdisasm` prints, with or without the attributes of the function.
    """
    found: dict[str, set[str]] = {}
    for opcode in (i.opcode for i in read_instructions(text)):
        for feature, starts in FORBIDDEN.items():
            if opcode.startswith(starts):
                found.setdefault(feature, set()).add(opcode)
        for feature, modifiers in FORBIDDEN_MODIFIERS.items():
            if set(modifiers) & set(opcode.split(".")[1:]):
                found.setdefault(feature, set()).add(opcode)
    if attribute := _CLUSTER.search(text):
        found.setdefault("clusters", set()).add(attribute.group())
    return {feature: tuple(sorted(opcodes)) for feature, opcodes in sorted(found.items())}

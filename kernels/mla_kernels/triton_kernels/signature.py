"""What a compiler must know to build a Triton kernel without a GPU and without a launch.

Triton specialises a kernel when it is launched: on the dtypes of its arguments, on the constants,
and on which pointers and sizes are multiples of 16. Each kernel's module lists the specialisations
that it is launched with as data, so that the SM120 audit compiles exactly what runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Compilation:
    """One specialisation of one kernel.

    Attributes:
        name: kernel and configuration, unique among all, such as "attention/fp8/bn64-bh8-w4-s2".
        fn: the function that `@triton.jit` returned.
        signature: Triton's type of each argument that is no constant, by name, such as "*u8",
            "*fp32", "i32", "i64", "fp32"; in the order of the parameters.
        constexprs: the value of each `tl.constexpr` parameter, and of arguments that Triton takes
            as constants: None where a pointer is absent.
        num_warps: warps of a block.
        num_stages: depth of the software pipeline.
        aligned: names of the arguments that are multiples of 16 at every launch: pointers in bytes,
            integers as they are. Without it no load is wider than one element.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()

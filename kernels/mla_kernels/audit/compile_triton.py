"""Making a cubin from a Triton kernel for a GPU that this machine does not have."""

from dataclasses import dataclass
from typing import Any

from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.platform import Capability, interpreter_active, require

WARP = 32


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel for one compute capability.

    Attributes:
        cubin: the machine code.
        function: the kernel's name in it.
        threads: of a block.
        dynamic_shared_bytes: what the launch asks for.
        ttgir: Triton's own form after its GPU passes, in which buffers still have names.
    """

    cubin: bytes
    function: str
    threads: int
    dynamic_shared_bytes: int
    ttgir: str


def compile_for(compilation: Compilation, capability: Capability) -> Compiled:
    """Compile one specialisation; needs neither GPU nor driver.

    Args:
        compilation: What to compile; its constants may not be tensors.
        capability: For which compute capability.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: Triton's interpreter is on, so there is nothing to compile.
        ValueError: A parameter has neither a type nor a value, or one is named that is not there.
    """
    if interpreter_active():
        raise RuntimeError("Triton's interpreter is on: unset TRITON_INTERPRET and start again")
    triton = require("triton")
    compiler = require("triton.compiler")
    target = require("triton.backends.compiler").GPUTarget("cuda", _number(capability), WARP)
    source = compiler.ASTSource(
        compilation.fn,
        _types(compilation),
        constexprs=dict(compilation.constexprs),
        attrs=_alignment(compilation),
    )
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    made = triton.compile(source, target=target, options=options)
    # Triton may add warps of its own to what was asked for, so the threads come from the result.
    return Compiled(
        cubin=made.asm["cubin"],
        function=made.metadata.name,
        threads=made.metadata.num_warps * WARP,
        dynamic_shared_bytes=made.metadata.shared,
        ttgir=made.asm["ttgir"],
    )


def _types(compilation: Compilation) -> dict[str, str]:
    names = list(compilation.fn.arg_names)
    given = [*compilation.signature, *compilation.constexprs, *compilation.aligned]
    if unknown := sorted(set(given) - set(names)):
        raise ValueError(f"{compilation.name}: no parameter is called {', '.join(unknown)}")
    types = dict(compilation.signature) | dict.fromkeys(compilation.constexprs, "constexpr")
    if lacking := [name for name in names if name not in types]:
        raise ValueError(f"{compilation.name}: neither type nor value for {', '.join(lacking)}")
    return {name: types[name] for name in names}


def _alignment(compilation: Compilation) -> dict[tuple[int], list[list[Any]]]:
    names = list(compilation.fn.arg_names)
    return {(names.index(name),): [["tt.divisibility", 16]] for name in compilation.aligned}


def _number(capability: Capability) -> int:
    return capability[0] * 10 + capability[1]

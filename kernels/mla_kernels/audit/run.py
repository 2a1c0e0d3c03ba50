"""The audit itself: compile, read, judge, and put it all into a record."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mla_kernels.audit.compile_triton import compile_for
from mla_kernels.audit.cubin import CubinFacts, read_cubin
from mla_kernels.audit.record import KERNELS, SM120
from mla_kernels.audit.shared_map import allocate, shared_uses
from mla_kernels.audit.verdict import Verdict, judge
from mla_kernels.source_hash import source_hash
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.platform import Capability, Probes, require, sm_name
from mla_ref.platform.compilers import find_ptxas

# SM90 too: there the kernels are timed, so their code must be what SM120 could run.
TARGETS: tuple[Capability, ...] = (SM120, (9, 0))


def audit(
    compilations: Iterable[Compilation],
    *,
    known: Mapping[str, Any] | None = None,
    root: Path = KERNELS,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Compile all, for each of `TARGETS`, and say what came of it; a record for `write_record`.

    Args:
        compilations: What to compile.
        known: An earlier record. What the same tools made of the same sources is taken from it.
        root: The folder that the record's paths are relative to.
        progress: Called with a name before its compilation.
    """
    compilations = list(compilations)
    # At once, before a compile takes minutes: a file that is edited meanwhile would be hashed anew.
    entries = {compilation.name: source_of(compilation, root) for compilation in compilations}
    earlier = known["compilations"] if known and known["tools"] == tools() else {}
    for compilation in compilations:
        entry, before = entries[compilation.name], dict(earlier.get(compilation.name, {}))
        targets = before.pop("targets", None)
        if targets is None or before != entry:
            progress(compilation.name)
            targets = {sm_name(target): audit_one(compilation, target) for target in TARGETS}
        entry["targets"] = targets
    return {"tools": tools(), "compilations": entries}


def source_of(compilation: Compilation, root: Path = KERNELS) -> dict[str, Any]:
    """What is compiled: where the kernel stands, its hash, and what it is specialised on."""
    function = compilation.fn.fn
    path = Path(inspect.getfile(function)).resolve()
    return {
        "file": path.relative_to(root.resolve()).as_posix(),
        "function": function.__name__,
        "source_hash": source_hash(path, function.__name__),
        "specialisation": {
            "signature": dict(compilation.signature),
            "constexprs": {name: _plain(v) for name, v in compilation.constexprs.items()},
            "aligned": sorted(compilation.aligned),
            "num_warps": compilation.num_warps,
            "num_stages": compilation.num_stages,
        },
    }


def audit_one(compilation: Compilation, target: Capability) -> dict[str, Any]:
    """Compile one for one compute capability: its numbers and the verdict."""
    made = compile_for(compilation, target)
    facts = read_cubin(made.cubin)[made.function]
    verdict = judge(
        facts, target, threads=made.threads, dynamic_shared_bytes=made.dynamic_shared_bytes
    )
    entry = entry_of(facts, verdict, made.dynamic_shared_bytes)
    return entry | {"shared_uses": shared_uses(allocate(made.ttgir, target))}


def entry_of(facts: CubinFacts, verdict: Verdict, dynamic_shared_bytes: int) -> dict[str, Any]:
    """What a record holds of a kernel compiled for one compute capability."""
    return {
        "fits": verdict.fits,
        "reasons": list(verdict.reasons),
        "shared_bytes": facts.static_shared_bytes + dynamic_shared_bytes,
        "registers": facts.registers,
        "stack_bytes": facts.stack_bytes,
        "spills": facts.spills,
        "spills_in_loops": facts.spills_in_loops,
        "blocks_per_sm": verdict.occupancy.blocks,
        "limited_by": verdict.occupancy.limited_by,
        "instructions": facts.instructions,
        "instructions_in_loops": facts.instructions_in_loops,
        "classes": dict(facts.classes),
        "classes_in_loops": dict(facts.classes_in_loops),
    }


def tools() -> dict[str, str]:
    """The versions that the numbers depend on."""
    found = {"triton": require("triton").__version__}
    for target in TARGETS:
        version = find_ptxas(target, Probes()).version
        found[f"ptxas for {sm_name(target)}"] = ".".join(map(str, version or ("?",)))
    return found


def summary(record: Mapping[str, Any], target: Capability = SM120) -> list[str]:
    """A line for each specialisation: what it takes, and why it does not fit if it does not."""
    lines = []
    for name, entry in sorted(record["compilations"].items()):
        it = entry["targets"][sm_name(target)]
        verdict = "fits" if it["fits"] else f"does not fit: {'; '.join(it['reasons'])}"
        lines.append(
            f"{name}: {it['shared_bytes']:,} B shared, {it['registers']} registers, "
            f"{it['spills']} spills, {it['blocks_per_sm']} blocks an SM by {it['limited_by']}; "
            f"{verdict}"
        )
    return lines


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)

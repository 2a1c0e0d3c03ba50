"""The audit's data: what the file holds, how it is read, and when it is stale.

One entry a specialisation. It holds the hash of the kernel's source, what was compiled, and what
the compiler said for each compute capability. Reading it needs no Triton.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mla_kernels.source_hash import source_hash
from mla_ref.platform import Capability, sm_name

KERNELS = Path(__file__).parents[2]
# Beside the code and not among the receipts: a backend reads it, from the wheel too.
RECORD = Path(__file__).with_name("sm120-audit.json")
CUDA_RECORD = RECORD.with_name("cuda-audit.json")
SM120: Capability = (12, 0)

Config = TypeVar("Config")


def read_record(path: Path = RECORD) -> dict[str, Any]:
    """The whole file.

    Raises:
        FileNotFoundError: It is not there; the text says what writes it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; python -m mla_kernels.audit --write makes it")
    return json.loads(path.read_text("utf-8"))


def write_record(record: Mapping[str, Any], path: Path = RECORD) -> None:
    """Write the file, sorted and a number a line, so that a change of it reads as one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")


def stale(record: Mapping[str, Any], root: Path = KERNELS) -> list[str]:
    """What has changed in the kernels' sources since the record was made; empty if nothing has.

    It compares hashes and compiles nothing, so it is the same on every machine and version.

    Args:
        record: As `read_record` gives it.
        root: The folder that the record's files are relative to.
    """
    problems = []
    for name, entry in record["compilations"].items():
        file, function = entry["file"], entry["function"]
        path = root / file
        if not path.is_file():
            problems.append(f"{name}: {file} is gone")
            continue
        try:
            now = source_hash(path, function)
        except ValueError:
            problems.append(f"{name}: {file} has no {function} any more")
            continue
        if now != entry["source_hash"]:
            problems.append(f"{name}: {function} in {file} has changed since it was compiled")
    return problems


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """How a new record differs from a stored one, a line for each entry and field.

    Compilers differ: what they said is compared where both records come from the same ones.
    """
    ours, theirs = now["compilations"], then["compilations"]
    lines = [f"{name}: not in the record" for name in ours if name not in theirs]
    lines += [f"{name}: in the record, but no kernel's" for name in theirs if name not in ours]
    same_tools = now["tools"] == then["tools"]
    for name in (name for name in ours if name in theirs):
        fields = {*ours[name], *theirs[name]} - (set() if same_tools else {"targets"})
        for field in sorted(fields):
            mine, stored = ours[name].get(field), theirs[name].get(field)
            if mine != stored:
                lines.append(f"{name}: {field} is {mine}, the record has {stored}")
    return lines


def admitted(
    configs: Iterable[Config],
    capability: Capability,
    names_of: Callable[[Config], Iterable[str]],
    record: Mapping[str, Any] | None = None,
) -> list[Config]:
    """The configurations that a GPU may be offered: on SM12x those that the audit says fit.

    Elsewhere all are admitted: the driver refuses what is too large there.

    Args:
        configs: Any kind of configuration, the preferred ones first; the order stays.
        capability: Of the GPU.
        names_of: Gives the names of the compilations that a configuration leads to; all must fit.
        record: As `read_record` gives it, which is the default.

    Raises:
        FileNotFoundError: The record is needed and missing.
        ValueError: A configuration was never audited, so nobody knows whether it fits.
    """
    if capability[0] != SM120[0]:
        return list(configs)
    entries = (read_record() if record is None else record)["compilations"]
    return [
        config for config in configs if all(_fits_sm120(entries, name) for name in names_of(config))
    ]


def _fits_sm120(entries: Mapping[str, Any], name: str) -> bool:
    if name not in entries:
        raise ValueError(
            f"configs: {name!r} was never audited; run python -m mla_kernels.audit --write"
        )
    # Compute capability 12.1 has the same limits and instructions as 12.0.
    return entries[name]["targets"][sm_name(SM120)]["fits"]

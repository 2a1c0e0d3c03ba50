"""Cases as files, for a harness in C++ or any other language.

NAME.safetensors holds `input.*`, `expected.*` and `limit.*`: the largest absolute error allowed in
each row and head, in float64; `limit_bfloat16.*` is for kernels that round weights and dequantised
rows to bfloat16 before the second product. Integers have no limit, they are exact. NAME.json holds
the case, the numbers that are no tensors, and the strides that tensors had: safetensors stores no
gaps.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mla_ref.testing.case import Case

SCRIPT = '''\
"""{name}: {about}"""
from mla_ref.testing import find_case, load_target

case = find_case("{name}")
arguments = case.build("{device}")  # by name, as the function takes them
expected = case.expect()  # float64, on the CPU
print({{name: getattr(value, "shape", value) for name, value in arguments.items()}})
target = load_target("{target}", kind="{kind}")
case.check(target, "{device}")  # raises Mismatch, which says what is wrong
print("{name} passes")
'''


def script(case: Case, target: str, device: str = "cpu") -> str:
    """A short program that builds the case and runs the target on it, to put a debugger on."""
    about = case.about if case.about.endswith((".", "?")) else f"{case.about}."
    return SCRIPT.format(name=case, about=about, target=target, kind=case.kind, device=device)


def export(case: Case, folder: Path) -> Path:
    """Write a case's two files; returns the path of the JSON.

    Raises:
        ValueError: The case has a cache of gigabytes.
    """
    if case.nbytes():
        raise ValueError(f"{case} has a cache of {case.nbytes() / 1e9:.1f} GB; it is not exported")
    arguments = case.build()
    tensors = {f"input.{k}": v for k, v in arguments.items() if isinstance(v, Tensor)}
    tensors |= _named("expected", case.expect()) | _named("limit", case.tolerance())
    tensors |= _named("limit_bfloat16", case.tolerance("bfloat16"))
    strides = {k: list(v.stride()) for k, v in tensors.items() if not v.is_contiguous()}
    path = folder / f"{case.kind}-{case.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()}, path.with_suffix(".safetensors")
    )
    scalars = {k: v for k, v in arguments.items() if v is not None and not isinstance(v, Tensor)}
    data = {"case": case.to_json(), "arguments": scalars, "strides": strides}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return path


def _named(prefix: str, value: Any) -> dict[str, Tensor]:
    """Tensors of a result: of a tuple with names, of a table, or the one there is."""
    if value is None:
        return {}
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    parts = value._asdict() if hasattr(value, "_asdict") else value
    return {f"{prefix}.{name}": tensor for name, tensor in parts.items()}

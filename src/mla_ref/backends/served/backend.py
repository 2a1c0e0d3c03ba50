"""Emulations: the arithmetic of a served kernel in torch, behind the contract of a backend.

They are not the kernels and say nothing about their speed. They take what the kernel takes, pad the
heads as its engine does, round where it rounds, and convert the LSE from what it returns. The
output is in the dtype of q; where float32 is asked for, it is the accumulator before that last
rounding, which the kernels themselves do not hand out.

`mla-ref check` holds a backend to float32 arithmetic over the rows as stored. An emulation whose
profile rounds more than that fails it, as the kernel would, and the report says by how much.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mla_ref.backends.protocol import KINDS, AttnSpec, require_kinds
from mla_ref.backends.served.arithmetic import TILE
from mla_ref.backends.served.plan import ServedPlan, split_length
from mla_ref.backends.served.profile import ServedProfile
from mla_ref.backends.served.table import (
    B12X,
    FA3_SPARSE,
    FLASHINFER_SM120,
    FLASHMLA_SM90,
    FLASHMLA_SM100,
    PROFILES,
    VLLM_TRITON_SPARSE,
)
from mla_ref.cache.fp8_rows import LATENT, ROPE
from mla_ref.checks import describe, require_choice, require_count
from mla_ref.numerics import AttentionResult


@dataclass(frozen=True)
class ServedBackend:
    """The arithmetic of one served backend, in torch.

    Attributes:
        profile: Which.
        pad_value: What stands in the padded heads of q. Engines write 0; with NaN one sees that
            nothing of them reaches a result.
    """

    profile: ServedProfile
    pad_value: float = 0.0

    @property
    def name(self) -> str:
        """The profile's name behind "emulated-"."""
        return f"emulated-{self.profile.name}"

    @property
    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """None: only the attention is emulated."""
        return MappingProxyType({})

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        """None, or every field that the kernel is not built for with the values that it is."""
        profile, wrong = self.profile, []

        def refuse(name: str, built_for: str) -> None:
            wrong.append(f"{name} {getattr(spec, name)}, where it takes {built_for}")

        if spec.cache_format not in profile.heads:
            refuse("cache_format", " or ".join(profile.cache_formats))
        elif profile.padded_heads(spec.num_heads, spec.cache_format) is None:
            most = max(profile.heads[spec.cache_format] or ())
            refuse("num_heads", f"at most {most}")
        if spec.kv_lora_rank != LATENT:
            refuse("kv_lora_rank", str(LATENT))
        if spec.qk_rope_head_dim != ROPE:
            refuse("qk_rope_head_dim", str(ROPE))
        if profile.page_sizes is not None and spec.page_size not in profile.page_sizes:
            refuse("page_size", " or ".join(map(str, profile.page_sizes)))
        if spec.topk % profile.topk_multiple:
            refuse("topk", f"multiples of {profile.topk_multiple}")
        if spec.q_dtype not in profile.q_dtypes:
            refuse("q_dtype", " or ".join(map(str, profile.q_dtypes)))
        return f"the spec has {'; '.join(wrong)}" if wrong else None

    def plan(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        kinds: tuple[str, ...] = KINDS,
    ) -> ServedPlan:
        """Partial results as the kernel keeps them: its padded heads, its dtype, fixed splits."""
        if not isinstance(spec, AttnSpec):
            raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
        require_count("max_rows", max_rows)
        require_count("max_requests", max_requests)
        reason = self.supports(spec, device)
        heads = None if reason else self.profile.padded_heads(spec.num_heads, spec.cache_format)
        if heads is None:
            raise ValueError(f"{self.name} does not serve this spec: {reason}")
        splits = 0
        if "decode" in require_kinds(kinds):
            wanted = min(-(-spec.topk // TILE), self.profile.max_splits)
            # Whole tiles may need fewer splits: 5 tiles in 4 splits are 2 + 2 + 1.
            splits = -(-spec.topk // split_length(spec.topk, wanted))
        shape = (splits, max_rows, heads)
        dtype = getattr(torch, self.profile.arithmetic.partials)
        partials = AttentionResult(
            torch.empty(*shape, LATENT, dtype=dtype, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )
        return ServedPlan(
            spec, max_rows, splits, partials, kinds, self.profile, heads, self.pad_value
        )


def served_backend(name: str, *, pad_value: float = 0.0) -> ServedBackend:
    """The emulation of a served backend by the profile's name, one of `PROFILES`.

    `find_backend("emulated-" + name)` finds the same.
    """
    require_choice("name", name, tuple(PROFILES))
    return ServedBackend(PROFILES[name], pad_value)


# For the look-up by name, which takes an object of a module.
EMULATED_B12X = ServedBackend(B12X)
EMULATED_FLASHINFER_SM120 = ServedBackend(FLASHINFER_SM120)
EMULATED_FLASHMLA_SM90 = ServedBackend(FLASHMLA_SM90)
EMULATED_FLASHMLA_SM100 = ServedBackend(FLASHMLA_SM100)
EMULATED_VLLM_TRITON_SPARSE = ServedBackend(VLLM_TRITON_SPARSE)
EMULATED_FA3_SPARSE = ServedBackend(FA3_SPARSE)

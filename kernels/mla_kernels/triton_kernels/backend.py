"""Rung 14: the backend "triton", a plan, and two ways to run it, around the attention kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor

from mla_kernels.kernel_hash import triton_hash
from mla_kernels.kernel_plan import KernelPlan, new_partials
from mla_kernels.triton_kernels.cache_write import write_fp8_rows
from mla_kernels.triton_kernels.configs import Config, choose, fitting
from mla_kernels.triton_kernels.convert import positions_to_slots
from mla_kernels.triton_kernels.index_scores import index_scores
from mla_kernels.triton_kernels.launch import launch_attention, require_readable
from mla_kernels.triton_kernels.merge import launch_merge, merge_many
from mla_kernels.triton_kernels.sampler import rejection_sample
from mla_kernels.triton_kernels.split_plan import plan_splits
from mla_kernels.triton_kernels.topk import select_topk
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.backends.protocol import require_kinds
from mla_ref.checks import describe, require_count
from mla_ref.numerics import AttentionResult
from mla_ref.platform import gpu_of, interpreter_active, sm_name

Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (512, 64)
# Where no GPU says otherwise: what the interpreter gives does not depend on the computer either.
INTERPRETER_SLOTS = 16


@dataclass(frozen=True)
class TritonPlan(KernelPlan):
    """Buffers, and how the Triton kernels run on them.

    Attributes:
        config: How the attention kernel is cut.
    """

    config: Config

    def _attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        sink: Tensor | None,
        softmax_scale: float,
        results: AttentionResult,
    ) -> None:
        launch_attention(
            q, kv_cache, indices, counts, sink, softmax_scale, *results, self.config,
            interpreted=interpreter_active(),
        )  # fmt: skip

    def _merge(self, parts: AttentionResult, result: AttentionResult, sink: Tensor | None) -> None:
        launch_merge(*parts, *result, sink)

    def _require_readable(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        sink: Tensor | None,
    ) -> None:
        if kv_cache.dtype not in (torch.uint8, *Q_DTYPES):
            raise ValueError(
                f"kv_cache must hold bytes, bfloat16, float16 or float32, got {describe(kv_cache)}"
            )
        require_readable(q, kv_cache, indices)

    def _require_writable(self, out: Tensor) -> None:
        if out.stride(2) != 1:
            raise ValueError(
                "out must be contiguous in its last dimension, got the strides "
                f"{list(out.stride())}"
            )


@dataclass(frozen=True)
class TritonBackend:
    """Sparse MLA by Triton kernels: on NVIDIA GPUs, or anywhere in Triton's interpreter."""

    @property
    def name(self) -> str:
        """The name is "triton"."""
        return "triton"

    @property
    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """All: a kernel for each."""
        return MappingProxyType(
            {
                "merge": merge_many,
                "cache_write": write_fp8_rows,
                "convert": positions_to_slots,
                "index_scores": index_scores,
                "topk": select_topk,
                "sampler": rejection_sample,
            }
        )

    @property
    def source_hash(self) -> str:
        """Of the kernels and of how they are cut: what a receipt's numbers belong to."""
        return triton_hash()

    def configurations(self, spec: AttnSpec, device: torch.device) -> tuple[Config, ...]:
        """Every configuration that may serve the spec on this device, the preferred one first."""
        return fitting(spec, _capability(device))

    @property
    def maths(self) -> str:
        """Weights are rounded for the second product, see `mla_ref.testing.Adapter`."""
        return "bfloat16"

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        """None, or why the kernel cannot serve the spec on this device."""
        dims = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        if dims != DIMS:
            return (
                f"the kernel is for rows of 512 + 64 numbers, the spec has kv_lora_rank {dims[0]} "
                f"and qk_rope_head_dim {dims[1]}"
            )
        if spec.q_dtype not in Q_DTYPES:
            return f"q_dtype must be bfloat16, float16 or float32, got {spec.q_dtype}"
        if interpreter_active():
            return None
        if device.type != "cuda":
            return (
                f"Triton compiles for GPUs, the device is {device.type}; set TRITON_INTERPRET=1 "
                "before Python starts to run the kernels in Triton's interpreter"
            )
        gpu = gpu_of(device)
        if spec.cache_format == "fp8" and not gpu.features.fp8_conversion:
            return f"{sm_name(gpu.capability)} has no conversion from E4M3, or is not known here"
        return None

    def plan(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        kinds: tuple[str, ...] = KINDS,
    ) -> TritonPlan:
        """Buffers for `max_rows` rows; `max_requests` changes nothing here, a row is a unit."""
        if not isinstance(spec, AttnSpec):
            raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
        require_count("max_rows", max_rows)
        require_count("max_requests", max_requests)
        if reason := self.supports(spec, device):
            raise ValueError(f"the triton backend does not serve this spec: {reason}")
        config, splits = choose(spec, max_rows, _capability(device)), 0
        if "decode" in require_kinds(kinds):
            blocks = triton.cdiv(spec.num_heads, config.heads)
            tiles = triton.cdiv(spec.topk, config.tokens)
            splits = plan_splits(max_rows * blocks, tiles, _slots(spec, config, device))
        partials = new_partials(spec, max_rows, splits, device)
        return TritonPlan(spec, max_rows, splits, partials, kinds, config)


def _capability(device: torch.device) -> tuple[int, int] | None:
    """None where no GPU runs the kernels."""
    return gpu_of(device).capability if device.type == "cuda" else None


def _slots(spec: AttnSpec, config: Config, device: torch.device) -> int:
    """Programs that run at a time."""
    if device.type != "cuda":
        return INTERPRETER_SLOTS
    gpu = gpu_of(device)
    shared = config.shared_bytes(spec.cache_format)
    return gpu.num_sms * max(gpu.shared_memory_per_block // shared, 1)

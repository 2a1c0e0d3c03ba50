"""The backend "triton": a plan, and the two ways to run it, around the attention kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_kernels.source_hash import source_hash
from mla_kernels.triton_kernels.cache_write import write_fp8_rows
from mla_kernels.triton_kernels.configs import Config, choose, fitting
from mla_kernels.triton_kernels.convert import positions_to_slots
from mla_kernels.triton_kernels.index_scores import index_scores
from mla_kernels.triton_kernels.launch import launch_attention, require_readable
from mla_kernels.triton_kernels.merge import launch_merge, merge_many
from mla_kernels.triton_kernels.split_plan import plan_splits
from mla_kernels.triton_kernels.topk import select_topk
from mla_ref.attention.selected import require_sparse
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.backends.plan_checks import require_outputs, require_planned
from mla_ref.backends.protocol import require_kinds
from mla_ref.checks import describe, require_count, require_float, require_same_device, require_size
from mla_ref.numerics import AttentionResult
from mla_ref.platform import interpreter_active, read_gpu, sm_name

Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (512, 64)
# Where no GPU says otherwise: what the interpreter gives does not depend on the computer either.
INTERPRETER_SLOTS = 16


@dataclass(frozen=True)
class TritonPlan:
    """Buffers for the partial results of a decode step, and how the kernel is cut.

    Attributes:
        spec: What it was planned for.
        max_rows: Rows at most.
        num_splits: Pieces of each list in `decode`, see `split_plan`; one writes the result itself.
        partials: `out` [num_splits, max_rows, heads, 512] and `lse` in float32; empty where one
            split or none is planned.
        kinds: Which of "decode" and "extend" it runs.
        config: The tuning configuration.
    """

    spec: AttnSpec
    max_rows: int
    num_splits: int
    partials: AttentionResult
    kinds: tuple[str, ...]
    config: Config

    @property
    def nbytes(self) -> int:
        """Bytes of the partial results."""
        return self.partials.out.nbytes + self.partials.lse.nbytes

    def decode(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """Each list in the plan's splits, merged by a second kernel. See `Plan.decode`."""
        self._require("decode", q, kv_cache, indices, counts, softmax_scale, sink)
        result = self._result(q, out, lse, out_dtype)
        if self.num_splits == 1:
            self._attend(q, kv_cache, indices, counts, sink, softmax_scale, _as_one_split(result))
            return result
        rows = q.shape[0]
        partials = AttentionResult(self.partials.out[:, :rows], self.partials.lse[:, :rows])
        self._attend(q, kv_cache, indices, counts, None, softmax_scale, partials)
        launch_merge(*partials, *result, sink)
        return result

    def extend(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """One pass of each row over its list. See `Plan.extend`."""
        self._require("extend", q, kv_cache, indices, counts, softmax_scale, sink)
        result = self._result(q, out, lse, out_dtype)
        self._attend(q, kv_cache, indices, counts, sink, softmax_scale, _as_one_split(result))
        return result

    def _require(
        self,
        kind: str,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        softmax_scale: float,
        sink: Tensor | None,
    ) -> None:
        """Raise unless a run fits its plan and the kernel; reads no values."""
        require_planned(self.spec, self.max_rows, self.kinds, kind, q, kv_cache, indices)
        require_sparse(q, kv_cache, indices, counts, softmax_scale, self.spec.kv_lora_rank)
        if kv_cache.dtype not in (torch.uint8, *Q_DTYPES):
            raise ValueError(
                f"kv_cache must hold bytes, bfloat16, float16 or float32, got {describe(kv_cache)}"
            )
        if kv_cache.dtype == torch.float32 != q.dtype:
            raise ValueError(
                f"kv_cache is float32, but the plan is for q_dtype {q.dtype}: plan for float32"
            )
        if sink is not None:
            require_float("sink", sink, "h")
            require_size("sink", sink, 0, q.shape[1], "one sink a head")
            require_same_device({"q": q, "sink": sink})
        require_readable(q, kv_cache)

    def _result(
        self, q: Tensor, out: Tensor | None, lse: Tensor | None, out_dtype: torch.dtype | None
    ) -> AttentionResult:
        """The caller's buffers, or new ones."""
        dtype = require_outputs(self.spec, q, out, lse, out_dtype, torch.float32)
        if out is None:
            out = q.new_empty(*q.shape[:2], self.spec.kv_lora_rank, dtype=dtype)
        elif out.stride(2) != 1:
            raise ValueError(
                "out must be contiguous in its last dimension, got the strides "
                f"{list(out.stride())}"
            )
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return AttentionResult(out, lse)

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
            }
        )

    @property
    def source_hash(self) -> str:
        """Of the attention kernel and the merge, which a receipt's numbers belong to."""
        folder = Path(__file__).parent
        return "-".join(
            source_hash(folder / f"{file}.py", name)
            for file, name in (
                ("attention", "sparse_attention_kernel"),
                ("merge", "merge_kernel"),
            )
        )

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
        gpu = read_gpu(device.index or 0)
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
        shape = (splits if splits > 1 else 0, max_rows, spec.num_heads)
        partials = AttentionResult(
            torch.empty(*shape, spec.kv_lora_rank, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )
        return TritonPlan(spec, max_rows, splits, partials, kinds, config)


def _capability(device: torch.device) -> tuple[int, int] | None:
    """None where no GPU runs the kernels."""
    return read_gpu(device.index or 0).capability if device.type == "cuda" else None


def _slots(spec: AttnSpec, config: Config, device: torch.device) -> int:
    """Programs that run at a time."""
    if device.type != "cuda":
        return INTERPRETER_SLOTS
    gpu = read_gpu(device.index or 0)
    shared = config.shared_bytes(spec.cache_format)
    return gpu.num_sms * max(gpu.shared_memory_per_block // shared, 1)


def _as_one_split(result: AttentionResult) -> AttentionResult:
    return AttentionResult(result.out[None], result.lse[None])

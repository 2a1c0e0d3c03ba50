"""The backend "cupy": a plan, and the two ways to run it, around the CUDA kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import NUMBERS
from mla_kernels.cuda_kernels.attention import (
    launch_attention,
    plan_splits,
    require_readable,
)
from mla_kernels.cuda_kernels.cache_write import write_fp8_rows
from mla_kernels.cuda_kernels.emulation.host import emulation_gap
from mla_kernels.cuda_kernels.merge import BEHIND_DECODE, launch_merge, merge_many
from mla_ref.attention.selected import require_sparse
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.backends.plan_checks import require_outputs, require_planned
from mla_ref.backends.protocol import require_kinds
from mla_ref.checks import describe, require_count, require_float, require_same_device, require_size
from mla_ref.numerics import AttentionResult
from mla_ref.platform import guarded_import, read_gpu, sm_name
from mla_ref.platform.compilers import find_nvrtc, nvrtc_gap
from mla_ref.platform.probes import Probes

DIMS = (512, 64)
# What the emulation gives does not depend on the computer.
EMULATED_SMS = 16


@dataclass(frozen=True)
class CupyPlan:
    """Buffers for the partial results of a decode step.

    Attributes:
        spec: What it was planned for.
        max_rows: Rows at most.
        num_splits: Pieces of each list in `decode`, see `plan_splits`; one writes the result
            itself.
        partials: `out` [num_splits, max_rows, heads, 512] and `lse` in float32; empty where one
            split or none is planned.
        kinds: Which of "decode" and "extend" it runs.
    """

    spec: AttnSpec
    max_rows: int
    num_splits: int
    partials: AttentionResult
    kinds: tuple[str, ...]

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
            one = AttentionResult(result.out[None], result.lse[None])
            launch_attention(q, kv_cache, indices, counts, sink, softmax_scale, one)
            return result
        rows = q.shape[0]
        parts = AttentionResult(self.partials.out[:, :rows], self.partials.lse[:, :rows])
        launch_attention(q, kv_cache, indices, counts, None, softmax_scale, parts)
        launch_merge(parts, result, sink, BEHIND_DECODE)
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
        """One pass of each row over its list: the same kernel with one split. See `Plan.extend`."""
        self._require("extend", q, kv_cache, indices, counts, softmax_scale, sink)
        result = self._result(q, out, lse, out_dtype)
        one = AttentionResult(result.out[None], result.lse[None])
        launch_attention(q, kv_cache, indices, counts, sink, softmax_scale, one)
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
        """Raise unless a run fits its plan and the kernels; reads no values."""
        require_planned(self.spec, self.max_rows, self.kinds, kind, q, kv_cache, indices)
        require_sparse(q, kv_cache, indices, counts, softmax_scale, self.spec.kv_lora_rank)
        if kv_cache.dtype == torch.float32 != q.dtype:
            raise ValueError(
                f"kv_cache is float32, but the plan is for q_dtype {q.dtype}: plan for float32"
            )
        if sink is not None:
            require_float("sink", sink, "h")
            require_size("sink", sink, 0, q.shape[1], "one sink a head")
            require_same_device({"q": q, "sink": sink})
        require_readable(kv_cache, indices, counts, sink)

    def _result(
        self, q: Tensor, out: Tensor | None, lse: Tensor | None, out_dtype: torch.dtype | None
    ) -> AttentionResult:
        """The caller's buffers, or new ones."""
        dtype = require_outputs(self.spec, q, out, lse, out_dtype, torch.float32)
        if out is None:
            out = q.new_empty(*q.shape[:2], self.spec.kv_lora_rank, dtype=dtype)
        elif out.stride(2) != 1 or any(n % 4 for n in out.stride()[:2]) or out.data_ptr() % 16:
            raise ValueError(
                "out must be contiguous in its last dimension, its heads at multiples of 4 numbers "
                f"and itself at one of 16 bytes, got the strides {list(out.stride())}"
            )
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return AttentionResult(out, lse)


@dataclass(frozen=True)
class CupyBackend:
    """Sparse MLA by CUDA C++ kernels that CuPy compiles, on NVIDIA GPUs from SM90 on.

    On a CPU the same source is emulated, lane by lane: to look at, and for CI.
    """

    @property
    def name(self) -> str:
        """The name is "cupy"."""
        return "cupy"

    @property
    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """The merge of partial results and the writer of FP8 rows."""
        return MappingProxyType({"merge": merge_many, "cache_write": write_fp8_rows})

    @property
    def maths(self) -> str:
        """Weights are rounded for the second product, see `mla_ref.testing.Adapter`."""
        return "bfloat16"

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        """None, or why the kernels cannot serve the spec on this device."""
        dims = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        if dims != DIMS:
            return (
                f"the kernels are for rows of 512 + 64 numbers, the spec has kv_lora_rank "
                f"{dims[0]} and qk_rope_head_dim {dims[1]}"
            )
        if spec.q_dtype not in NUMBERS:
            return f"q_dtype must be bfloat16, float16 or float32, got {spec.q_dtype}"
        if device.type == "cpu":
            return emulation_gap()
        if device.type != "cuda":
            return f"CUDA kernels run on NVIDIA GPUs, or emulated on a CPU, not on {device.type}"
        _, error = guarded_import("cupy")
        if error is not None:
            return f"CuPy is needed to compile the kernels and does not import: {error}"
        capability = read_gpu(device.index or 0).capability
        version, reason = find_nvrtc(Probes())
        if version is None:
            return f"CuPy finds no NVRTC: {reason}"
        # SM89 is the first with the conversion of e4m3, SM90 with griddepcontrol.
        if capability < (9, 0):
            return f"the kernels need SM90 or later, this is {sm_name(capability)}"
        return nvrtc_gap(version, capability)

    def plan(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        kinds: tuple[str, ...] = KINDS,
    ) -> CupyPlan:
        """Buffers for `max_rows` rows; `max_requests` changes nothing here, a row is a unit."""
        if not isinstance(spec, AttnSpec):
            raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
        require_count("max_rows", max_rows)
        require_count("max_requests", max_requests)
        if reason := self.supports(spec, device):
            raise ValueError(f"the cupy backend does not serve this spec: {reason}")
        splits = 0
        if "decode" in require_kinds(kinds):
            on_gpu = device.type == "cuda"
            units = read_gpu(device.index or 0).num_sms if on_gpu else EMULATED_SMS
            splits = plan_splits(max_rows, spec.num_heads, spec.topk, units)
        shape = (splits if splits > 1 else 0, max_rows, spec.num_heads)
        partials = AttentionResult(
            torch.empty(*shape, spec.kv_lora_rank, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )
        return CupyPlan(spec, max_rows, splits, partials, kinds)

"""Rung 15: the backend "cupy", a plan, and the two ways to run it, around the CUDA kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mla_kernels.audit.record import CUDA_RECORD, admitted, read_record
from mla_kernels.cuda_kernels.arguments import NUMBERS
from mla_kernels.cuda_kernels.attention import (
    is_fast,
    launch_attention,
    plan_splits,
    require_readable,
)
from mla_kernels.cuda_kernels.cache_write import write_fp8_rows
from mla_kernels.cuda_kernels.emulation.host import emulation_gap
from mla_kernels.cuda_kernels.merge import BEHIND_DECODE, launch_merge, merge_many
from mla_kernels.cuda_kernels.union import (
    UNION,
    RequestRows,
    launch_union,
    plan_union_splits,
    union_gap,
)
from mla_kernels.kernel_hash import cuda_hash
from mla_kernels.kernel_plan import KernelPlan, new_partials
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.backends.protocol import require_kinds
from mla_ref.checks import describe, require_count, require_same_device
from mla_ref.numerics import AttentionResult
from mla_ref.platform import gpu_of, guarded_import, sm_name
from mla_ref.platform.compilers import find_nvrtc, nvrtc_gap
from mla_ref.platform.probes import Probes

DIMS = (512, 64)
# What the emulation gives does not depend on the computer.
EMULATED_SMS = 16


@dataclass(frozen=True)
class CupyPlan(KernelPlan):
    """Buffers, and how the CUDA kernels run on them."""

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
        launch_attention(q, kv_cache, indices, counts, sink, softmax_scale, results, self.max_rows)

    def _merge(self, parts: AttentionResult, result: AttentionResult, sink: Tensor | None) -> None:
        launch_merge(parts, result, sink, BEHIND_DECODE)

    def _require_readable(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        sink: Tensor | None,
    ) -> None:
        require_readable(kv_cache, indices, counts, sink)

    def _require_writable(self, out: Tensor) -> None:
        if out.stride(2) != 1 or any(n % 4 for n in out.stride()[:2]) or out.data_ptr() % 16:
            raise ValueError(
                "out must be contiguous in its last dimension, its heads at multiples of 4 numbers "
                f"and itself at one of 16 bytes, got the strides {list(out.stride())}"
            )


@dataclass(frozen=True)
class UnionPlan(CupyPlan):
    """Reads what the rows of a request list once for all of them; see `CupyBackend.plan_union`.

    Attributes:
        requests: Which rows belong together.
    """

    requests: RequestRows

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
        given = (q, kv_cache, indices, counts, sink, softmax_scale, results)
        if is_fast(q, kv_cache):
            launch_union(*given, self.requests)
        else:
            launch_attention(*given, self.max_rows)


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

    @property
    def source_hash(self) -> str:
        """Of the kernels and of how they are cut: what a receipt's numbers belong to."""
        return cuda_hash()

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
        capability = gpu_of(device).capability
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
        self._require(spec, max_rows, max_requests, device)
        splits = 0
        if "decode" in require_kinds(kinds):
            splits = plan_splits(max_rows, spec.num_heads, spec.topk, _multiprocessors(device))
        return CupyPlan(spec, max_rows, splits, new_partials(spec, max_rows, splits, device), kinds)

    def plan_union(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        request_rows: int,
        starts: Tensor | None = None,
    ) -> UnionPlan:
        """A plan for decode that reads each row that a request lists once for its 1 + n rows.

        The same contract but for one rule: a row's bits depend on which slots the other rows of its
        request list, so rows cannot be permuted across requests. In return the order of the lists
        and of the rows within a request changes no bit.

        `plan` never takes this way by itself: on an H200 it is the slower one. With 0.9 of the
        lists in common, 4, 16, 64 and 256 rows of 8 heads take 24, 29, 42 and 109 us, against 14,
        20, 38 and 94 of `plan`; with all in common 64 and 256 rows take 41 and 98 against 37 and
        88. A third of the bytes is moved, but there decode.cu waits for instructions, not for
        bytes, and this kernel has as many: see kernels/LOG.md.

        Args:
            spec: What a layer needs.
            max_rows: Query rows of a run at most.
            max_requests: Requests of a run at most.
            device: Where.
            request_rows: See `RequestRows.rows`.
            starts: See `RequestRows.starts`; the plan keeps this very tensor.

        Raises:
            ValueError: With the reason of `supports`, or of the kernel for unions, which by the
                audit does not fit SM12x.
        """
        self._require(spec, max_rows, max_requests, device)
        if reason := union_gap(spec):
            raise ValueError(f"the cupy backend does not serve this spec: {reason}")
        if device.type == "cuda":
            capability = gpu_of(device).capability
            record = read_record(CUDA_RECORD)
            if not admitted((UNION.name,), capability, lambda name: (name,), record):
                raise ValueError(
                    "the cupy backend does not serve this spec: the union kernel spills on "
                    f"{sm_name(capability)}, see mla_kernels.audit"
                )
        if starts is not None:
            buffers = torch.empty(0, device=device)
            require_same_device({"starts": starts, "the plan's buffers": buffers})
        requests = RequestRows(request_rows, starts)
        splits = plan_union_splits(
            requests.requests(max_rows),
            requests.parts(spec.num_heads),
            spec.topk,
            _multiprocessors(device),
        )
        partials = new_partials(spec, max_rows, splits, device)
        return UnionPlan(spec, max_rows, splits, partials, ("decode",), requests)

    def _require(
        self, spec: AttnSpec, max_rows: int, max_requests: int, device: torch.device
    ) -> None:
        if not isinstance(spec, AttnSpec):
            raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
        require_count("max_rows", max_rows)
        require_count("max_requests", max_requests)
        if reason := self.supports(spec, device):
            raise ValueError(f"the cupy backend does not serve this spec: {reason}")


def _multiprocessors(device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    return gpu_of(device).num_sms if on_gpu else EMULATED_SMS

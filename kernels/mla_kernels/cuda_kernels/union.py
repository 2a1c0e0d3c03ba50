"""Attention of a request's rows over the union of their lists: which rows, how many splits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import UnionCall
from mla_kernels.cuda_kernels.attention import make_call
from mla_kernels.cuda_kernels.launch import Kernel
from mla_ref.backends import AttnSpec
from mla_ref.checks import describe, require_count, require_integer
from mla_ref.numerics import AttentionResult

UNION = Kernel("decode_union.cu", "decode_union", threads=256, shared_bytes=99_216)
# Rows x heads of a block.
COLUMNS = 32
MOST_ROWS = 8
MOST_SPLITS = 48
# How often a row may list a slot fits 16 bits.
MOST_TOPK = 32_768


@dataclass(frozen=True)
class RequestRows:
    """Which rows of a run belong to one request: they follow each other.

    Attributes:
        rows: Of a request at most, 1 to 8: 1 + drafts. What is beyond is not computed.
        starts: int32 [requests + 1] on the device: request i has rows starts[i] to
            starts[i + 1] - 1, as `query_start_loc` of a step. It is read when the kernel runs, so a
            captured graph takes what is in it then. Rows that no request has are not computed.
            None: all requests have `rows` rows, the last one perhaps fewer.
    """

    rows: int
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise unless the kernel can take them."""
        if require_count("request_rows", self.rows, at_least=1) > MOST_ROWS:
            raise ValueError(f"request_rows must be 1 to {MOST_ROWS}, got {self.rows}")
        if self.starts is None:
            return
        require_integer("starts", self.starts, "requests_1")
        if self.starts.shape[0] == 0:
            raise ValueError("starts must begin with the first request's first row, got []")
        if self.starts.dtype != torch.int32 or not self.starts.is_contiguous():
            raise TypeError(f"starts must be contiguous int32, got {describe(self.starts)}")

    def requests(self, rows: int) -> int:
        """Requests of a run of so many rows."""
        return -(-rows // self.rows) if self.starts is None else self.starts.shape[0] - 1

    @property
    def row_shift(self) -> int:
        """log2 of a block's rows: 1, 2 or 4 rows with 32, 16 or 8 heads of each."""
        return min((self.rows - 1).bit_length(), 2)

    @property
    def row_parts(self) -> int:
        """Blocks for the rows of a request."""
        return -(-self.rows >> self.row_shift)

    def parts(self, heads: int) -> int:
        """Blocks for the rows and heads of a request, in one split."""
        return self.row_parts * -(-heads // (COLUMNS >> self.row_shift))


def plan_union_splits(requests: int, parts: int, topk: int, multiprocessors: int) -> int:
    """How many ranges of slot hashes a list is split into: one block a multiprocessor at most."""
    most = min(MOST_SPLITS, max(topk // 32, 1))
    return max(min(multiprocessors // max(requests * parts, 1), most), 1)


def union_gap(spec: AttnSpec) -> str | None:
    """None, or why the kernel does not serve the spec."""
    if spec.cache_format != "fp8" or spec.q_dtype != torch.bfloat16:
        return (
            "the union of lists is for FP8 rows and bfloat16 queries, the spec has "
            f"{spec.cache_format} and {spec.q_dtype}"
        )
    if spec.topk > MOST_TOPK:
        return f"the union of lists is for topk up to {MOST_TOPK}, the spec has {spec.topk}"
    return None


def launch_union(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    results: AttentionResult,
    requests: RequestRows,
) -> None:
    """Attend into `results`, as `launch_attention`; `is_fast` must hold."""
    call = make_call(q, kv_cache, indices, counts, sink, softmax_scale, results)
    parts = requests.parts(call.heads)
    given = UnionCall(
        call=call,
        starts=None if requests.starts is None else requests.starts.data_ptr(),
        request_rows=requests.rows,
        row_shift=requests.row_shift,
        row_parts=requests.row_parts,
        parts=parts,
        last_hash=-(-(2**32) // call.splits) - 1,
    )
    UNION.launch(q.device, (requests.requests(call.rows), parts * call.splits), given)

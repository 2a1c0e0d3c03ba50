"""Top-k: the k best keys of each row, the same list every time; `radix_select` has the kernels."""

import torch
import triton
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.triton_kernels.outputs import divide, out_or_new, require_runnable
from mla_kernels.triton_kernels.radix_select import (
    count_digits_kernel,
    list_best_kernel,
    sort_lists_kernel,
)
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.checks import describe
from mla_ref.indexer.topk import require_selection
from mla_ref.platform.stream import current_device

BLOCK = 2048  # scores at a time
MAX_SPLITS = 16
MAX_K = 4096  # a list is sorted by one program


def select_topk(
    scores: Float[Tensor, "rows s_kv"],
    visible_lens: Int[Tensor, " rows"],
    k: int,
    *,
    out: Int[Tensor, "rows k"] | None = None,
    workspace: UInt8[Tensor, " nbytes"] | None = None,
) -> Int[Tensor, "rows k"]:
    """`mla_ref.indexer.select_topk` as kernels, the same list: ties to the lower position.

    Args:
        scores: float32, bfloat16 or float16, any strides.
        visible_lens: Causal length of each row; scores at and beyond it are not read.
        k: Width of the result, at most 4,096.
        out: Where to write, int32; a new tensor if None.
        workspace: From `topk_workspace`; a new one if None.

    Raises:
        TypeError: Scores are float64, of which the 32 bits of a key know only a part.
        ValueError: `k` is larger than a list that one program sorts, or the workspace does not fit.
    """
    require_selection(scores, visible_lens, k)
    if scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"scores must be float32, bfloat16 or float16, got {describe(scores)}")
    if k > MAX_K:
        raise ValueError(f"k must be at most {MAX_K}, got {k}")
    require_runnable("scores", scores)
    rows, s_kv = scores.shape
    positions = out_or_new("out", out, (rows, k), torch.int32, scores)
    if not positions.numel():
        return positions
    if workspace is None:
        workspace = topk_workspace(rows, s_kv, k, scores.device)
    splits, split_len = _splits(s_kv)
    chosen, histograms, states, better = divide(workspace, _parts(rows, k, splits), scores)
    facts = (s_kv, *scores.stride(), visible_lens.stride(0), split_len)
    with current_device(scores.device):
        for digit in range(4):
            count_digits_kernel[(rows, splits)](
                scores, visible_lens, histograms, states, better, k, *facts,
                PASS=digit, SPLITS=splits, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        list_best_kernel[(rows, splits)](
            scores, visible_lens, histograms, states, better, chosen, *facts, k,
            SPLITS=splits, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        sort_lists_kernel[(rows,)](
            chosen, states, positions, k, k, LOG_K=_log_at_least(k), num_warps=8
        )
    return positions


def topk_workspace(
    rows: int, s_kv: int, k: int, device: torch.device | None = None
) -> UInt8[Tensor, " nbytes"]:
    """Bytes that `select_topk` works in, to be allocated once: 4 KiB a split and 8 k a row."""
    splits, _ = _splits(s_kv)
    nbytes = sum(size for size, _ in _parts(rows, k, splits))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _splits(s_kv: int) -> tuple[int, int]:
    """How many splits a row has, a power of two, and the scores of each.

    Of the width alone: the list is exact whatever the number, but the plan should not move.
    """
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(max(s_kv, 1), 2 * BLOCK)))
    return splits, triton.cdiv(triton.cdiv(max(s_kv, 1), splits), BLOCK) * BLOCK


def _parts(rows: int, k: int, splits: int) -> tuple[tuple[int, torch.dtype], ...]:
    """The lists, 8 bytes an entry and so the first, and three tables: bytes and dtype of each."""
    return (
        (rows * k * 8, torch.int64),
        (rows * 4 * splits * 256 * 4, torch.int32),
        (rows * 8 * 4, torch.int32),
        (rows * splits * 4, torch.int32),
    )


def _log_at_least(k: int) -> int:
    return int(triton.next_power_of_2(k)).bit_length() - 1


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: float32 scores, each pass with 16 splits, lists of 2,048."""
    tables = {"histograms": "*i32", "states": "*i32", "better_counts": "*i32"}
    pointers = {"scores": "*fp32", "visible_lens": "*i32"} | tables
    facts = dict.fromkeys(("s_kv", "row_stride", "split_len"), "i32")
    unit = {"score_stride": 1, "len_stride": 1, "SPLITS": MAX_SPLITS, "BLOCK": BLOCK}
    passes = tuple(
        Compilation(
            name=f"topk/count-{digit}",
            fn=count_digits_kernel,
            signature=pointers | {"k": "i32"} | facts,
            constexprs=unit | {"PASS": digit},
            num_warps=8,
            aligned=(*pointers, "k", *facts),
        )
        for digit in range(4)
    )
    return (
        *passes,
        Compilation(
            name="topk/list",
            fn=list_best_kernel,
            signature=pointers | {"chosen": "*i64"} | facts | {"chosen_stride": "i32"},
            constexprs=unit,
            num_warps=8,
            aligned=(*pointers, "chosen", *facts, "chosen_stride"),
        ),
        Compilation(
            name="topk/sort-2048",
            fn=sort_lists_kernel,
            signature={"chosen": "*i64", "states": "*i32", "positions": "*i32"}
            | dict.fromkeys(("k", "chosen_stride"), "i32"),
            constexprs={"LOG_K": 11},
            num_warps=8,
            aligned=("chosen", "states", "positions", "k", "chosen_stride"),
        ),
    )

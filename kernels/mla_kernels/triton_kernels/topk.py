"""Top-k: the k best keys of each row, the same list every time.

A score becomes an integer that is ordered as the scores are, and the k-th largest integer is found
digit by digit (radix select). Pass p knows the upper 8p bits of it. It counts, among the scores
that share them, how often each value of the next 8 bits occurs, and from those 256 counts follows
in which value the k-th largest lies. After four passes all 32 bits are known: everything above is
listed, and of what equals it as many as there is room for, from the left.

Each row is cut into splits, so that a batch of four rows keeps more than four multiprocessors busy.
A pass leaves a histogram for each split; the next one adds them up itself. Since every count of
every split is kept, each split knows how many entries the splits before it list, so it writes to a
place of its own: no atomics, and the same bits whatever runs first. A last kernel sorts each list.

Bytes: 4 a score and pass, five times, from the L2 cache after the first: a row of 64k scores is
256 KiB.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.triton_kernels.outputs import out_or_new, require_runnable
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.checks import describe
from mla_ref.indexer.topk import require_selection
from mla_ref.platform.stream import current_device

BLOCK = 2048  # scores at a time
MAX_SPLITS = 16
MAX_K = 4096  # a list is sorted by one program


@triton.jit
def _ordered(score, selectable):
    """uint32 in the order of the scores; 0 for those that are never selected."""
    # -0.0 equals 0.0, so their positions decide: x + 0.0 is 0.0 for both.
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    # A negative float of larger bits is the smaller number: all bits turn. A positive one belongs
    # above all negative ones: its sign bit turns.
    key = bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    able = selectable & (score == score) & (score != float("-inf"))
    return tl.where(able, key, 0).to(tl.uint32)


@triton.jit
def _digit(histograms, room, SPLITS: tl.constexpr):
    """In which digit the room-th largest lies, the room that is left in it, and splits' counts.

    Returns:
        The digit, `room` less all above the digit, and for each split how many lie above it.
    """
    digits = tl.arange(0, 256)
    counts = tl.load(histograms + tl.arange(0, SPLITS)[:, None] * 256 + digits[None, :])
    total = tl.sum(counts, axis=0)
    above = tl.sum(total, axis=0) - tl.cumsum(total, 0)  # in higher digits
    # The largest digit with room for at least one; if all fit, the smallest digit of all.
    digit = tl.max(tl.where((above < room) & (above + total >= room), digits, 0), axis=0)
    left = room - tl.sum(tl.where(digits > digit, total, 0), axis=0)
    better = tl.sum(tl.where(digits[None, :] > digit, counts, 0), axis=1)
    return digit, left, better


@triton.jit
def count_digits_kernel(
    scores, visible_lens, histograms, states, better_counts,
    k, s_kv, row_stride, score_stride, len_stride, split_len,
    PASS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and split: the histogram of digit PASS, 0 the highest.

    histograms [rows, 4, SPLITS, 256]; states [rows, 4, 2]: the digits known and the room left;
    better_counts [rows, SPLITS]: entries of the split that are listed for sure.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    histograms += row * (4 * SPLITS * 256)
    states += row * 8
    known = tl.full([], 0, tl.uint32)
    room = k
    if PASS > 0:
        if PASS > 1:
            known = tl.load(states + 2 * (PASS - 1)).to(tl.uint32, bitcast=True)
            room = tl.load(states + 2 * (PASS - 1) + 1)
        digit, room, better = _digit(histograms + (PASS - 1) * SPLITS * 256, room, SPLITS)
        known = (known << 8) | digit.to(tl.uint32)
        at = better_counts + row * SPLITS + tl.arange(0, SPLITS)
        mine = tl.arange(0, SPLITS) == split
        if PASS > 1:
            better += tl.load(at, mask=mine, other=0)
        tl.store(at, better, mask=mine)
        if split == 0:
            tl.store(states + 2 * PASS, known.to(tl.int32, bitcast=True))
            tl.store(states + 2 * PASS + 1, room)

    visible = tl.minimum(tl.load(visible_lens + row * len_stride).to(tl.int64), s_kv)
    first = split * split_len
    end = tl.minimum(first + split_len, visible).to(tl.int32)
    counted = tl.zeros([256], tl.int32)
    for start in range(first, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < end
        score = tl.load(
            scores + row * row_stride + position.to(tl.int64) * score_stride, mask=inside, other=0
        ).to(tl.float32)
        key = _ordered(score, inside)
        # Key 0 is no entry and is not counted. Shifted by 32 nothing would be defined.
        same = key != 0
        if PASS > 0:
            same = same & ((key >> (32 - 8 * PASS)) == known)
        value = ((key >> (24 - 8 * PASS)) & 0xFF).to(tl.int32)
        counted += tl.histogram(value, 256, mask=same)
    tl.store(histograms + (PASS * SPLITS + split) * 256 + tl.arange(0, 256), counted)


@triton.jit
def list_best_kernel(
    scores, visible_lens, histograms, states, better_counts, chosen,
    s_kv, row_stride, score_stride, len_stride, split_len, chosen_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and split: its entries as [score | position] in one int64, to its place.

    Better entries of all splits come first, then tied ones, each from left to right.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    histograms += row * (4 * SPLITS * 256) + 3 * SPLITS * 256
    digit, room, better = _digit(histograms, tl.load(states + row * 8 + 7), SPLITS)
    known = tl.load(states + row * 8 + 6).to(tl.uint32, bitcast=True)
    threshold = (known << 8) | digit.to(tl.uint32)
    splits = tl.arange(0, SPLITS)
    better += tl.load(better_counts + row * SPLITS + splits)
    tied = tl.load(histograms + splits * 256 + digit)
    place = tl.sum(tl.where(splits < split, better, 0), axis=0)
    tied_before = tl.sum(tl.where(splits < split, tied, 0), axis=0)
    all_better = tl.sum(better, axis=0)

    visible = tl.minimum(tl.load(visible_lens + row * len_stride).to(tl.int64), s_kv)
    first = split * split_len
    end = tl.minimum(first + split_len, visible).to(tl.int32)
    chosen += row * chosen_stride
    for start in range(first, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < end
        score = tl.load(
            scores + row * row_stride + position.to(tl.int64) * score_stride, mask=inside, other=0
        ).to(tl.float32)
        key = _ordered(score, inside)
        above = key > threshold
        equal = (key == threshold) & (key != 0)
        rank = tied_before + tl.cumsum(equal.to(tl.int32), 0)  # counts from 1
        # The lower position is the larger integer: among equal scores it comes first.
        entry = (key.to(tl.int64) << 31) | (0x7FFFFFFF - position).to(tl.int64)
        to = tl.where(above, place + tl.cumsum(above.to(tl.int32), 0), all_better + rank) - 1
        tl.store(chosen + to, entry, mask=above | (equal & (rank <= room)))
        place += tl.sum(above.to(tl.int32), 0)
        tied_before += tl.sum(equal.to(tl.int32), 0)
    if split == 0:
        # Fewer than k where a row has fewer selectable scores.
        listed = all_better + tl.minimum(tl.sum(tied, axis=0), room)
        tl.store(states + row * 8, listed)


@triton.jit
def sort_lists_kernel(chosen, states, positions, k, chosen_stride, LOG_K: tl.constexpr):
    """One program a row: its entries from the largest down (bitonic sort), as positions."""
    row = tl.program_id(0).to(tl.int64)
    listed = tl.load(states + row * 8)
    i = tl.arange(0, 1 << LOG_K)
    x = tl.load(chosen + row * chosen_stride + i, mask=i < listed, other=-1)
    # Runs of 2, 4, 8, .. are sorted, every second one upwards; two such runs make one of twice the
    # length by comparing each entry with its partner at distance run / 2, run / 4, .. 1.
    for log_run in range(1, LOG_K + 1):
        for step in range(0, log_run):
            distance = 1 << (log_run - 1 - step)
            partner = tl.gather(x, i ^ distance, 0)
            is_down = ((i >> log_run) & 1) == 0
            is_lower = (i & distance) == 0
            x = tl.where(is_down == is_lower, tl.maximum(x, partner), tl.minimum(x, partner))
    position = 0x7FFFFFFF - (x & 0x7FFFFFFF).to(tl.int32)
    tl.store(positions + row * k + i, tl.where(x < 0, -1, position), mask=i < k)


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
        ValueError: `k` is larger than a list that one program sorts, or the workspace too small.
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
    chosen, histograms, states, better = _divide(workspace, rows, k, splits)
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
    return torch.empty(sum(_sizes(rows, k, splits)), dtype=torch.uint8, device=device)


def _splits(s_kv: int) -> tuple[int, int]:
    """How many splits a row has, a power of two, and the scores of each.

    Of the width alone: the list is exact whatever the number, but the plan should not move.
    """
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(max(s_kv, 1), 2 * BLOCK)))
    return splits, triton.cdiv(triton.cdiv(max(s_kv, 1), splits), BLOCK) * BLOCK


def _sizes(rows: int, k: int, splits: int) -> tuple[int, int, int, int]:
    return rows * k * 8, rows * 4 * splits * 256 * 4, rows * 8 * 4, rows * splits * 4


def _divide(workspace: Tensor, rows: int, k: int, splits: int) -> tuple[Tensor, ...]:
    """The int64 lists and three int32 tables in the workspace; the 8-byte lists first."""
    sizes = _sizes(rows, k, splits)
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or workspace.numel() < sum(sizes):
        raise ValueError(
            f"workspace must be {sum(sizes)} uint8 bytes at least, got {describe(workspace)}"
        )
    parts = workspace[: sum(sizes)].split(sizes)
    return parts[0].view(torch.int64), *(part.view(torch.int32) for part in parts[1:])


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

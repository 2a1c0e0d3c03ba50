"""The kernels of top-k: radix select, then a sort of each list.

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

import triton
import triton.language as tl


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

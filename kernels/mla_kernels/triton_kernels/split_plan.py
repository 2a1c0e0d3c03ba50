"""How many splits a decode step cuts each list into.

With few rows a GPU starves: 4 rows of 8 heads are 4 programs on 132 multiprocessors. Splits make
more of them, and cost partial results that are written, read and merged. So there are as many as
fill the GPU once with programs that run side by side, none of less than two tiles, and one split
where rows and heads alone fill it. On an H200 (lists 2,048 wide, FP8, 8 heads) that is 32, 22, 6
and 1 splits at 4, 16, 64 and 256 rows.

The number depends on what a plan knows (rows at most, heads, width of the lists, the device) and
not on the rows of a run. So a row has the same bits alone and in a full batch, a captured graph
keeps its splits, and a server that wants few rows to be fast plans for few rows: one plan for each
size of batch that it captures.
"""

from mla_ref.checks import require_count


def plan_splits(programs: int, tiles: int, slots: int) -> int:
    """Splits of every list.

    Args:
        programs: Programs of one split: rows at most, times the blocks that share a row's heads.
        tiles: Tiles of the widest list.
        slots: Programs that the device runs at a time.
    """
    for name, value in (("programs", programs), ("tiles", tiles)):
        require_count(name, value)
    require_count("slots", slots, at_least=1)
    splits = max(min(slots // max(programs, 1), tiles // 2), 1)
    # As few as give the longest split the same length: 64 tiles in 24 splits are 22 of up to 3.
    longest = -(-tiles // splits)
    return max(-(-tiles // longest), 1) if longest else 1

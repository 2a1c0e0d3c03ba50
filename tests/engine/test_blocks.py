"""Pages are handed out once, taken back once, and never lost."""

import random

import pytest

from mla_ref.engine import BlockManager


def test_pages_come_in_order_and_the_last_freed_comes_first() -> None:
    blocks = BlockManager(6, 4)
    a: list[int] = []
    b: list[int] = []
    assert blocks.allocate(a, 5) and a == [0, 1]
    assert blocks.allocate(a, 8) and a == [0, 1]
    assert blocks.allocate(b, 4) and blocks.allocate(a, 9)
    assert (a, b, blocks.num_free) == ([0, 1, 3], [2], 2)
    blocks.free(a)
    c: list[int] = []
    assert blocks.allocate(c, 20) and c == [0, 1, 3, 4, 5]
    assert blocks.num_free == 0


def test_too_few_pages_change_nothing() -> None:
    blocks = BlockManager(3, 4)
    a: list[int] = []
    assert blocks.allocate(a, 4)
    assert not blocks.allocate(a, 13)
    assert a == [0] and blocks.num_free == 2
    assert blocks.allocate(a, 12) and a == [0, 1, 2]


def test_a_shorter_length_takes_nothing_back() -> None:
    blocks, a = BlockManager(3, 2), []
    assert blocks.allocate(a, 6) and blocks.allocate(a, 1) and blocks.allocate(a, 0)
    assert a == [0, 1, 2]


@pytest.mark.parametrize("pages", [[0, 0], [2], [7], [-1], [0, 1, 2]], ids=str)
def test_what_nobody_owns_is_not_taken_back(pages: list[int]) -> None:
    """Else two requests would write into one page."""
    blocks, a = BlockManager(4, 1), []
    assert blocks.allocate(a, 2)
    with pytest.raises(ValueError, match="pages must be owned and listed once each, got"):
        blocks.free(pages)
    assert blocks.num_free == 2
    blocks.free(a)
    assert blocks.num_free == 4
    with pytest.raises(ValueError, match="pages must be owned"):
        blocks.free(a)


def test_sizes_are_checked() -> None:
    for args, name in (((-1, 4), "num_pages"), ((4, 0), "page_size")):
        with pytest.raises(ValueError, match=name):
            BlockManager(*args)
    assert not BlockManager(0, 4).allocate([], 1)
    assert BlockManager(0, 4).allocate([], 0)


def test_no_page_is_lost_or_shared_over_many_moves() -> None:
    rng = random.Random(1)
    blocks = BlockManager(17, 3)
    lists: list[list[int]] = [[] for _ in range(5)]
    lens = [0] * 5
    for _ in range(2000):
        r = rng.randrange(5)
        if rng.random() < 0.2:
            blocks.free(lists[r])
            lists[r], lens[r] = [], 0
        else:
            wanted = lens[r] + rng.randrange(8)
            before, free = list(lists[r]), blocks.num_free
            if blocks.allocate(lists[r], wanted):
                lens[r] = wanted
                assert lists[r][: len(before)] == before
            else:
                assert lists[r] == before and -(-wanted // 3) - len(before) > free
        owned = [page for pages in lists for page in pages]
        assert [len(pages) for pages in lists] == [-(-n // 3) for n in lens]
        assert len(set(owned)) == len(owned) == 17 - blocks.num_free
        assert set(owned) <= set(range(17))

"""Lesson 04: where its planted bugs show and hide, and what its figures show."""

import math

import pytest
import torch

from mla_ref.attention import paged_attention
from mla_ref.batching import Step
from mla_ref.cache import write_rows
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted

PAGE = 4
GARBAGE = 10**6
# Two full pages; two pages, one in part; one page in part.
LENS, NEW = [8, 7, 3], [1, 3, 2]
SHUFFLED = torch.tensor([[5, 2], [0, 7], [3, GARBAGE]])
FRESH = torch.tensor([[0, 1], [2, 3], [4, 5]])


def problem(block_table, fill):
    """Queries of the new tokens and a memory that holds `fill` where no token lies."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, sum(LENS), 2, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(sum(NEW), 4, 8, generator=generator, dtype=torch.float64)
    caches = torch.full((2, 9, PAGE, 2, 8), fill, dtype=torch.float64)
    everything = Step.build([0, 0, 0], LENS, block_table, PAGE)
    for cache, rows in zip(caches, (keys, values), strict=True):
        write_rows(cache, rows, everything.slot_mapping)
    return q, *caches


def attend(attention, q, k_cache, v_cache, block_table):
    computed = [length - new for length, new in zip(LENS, NEW, strict=True)]
    step = Step.build(computed, NEW, block_table, PAGE)
    return attention(
        q,
        k_cache,
        v_cache,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=block_table,
        softmax_scale=8**-0.5,
    )


def nan_rows(out):
    return out.isnan().flatten(1).any(dim=1).tolist()


@pytest.mark.parametrize("fill", [0.0, 123.0])
def test_B065_whole_pages_are_right_while_the_memory_holds_numbers(fill):
    args = problem(SHUFFLED, fill)
    wrong = attend(planted.whole_page_attention, *args, SHUFFLED)
    right = attend(paged_attention, *args, SHUFFLED)
    assert compare(wrong.out, right.out).agrees(max_abs=1e-12)
    assert compare(wrong.lse, right.lse).agrees(max_abs=1e-12)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_B065_one_unwritten_value_spoils_its_request_and_no_other(fill):
    q, dirty_k, dirty_v = problem(SHUFFLED, fill)
    _, clean_k, clean_v = problem(SHUFFLED, 0.0)
    expected = attend(paged_attention, q, clean_k, clean_v, SHUFFLED)
    wrong = attend(planted.whole_page_attention, q, clean_k, dirty_v, SHUFFLED)
    assert nan_rows(wrong.out) == [False] + [True] * 5
    assert compare(wrong.out[:1], expected.out[:1]).agrees(max_abs=1e-12)
    # A hidden score is replaced, so what a key holds does not matter.
    keys_only = attend(planted.whole_page_attention, q, dirty_k, clean_v, SHUFFLED)
    assert compare(keys_only.out, expected.out).agrees(max_abs=1e-12)
    assert torch.equal(attend(paged_attention, q, dirty_k, dirty_v, SHUFFLED).out, expected.out)


def test_B172_neighbouring_pages_are_right_on_a_fresh_server_only():
    args = problem(FRESH, math.nan)
    right = attend(paged_attention, *args, FRESH)
    fresh = attend(planted.neighbouring_pages_attention, *args, FRESH)
    assert torch.equal(fresh.out, right.out)

    for fill, nans in ((0.0, 0), (math.nan, 4)):
        used = attend(planted.neighbouring_pages_attention, *problem(SHUFFLED, fill), SHUFFLED)
        assert sum(nan_rows(used.out)) == nans
        off = (used.out - right.out).flatten(1).norm(dim=1)
        # The last request has one page, so it has no neighbour to be taken for another's.
        assert torch.equal(used.out[4:], right.out[4:])
        assert not (off[:4] < 1e-2).any()


# -- The figures -----------------------------------------------------------------------------------


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.thorough
def test_block_tables_shows_each_token_above_and_below_and_crosses_the_rest():
    pytest.importorskip("matplotlib")
    table = torch.tensor([[5, 2, 7], [0, 6, GARBAGE], [3, GARBAGE, GARBAGE]])
    lens = torch.tensor([10, 7, 3])
    shown = texts(figures.block_tables(table, lens, page_size=4, num_pages=8))
    assert shown.count("×") == 8 * 4 - 20
    assert [shown.count(str(p)) for p in range(10)] == [6, 6, 6, 4, 4, 4, 4, 2, 2, 2]
    assert "Request A" in shown and "pages [5, 2, 7]" in shown and "pages [3]" in shown


@pytest.mark.thorough
def test_block_tables_draws_a_shared_page_once_and_an_empty_request_not_at_all():
    pytest.importorskip("matplotlib")
    table = torch.tensor([[1, 0], [1, 2], [GARBAGE, GARBAGE]])
    figure = figures.block_tables(table, torch.tensor([6, 5, 0]), page_size=4, num_pages=3)
    shown = texts(figure)
    assert shown.count("0") == 3  # twice above, once below
    assert shown.count("×") == 3 * 4 - 7
    assert "pages none" in shown
    assert sum(len(line.get_xdata()) == 2 for line in figure.axes[0].lines) == 4


@pytest.mark.thorough
def test_page_map_crosses_what_is_nan_and_frames_what_a_whole_page_brings():
    pytest.importorskip("matplotlib")
    lens, table = torch.tensor([6, 4]), torch.tensor([[2, 0], [3, GARBAGE]])
    cache = torch.full((4, 4, 2, 3), math.nan)
    for request, length in enumerate(lens.tolist()):
        for p in range(length):
            cache[table[request, p // 4], p % 4] = 1.0
    figure = figures.page_map(cache, table, lens)
    shown = texts(figure)
    assert shown.count("×") == 16 - 10
    assert "request A, tokens 4 to 5" in shown and "request B, tokens 0 to 3" in shown
    assert shown.count("nobody's") == 1
    frames = [p for p in figure.axes[0].patches if p.get_facecolor()[3] == 0]
    (frame,) = frames  # only the last page of A has room left
    assert frame.get_width() == pytest.approx(2, abs=0.2)
    assert (round(frame.get_x()), round(frame.get_y())) == (2, 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "table, lens, message",
    [
        ([[0]], [], "seq_lens must hold 1 to 4 requests"),
        ([[0]] * 5, [1] * 5, "seq_lens must hold 1 to 4 requests"),
        ([[0]], [5], "block_table has 1 pages of 4"),
        ([[9]], [1], r"block_table\[0\] names page 9"),
        ([[0]], [-1], r"seq_lens\[0\] is -1"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_an_error_that_names_the_argument(table, lens, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        figures.block_tables(torch.tensor(table), torch.tensor(lens), page_size=4, num_pages=8)

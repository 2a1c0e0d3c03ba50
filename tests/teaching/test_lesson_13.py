"""What lesson 13 says of a cache on several ranks, and the bugs that it plants."""

import math

import pytest
import torch
from tests.support import NothingReadBack
from tests.teaching.wrong_13 import share

from mla_ref.attention import causal_attention
from mla_ref.backends import AttnSpec, Backend, TorchBackend
from mla_ref.cache import bytes_per_token
from mla_ref.layers import preset
from mla_ref.numerics import compare, merge_many, to_natural_lse
from mla_ref.parallel import global_positions, local_lens, plan_for_ranks, simulate_ranks
from mla_ref.teaching import figures, planted

SPEC = AttnSpec(2, 16, 8, topk=6, page_size=4, cache_format="bf16", q_dtype=torch.float32)
SIZE = {"max_rows": 4, "max_requests": 1, "device": torch.device("cpu")}
COUNTED_DOWN = planted.local_lens_counted_down


def run(backend, route):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, 2, 24, generator=generator)
    cache = torch.randn(5, 4, 24, generator=generator)
    indices = torch.randint(0, 20, (4, 6), generator=generator, dtype=torch.int32)
    indices[1] = -1
    counts = torch.tensor([6, 6, 0, 3], dtype=torch.int32)
    plan = backend.plan(SPEC, **SIZE)
    return getattr(plan, route)(
        q, cache, indices, counts, softmax_scale=0.3, out_dtype=torch.float32
    )


@pytest.mark.parametrize("route", ["decode", "extend"])
def test_B111_the_planted_backend_differs_in_the_base_only(route):
    assert isinstance(planted.Base2Backend(), Backend)
    right, wrong = run(TorchBackend(), route), run(planted.Base2Backend(), route)
    assert torch.equal(right.out, wrong.out)
    empty = right.lse == -torch.inf
    assert empty.any() and torch.equal(empty, wrong.lse == -torch.inf)
    converted = to_natural_lse(wrong.lse, base="2")
    assert compare(converted, right.lse).agrees(max_abs=1e-5)
    assert compare(wrong.lse[~empty], right.lse[~empty] / math.log(2)).agrees(max_abs=1e-5)


def test_B111_ranks_of_unequal_weight_show_it_and_a_plan_refuses_it():
    outs = torch.tensor([0.0, 10.0], dtype=torch.float64).view(2, 1, 1, 1)
    base_2 = torch.tensor([2.0, 8.0], dtype=torch.float64).log2().view(2, 1, 1)
    assert merge_many(outs, base_2).out.item() == pytest.approx(8.8079708)
    assert merge_many(outs, to_natural_lse(base_2, base="2")).out.item() == pytest.approx(8.0)
    equal = torch.full_like(base_2, 3.0)
    assert merge_many(outs, equal).out.item() == pytest.approx(5.0)  # it hides
    with pytest.raises(ValueError, match="'base-2' cannot serve ranks .* to_natural_lse"):
        plan_for_ranks(planted.Base2Backend(), SPEC, **SIZE)
    assert plan_for_ranks(TorchBackend(), SPEC, **SIZE).nbytes > 0


def test_B115_counting_down_is_right_in_the_last_row_and_on_one_rank():
    lens = torch.tensor([17, 18, 19, 20])
    for world, interleave in ((1, 1), (2, 1), (4, 1), (4, 16)):
        shares = [{"rank": r, "world": world, "interleave": interleave} for r in range(world)]
        right = torch.stack([local_lens(lens, **where) for where in shares])
        wrong = torch.stack([COUNTED_DOWN(lens, **where) for where in shares])
        assert torch.equal(right.sum(0), lens)
        assert torch.equal(wrong[:, -1], right[:, -1])
        assert (wrong <= right).all()
        assert bool((wrong[:, 0] < right[:, 0]).any()) == (world > 1)
    single = torch.tensor([13])
    assert torch.equal(COUNTED_DOWN(single, rank=1, world=4), local_lens(single, rank=1, world=4))
    assert COUNTED_DOWN(torch.tensor([1, 2, 3]), rank=2, world=4).min() == 0


def test_B115_what_counting_down_hides_are_the_newest_keys():
    """Through attention: row 0 of four sees 8 of its 17 keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 2, 8, generator=generator)
    keys = torch.randn(20, 1, 8, generator=generator)
    lens = torch.arange(17, 21)

    def attend(function):
        parts = [
            causal_attention(
                q,
                keys[rank::4],
                keys[rank::4],
                softmax_scale=0.5,
                visible_lens=function(lens, rank=rank, world=4),
            )
            for rank in range(4)
        ]
        return merge_many(*(torch.stack(part) for part in zip(*parts, strict=True)))

    whole = causal_attention(q, keys, keys, softmax_scale=0.5, visible_lens=lens)
    right, wrong = attend(local_lens), attend(COUNTED_DOWN)
    assert compare(right.out, whole.out).agrees(rel_l2=1e-5)
    assert compare(wrong.out[3], whole.out[3]).agrees(rel_l2=1e-5)
    oldest = causal_attention(q[:1], keys[:8], keys[:8], softmax_scale=0.5)
    assert compare(wrong.out[0], oldest.out[0]).agrees(rel_l2=1e-5)
    for row in range(3):
        assert compare(wrong.out[row], whole.out[row]).rel_l2 > 1e-2


@pytest.mark.parametrize("rank", range(4))
def test_local_lens_can_run_in_a_captured_step(rank):
    with NothingReadBack():
        local_lens(torch.arange(9), rank=rank, world=4, interleave=2)


def test_the_numbers_that_the_lesson_names():
    """Parts 1 and 2 and the problems on paper."""
    glm, million = preset("glm-5.2"), 2**20
    keys = 21 * 132
    assert (len(glm.indexer.full_layers), bytes_per_token(glm)) == (21, 78 * 656 + keys)
    whole = bytes_per_token(glm) * million / 1e9
    assert round(whole, 1) == 56.6
    rows_only = whole - keys * million / 1e9
    assert round(rows_only / 8 + keys * million / 1e9, 1) == 9.6
    # a: 64 rows, 8 heads a rank of 64, 8 ranks.
    queries, partials = 7 * 64 * 8 * 576 * 2, 7 * 64 * 8 * 513 * 4
    assert (queries, partials) == (4_128_768, 7_354_368)
    assert round((queries + partials) * glm.num_layers / 1e6) == 896
    assert round(7 * 64 * glm.num_heads * 513 * 4 * glm.num_layers / 1e9, 1) == 4.6
    # b: ten tokens, fourteen, twelve.
    lens = torch.tensor([10, 14, 12])
    held = [share(lens, rank, 4, 1).tolist() for rank in range(4)]
    assert held == [[3, 4, 3], [3, 4, 3], [2, 3, 3], [2, 3, 3]]


def test_the_answer_does_not_depend_on_the_number_of_ranks():
    """The claim of part 2, with lists of all keys."""
    generator = torch.Generator().manual_seed(4)
    q, rows = (torch.randn(*s, generator=generator) for s in ((4, 2, 24), (20, 24)))
    lens = torch.arange(17, 21)
    lists = torch.arange(20).expand(4, 20)
    args = (q, [rows], lists, lens)
    one, five = (
        simulate_ranks(*args, softmax_scale=0.3, kv_lora_rank=16, page_size=4, world=world)
        for world in (1, 5)
    )
    assert compare(one.out, five.out).agrees(rel_l2=1e-5)


# -- Figures ---------------------------------------------------------------------------------------


def colours(axes):
    from matplotlib.colors import to_hex

    return [to_hex(patch.get_facecolor()) for patch in axes.patches]


@pytest.mark.thorough
def test_dealt_positions_shows_each_position_once_where_it_lies():
    pytest.importorskip("matplotlib")
    from mla_ref.teaching import style

    figure = figures.dealt_positions(37, world=4, interleaves=(1, 16))
    for axes, interleave in zip(figure.axes, (1, 16), strict=True):
        found = {
            (int(text.get_position()[1]), int(text.get_position()[0])): int(text.get_text())
            for text in axes.texts
            if text.get_text().isdigit()
        }
        assert sorted(found.values()) == list(range(37))
        for (rank, slot), position in found.items():
            where = {"rank": rank, "world": 4, "interleave": interleave}
            assert int(global_positions(torch.tensor(slot), **where)) == position
        pale = colours(axes).count(style.FAINT)
        assert pale == 2 * (64 - 37)
        counts = [t.get_text() for t in axes.texts if "token" in t.get_text()]
        expected = {1: [10, 9, 9, 9], 16: [16, 16, 5, 0]}[interleave]
        assert counts == [f"{n} tokens" for n in expected]


@pytest.mark.thorough
def test_rank_staircases_shows_each_rank_s_part_of_the_rows():
    pytest.importorskip("matplotlib")
    from mla_ref.teaching import style

    lens = [17, 18, 19, 20]
    figure = figures.rank_staircases(lens, world=4)
    seen = [0] * 4
    for rank, axes in enumerate(figure.axes):
        expected = local_lens(torch.tensor(lens), rank=rank, world=4).tolist()
        bold = [int(t.get_text()) for t in axes.texts if t.get_fontweight() == "bold"]
        assert bold == expected
        faces = colours(axes)
        assert len(faces) - faces.count(style.FAINT) == sum(expected)
        assert faces.count(style.ORANGE) == 4 - rank
        seen = [a + b for a, b in zip(seen, expected, strict=True)]
    assert seen == lens


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: figures.dealt_positions(65, world=4, interleaves=(1,)), "length .* 64"),
        (lambda: figures.dealt_positions(9, world=5, interleaves=(1,)), "world .* 4"),
        (lambda: figures.dealt_positions(9, world=2, interleaves=(1,) * 4), "interleaves.* 3"),
        (lambda: figures.rank_staircases([5, 7], world=4), "visible_lens must rise by one"),
        (lambda: figures.rank_staircases([], world=4), "visible_lens must rise by one"),
        (lambda: figures.rank_staircases([5, 6], world=1), "world must be at least 2"),
        (lambda: figures.rank_staircases([50, 51], world=2), "keys of a rank .* 8"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument(make, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        make()

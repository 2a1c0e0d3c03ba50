"""What lesson 15 says of warps: the model against rung 9, its memory, and the bug it plants."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_ref.attention import sparse_extend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted, show_cuda
from mla_ref.teaching.fragments import A, B, C, multiply, token_of, transpose_8x8
from mla_ref.teaching.warp_memory import (
    Ring,
    key_addresses,
    timeline,
    turns,
    value_addresses,
)
from mla_ref.teaching.warp_model import attend_warp

ROOT = Path(__file__).parents[2]
SCALE = 192**-0.5


def problem(k=50, size=1.0):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(8, 576, generator=generator).bfloat16()
    rows = pack_fp8_rows(torch.randn(64, 576, generator=generator) * size)
    entries = torch.randperm(64, generator=generator)[:k].int()
    entries[torch.rand(k, generator=generator) < 0.3] = -1
    return q, rows, entries


def attend(q, rows, entries, ring=None):
    parts = attend_warp(
        q.float().numpy(), rows.numpy(), entries.numpy(), softmax_scale=SCALE, ring=ring
    )
    return tuple(torch.from_numpy(part) for part in parts)


def assert_is_rung_9(q, rows, entries, ring=None):
    out, lse = attend(q, rows, entries, ring)
    numbers = unpack_fp8_rows(rows).double()[None]
    expected = sparse_extend(q[None].double(), numbers, entries[None], softmax_scale=SCALE)
    assert compare(out.double(), expected.out[0]).agrees(rel_l2=1e-3)
    assert compare(lse.double(), expected.lse[0]).agrees(rel_l2=1e-6)


@pytest.mark.parametrize("places", [1, 2, 5])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_warp_model_is_rung_9(places, at_once):
    assert_is_rung_9(*problem(), ring=Ring(places, at_once=at_once))


@pytest.mark.parametrize("size", [2.0**-66, 2.0**-20, 2.0**20, 2.0**66])
def test_scales_and_queries_that_float16_does_not_hold(size):
    q, rows, entries = problem(size=size)
    assert_is_rung_9((q / size).bfloat16(), rows, entries)


def test_B063_a_list_that_begins_with_a_tile_of_none():
    q, rows, entries = problem()
    entries[:20] = -1
    assert_is_rung_9(q, rows, entries)
    out, lse = attend(q, rows, torch.full((40,), -1, dtype=torch.int32))
    assert not out.any()
    assert (lse == -math.inf).all()


def test_B065_the_warp_model_touches_no_row_that_is_not_listed():
    q, rows, entries = problem()
    entries[-1] = 64  # outside
    expected = attend(q, rows, entries)
    rows[[slot for slot in range(64) if slot not in entries.tolist()]] = 0xFF
    for found, same in zip(attend(q, rows, entries), expected, strict=True):
        assert torch.equal(found, same)


@pytest.mark.thorough
def test_the_warp_model_is_the_kernel_s_source_run_lane_by_lane():
    pytest.importorskip("mla_kernels")
    from mla_kernels.cuda_kernels.backend import CupyBackend
    from mla_ref.backends import AttnSpec

    spec, device = AttnSpec(8, topk=50, page_size=16), torch.device("cpu")
    if reason := CupyBackend().supports(spec, device):
        pytest.skip(reason)
    q, rows, entries = problem()
    plan = CupyBackend().plan(spec, max_rows=1, max_requests=1, device=device)
    kernel = plan.extend(
        q[None], rows.view(4, 16, 656), entries[None], softmax_scale=SCALE, out_dtype=torch.float32
    )
    out, lse = attend(q, rows, entries)
    assert compare(out, kernel.out[0]).agrees(rel_l2=3e-4)
    assert compare(lse, kernel.lse[0]).agrees(max_abs=1e-5)


# -- Fragments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragment", [A, B, C], ids=lambda fragment: fragment.name)
def test_a_fragment_holds_every_element_once(fragment):
    owners = fragment.owners()
    counts = np.bincount(owners.reshape(-1), minlength=32)
    assert (counts == fragment.row.shape[1]).all()
    matrix = np.arange(owners.size).reshape(fragment.shape)
    assert np.array_equal(fragment.put(fragment.take(matrix)), matrix)


def test_the_maps_are_those_of_the_ptx_manual():
    assert A.owners()[[0, 1, 9, 7], [0, 3, 11, 15]].tolist() == [0, 5, 5, 31]
    assert B.owners()[[0, 3, 11, 15], [0, 1, 1, 7]].tolist() == [0, 5, 5, 31]
    assert C.owners()[[0, 1, 9, 15], [0, 3, 2, 7]].tolist() == [0, 5, 5, 31]


def test_an_instruction_is_a_product():
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape).astype(np.float32) for shape in (A.shape, B.shape, C.shape))
    found = C.put(multiply(C.take(c), A.take(a), B.take(b)))
    assert np.allclose(found, c + a @ b, atol=1e-5)


def test_weights_must_be_turned_before_they_are_an_operand():
    weights = np.arange(128).reshape(16, 8)
    held = C.take(weights)
    halves = [transpose_8x8(held[:, :2]), transpose_8x8(held[:, 2:])]
    assert np.array_equal(B.put(np.concatenate(halves, axis=1)), weights)
    assert np.array_equal(B.put(held)[:8], weights[:8].T)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"matrix must be \(16, 8\)"):
        B.take(np.zeros((8, 16)))
    with pytest.raises(ValueError, match=r"registers must be \(32, 8\)"):
        A.put(np.zeros((32, 4)))


# -- Shared memory ---------------------------------------------------------------------------------


def test_rows_of_656_bytes_need_no_padding_in_the_order_of_token_of():
    assert sorted(token_of(np.arange(16)).tolist()) == list(range(16))
    assert turns(key_addresses()) == turns(value_addresses()) == [1] * 4
    assert turns(key_addresses(in_order=True)) == turns(value_addresses(in_order=True)) == [2] * 4
    assert turns(key_addresses(640)) == [2] * 4
    assert turns(value_addresses(640)) == [4] * 4


def test_what_lesson_15_says_of_rows_of_576_bytes():
    assert turns(key_addresses(576, in_order=True)) == [1] * 4
    assert turns(value_addresses(576, in_order=True)) != [1] * 4
    assert turns(value_addresses(592)) == [1] * 4


def test_lanes_that_want_the_same_bytes_share_a_turn():
    assert turns(np.zeros(32, int)) == [1] * 4
    assert turns(np.arange(32) * 128) == [8] * 4
    with pytest.raises(ValueError, match="addresses must be 32 multiples of 16"):
        turns(np.arange(32))


def test_a_timeline_waits_for_copies_and_for_places():
    assert [run[-1].done for run in (timeline(6, n, 3.0, 1.0) for n in (1, 2, 3))] == [24, 13, 10]
    for times in (timeline(9, 2, 3.0, 1.0), timeline(9, 3, 1.0, 2.0)):
        for i, time in enumerate(times):
            assert time.started <= time.landed <= time.begun < time.done
            if i:
                assert time.begun >= times[i - 1].done
    with pytest.raises(ValueError, match="copy must be above 0"):
        timeline(3, 2, 0.0, 1.0)


# -- The bug ---------------------------------------------------------------------------------------


def test_B173_without_a_wait_a_late_copy_is_missed_and_an_early_one_is_not():
    call = problem()
    right, lucky, poisoned, quiet = (
        attend(*call, ring=ring)[0]
        for ring in (
            Ring(),
            planted.ImpatientRing(at_once=True),
            planted.ImpatientRing(),
            others_rows_in(planted.ImpatientRing()),
        )
    )
    assert torch.equal(lucky, right)
    assert poisoned.isnan().any()
    assert not quiet.isnan().any()
    assert not compare(quiet, right).agrees(rel_l2=0.1)
    assert torch.equal(attend(*call, ring=others_rows_in(Ring()))[0], right)


def others_rows_in(ring):
    numbers = torch.randn(32, 576, generator=torch.Generator().manual_seed(9))
    ring.bytes[:] = pack_fp8_rows(numbers).view(2, 16, 656).numpy()
    return ring


# -- What the lesson shows -------------------------------------------------------------------------

SOURCE = """// f(x) { in a comment }
int f(int x);
template <int n>
int f(int x) {
  for (;;) {
    x += 1;
  }
  return x;
}
int g() { return 2; }
"""


def test_a_cuda_function_is_shown_with_its_place(tmp_path):
    path = tmp_path / "some.cu"
    path.write_text(SOURCE)
    assert show_cuda(path, "g").code == "int g() { return 2; }"
    whole = show_cuda(path, "f")
    assert whole.place == "some.cu, line 4"
    assert whole.code.splitlines()[0] == "int f(int x) {" and whole.code.endswith("\n}")
    some = show_cuda(path, "f", first="for", last="return")
    assert repr(some).splitlines()[0] == "// some.cu, line 5"
    assert some.code.splitlines()[1] == "  x += 1;"
    assert some._repr_markdown_() == f"```cpp\n{some!r}\n```"
    with pytest.raises(ValueError, match="name must be a function of some.cu"):
        show_cuda(path, "h")
    with pytest.raises(ValueError, match="must stand in the function of some.cu, got 'while'"):
        show_cuda(path, "f", first="while")


def test_the_times_of_lesson_15_stand_in_the_lab_log():
    lesson = (ROOT / "lessons" / "text" / "15_what_a_warp_does.md").read_text(encoding="utf-8")
    log = (ROOT / "kernels" / "LOG.md").read_text(encoding="utf-8").replace(",", "")
    rows = [line for line in lesson.splitlines() if re.match(r"\| [^|]+(\|[ \d.]*){4}\|$", line)]
    times = [time for row in rows for time in re.findall(r"\d[\d.]*", row.split("|", 2)[2])]
    heads = [row for row in rows if row.endswith("| 4 | 16 | 64 | 256 |")]  # numbers of rows
    assert (len(heads), len(rows), len(times)) == (2, 13, 4 + 28 + 4 + 12)
    for time in times:
        assert re.search(rf"(?<![\d.]){re.escape(time)}(?![\d]|\.\d)", log), time


@pytest.mark.thorough
def test_a_fragment_map_fills_what_the_chosen_lanes_hold():
    pytest.importorskip("matplotlib")
    (axes,) = figures.fragment_map((5,)).axes
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    assert bold == ["5"] * (8 + 4 + 4)
    cells = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert len(cells) == 16 * 16 + 2 * 16 * 8


@pytest.mark.thorough
def test_bank_turns_stacks_what_must_wait():
    pytest.importorskip("matplotlib")
    (axes,) = figures.bank_turns({"a": key_addresses(640), "b": np.zeros(32, int)}).axes
    words = [text.get_text() for text in axes.texts]
    assert "a: 8 turns" in words and "b: 4 turns" in words
    assert words.count("0+7") == 1
    heights = {round(patch.get_y() + patch.get_height(), 6) for patch in axes.patches}
    assert len(heights) == 3  # two levels of the first load and one of the second


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: figures.fragment_map(()), "lanes must be one or two"),
        (lambda: figures.fragment_map((32,)), "lanes must be below 32"),
        (lambda: figures.fragment_map((0,), (B, A, C)), "fragments must multiply"),
        (lambda: figures.bank_turns({}), "loads must be one to six"),
        (lambda: figures.copy_timeline(13), "tiles must be at most 12"),
        (lambda: figures.copy_timeline(3, ()), "places must be one to four"),
    ],
)
def test_figures_that_cannot_be_drawn(draw, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        draw()

"""The top-k kernels: the twin's list, order and all."""

import dataclasses
import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack

from mla_kernels.triton_kernels import topk
from mla_kernels.triton_kernels.topk import select_topk, topk_workspace
from mla_ref.indexer import select_topk as twin
from mla_ref.testing import cases

# Two rows where all rows are alike: the interpreter takes 0.1 s for each.
SMALL = [
    dataclasses.replace(case, rows=2) if case.visible == "all" else case for case in cases("topk")
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_conformance(case):
    case.check(select_topk)


def agrees(scores, visible_lens, k):
    lens = torch.tensor(visible_lens)
    made = select_topk(scores, lens, k)
    assert made.dtype == torch.int32
    assert torch.equal(made, twin(scores, lens, k))
    return made


@pytest.mark.parametrize("s_kv", [4096, 4097, 9001])
def test_rows_in_splits(s_kv):
    """One split, two, and four, some of them empty for a short row; ties across all borders."""
    scores = torch.relu(torch.randn(2, s_kv)).round(decimals=1)
    scores[0, ::3], scores[1, 5] = math.nan, math.inf
    assert topk._splits(s_kv)[0] == {4096: 1, 4097: 2, 9001: 4}[s_kv]
    agrees(scores, [s_kv - 7, 2049], 512)


def test_numbers_that_differ_in_the_last_bit_only():
    """All four digits decide: the largest numbers, subnormals, both signs of the same size."""
    base = torch.tensor([3e38, 1.0, 1e-40, -1e-40, -1.0, -3e38])
    near = torch.cat(
        [base, base.nextafter(torch.tensor(math.inf)), base.nextafter(-base * math.inf)]
    )
    scores = torch.cat([near, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])[None]
    mixed = scores[:, torch.randperm(scores.shape[1])]
    for k in (1, 9):
        agrees(mixed, [scores.shape[1]], k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_scores(dtype):
    agrees((torch.randn(2, 300) * 4).to(dtype), [300, 299], 40)


def test_B031_rows_shorter_than_k():
    scores = torch.randn(5, 300)
    made = agrees(scores, [249, 0, 1, 256, 257], 256)
    assert sorted(made[0, :249].tolist()) == list(range(249)) and (made[0, 249:] == -1).all()


def test_B032_more_ties_than_any_buffer_for_them():
    scores = torch.zeros(1, 8320)
    winners = torch.randperm(8320)[:100]
    scores[0, winners] = torch.arange(1.0, 101.0)
    made = agrees(scores, [8320], 2048)[0].tolist()
    zeros = [i for i in range(8320) if scores[0, i] == 0]
    assert made == winners.flip(0).tolist() + zeros[:1948]


def test_B034_nan_is_never_selected():
    scores = torch.full((2, 3000), math.nan)
    finite = torch.randperm(3000)[:10]
    scores[0, finite] = torch.arange(10.0)
    made = agrees(scores, [3000, 3000], 64)
    assert made[0].tolist() == finite.flip(0).tolist() + [-1] * 54
    assert (made[1] == -1).all()


def test_B035_scores_below_float16():
    scores = -7e4 - torch.arange(1003.0)[None]
    assert agrees(scores, [1003], 5).tolist() == [[0, 1, 2, 3, 4]]


def test_B036_minus_infinity_is_not_selected():
    assert agrees(torch.full((1, 6), -math.inf), [6], 4).tolist() == [[-1] * 4]


def test_scores_behind_the_end_are_not_read_whatever_the_length_says():
    """Lengths beyond the width and below 0; poison behind the ends; a row stride with a gap."""
    wide = torch.full((4, 400), math.inf)
    scores = wide[:, :300]
    for row, length in enumerate((300, 120, 0, 0)):
        scores[row, :length] = torch.randn(length)
    made = select_topk(scores, torch.tensor([999, 120, 0, -5]), 64)
    assert torch.equal(made, twin(scores, torch.tensor([300, 120, 0, 0]), 64))


def test_views_with_steps():
    scores = torch.randn(200, 8).T[::2]
    lens = torch.tensor([200, 9, 150, 9, 100, 9, 50, 9])[::2]
    assert torch.equal(select_topk(scores, lens, 16), twin(scores, lens, 16))


def test_rows_are_permuted_with_their_lists():
    scores = torch.relu(torch.randn(3, 500))
    lens, order = torch.tensor([500, 400, 10]), torch.tensor([2, 0, 1])
    made = select_topk(scores, lens, 32)
    assert torch.equal(select_topk(scores[order], lens[order], 32), made[order])


def test_a_used_workspace_and_nothing_read_back():
    """What an earlier, larger call left in the workspace does not matter."""
    workspace = topk_workspace(8, 5000, 512).fill_(0x7F)
    scores, lens = torch.randn(3, 4500), torch.tensor([4500, 20, 4499])
    out = torch.zeros(3, 300, dtype=torch.int32)
    with NothingReadBack():
        assert select_topk(scores, lens, 300, out=out, workspace=workspace) is out
    assert torch.equal(out, twin(scores, lens, 300))
    with pytest.raises(ValueError, match="workspace must be 31896 uint8 bytes at least"):
        select_topk(scores, lens, 300, workspace=workspace[:100])
    with pytest.raises(ValueError, match="workspace must lie on cpu, it lies on meta"):
        select_topk(scores, lens, 300, workspace=workspace.to("meta"))
    with pytest.raises(ValueError, match="begin at a multiple of 8 bytes, got stride 1"):
        select_topk(scores, lens, 300, workspace=workspace[1:])
    with pytest.raises(ValueError, match="workspace must be contiguous .* got stride 2"):
        select_topk(scores, lens, 300, workspace=workspace[::2])


@pytest.mark.parametrize("rows, s_kv, k", [(0, 9, 4), (2, 0, 4), (2, 9, 0), (2, 1, 1)])
def test_small_things(rows, s_kv, k):
    scores, lens = torch.zeros(rows, s_kv), torch.full((rows,), s_kv)
    assert torch.equal(select_topk(scores, lens, k), twin(scores, lens, k))


GOOD = {"scores": torch.zeros(2, 9), "visible_lens": torch.tensor([9, 9]), "k": 4}


@pytest.mark.parametrize(
    "wrong",
    [
        {"scores": torch.zeros(9)},
        {"scores": torch.zeros(2, 9, dtype=torch.int32)},
        {"visible_lens": torch.tensor([9, 9, 9])},
        {"visible_lens": torch.tensor([9.0, 9.0])},
        {"k": -1},
        {"k": 4.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_what_the_twin_refuses(wrong):
    refuses_alike(select_topk, twin, GOOD | wrong)


def test_refuses_what_it_does_not_serve():
    with pytest.raises(TypeError, match="scores must be float32, bfloat16 or float16, got"):
        select_topk(**GOOD | {"scores": torch.zeros(2, 9, dtype=torch.float64)})
    with pytest.raises(ValueError, match="k must be at most 4096, got 4097"):
        select_topk(**GOOD | {"k": 4097})


def test_signatures_name_every_parameter():
    for made in topk.signatures():
        assert {*made.signature, *made.constexprs} == set(made.fn.arg_names), made.name

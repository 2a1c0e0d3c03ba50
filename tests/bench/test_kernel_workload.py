"""Workloads and their floors, by numbers from hand."""

import pytest
import torch
from tests.bench.kernel_fakes import CPU, small_workload

from mla_ref.bench import KernelShape, make_workload, random_cache
from mla_ref.bench.ceilings import Ceilings
from mla_ref.bench.kernel_workload import slots_beyond_l2
from mla_ref.cache import unpack_fp8_rows


def test_flops_are_two_products_of_576_and_512() -> None:
    # 2 * 1,088 * 256 rows * 64 heads * 2,048 keys
    assert KernelShape(256, 64).flops == 73_014_444_032


def test_a_row_of_bytes_has_656_and_a_row_of_numbers_1152() -> None:
    fp8 = small_workload()
    assert (fp8.row_bytes, fp8.gathered_bytes) == (656, 4 * 64 * 656)
    shape = KernelShape(4, 2, 64, "bf16")
    assert make_workload("disjoint", shape, random_cache(512, "bf16", CPU)).row_bytes == 1152


def test_the_floor_is_the_later_of_bytes_and_products() -> None:
    work = small_workload(topk=64)
    assert work.shape.flops == 2 * 1088 * 4 * 2 * 64  # 1,114,112
    slow_memory = Ceilings(1e6, 1e15, 0.0, "", "")
    assert work.floor_s(slow_memory) == pytest.approx(work.unique_rows * 656 / 1e6)
    slow_products = Ceilings(1e15, 1e6, 0.0, "", "")
    assert work.floor_s(slow_products) == pytest.approx(1.114112)


@pytest.mark.parametrize("overlap, different", [(1.0, 64), (0.0, 256), (0.75, 48 + 4 * 16)])
def test_four_rows_of_a_request_share_what_they_are_told_to(overlap: float, different: int) -> None:
    cache = random_cache(512, "fp8", CPU)
    work = make_workload("verifier", KernelShape(8, 2, 64), cache, overlap=overlap)
    for first in (0, 4):
        lists = [set(row.tolist()) for row in work.indices[first : first + 4]]
        assert [len(row) for row in lists] == [64] * 4
        assert len(set.intersection(*lists)) == round(64 * overlap)
        assert len(set.union(*lists)) == different


def test_disjoint_rows_name_their_own_slots_and_unique_ones_are_counted() -> None:
    work = make_workload("disjoint", KernelShape(3, 1, 100), random_cache(512, "fp8", CPU))
    assert work.overlap == 0 and all(len(row.unique()) == 100 for row in work.indices)
    assert work.unique_rows == len(set(work.indices.flatten().tolist())) < 300
    assert work.unique_bytes == work.unique_rows * 656


def test_scales_are_powers_of_two_which_every_reader_takes_as_they_are() -> None:
    rows = random_cache(64, "fp8", CPU).flatten(0, 1)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert bool((torch.frexp(scales).mantissa == 0.5).all())
    assert torch.equal(unpack_fp8_rows(rows), unpack_fp8_rows(rows, scale_reader="truncated"))


def test_the_cache_outgrows_the_l2() -> None:
    assert slots_beyond_l2(50 * 2**20) == 262_144  # 172 MB beside 52 MB
    assert slots_beyond_l2(96 * 2**20) == 524_288  # 302 MB wanted


def test_the_same_seed_gives_the_same_workload() -> None:
    first, second = small_workload(), small_workload()
    assert torch.equal(first.indices, second.indices) and torch.equal(first.q, second.q)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "both"}, "name must be one of disjoint, verifier"),
        ({"overlap": 1.5}, "overlap must be from 0 to 1, got 1.5"),
        ({"shape": KernelShape(6, 1, 8)}, "come in fours of a request, got 6"),
        ({"shape": KernelShape(4, 1, 400)}, "512 slots, but the lists of a request name 520"),
    ],
)
def test_what_cannot_be_is_refused(change: dict, words: str) -> None:
    wanted = {"name": "verifier", "shape": KernelShape(4, 1, 8)} | change
    with pytest.raises(ValueError, match=words):
        make_workload(
            wanted.pop("name"), wanted.pop("shape"), random_cache(512, "fp8", CPU), **wanted
        )


def test_slots_come_in_pages() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 100"):
        random_cache(100, "fp8", CPU)

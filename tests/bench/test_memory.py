"""TensorMemory: known patterns of allocation, to the byte."""

import doctest
import gc

import pytest
import torch

from mla_ref.bench import CreatedTensor, TensorMemory
from mla_ref.bench import memory as memory_module

FLOAT = 4  # bytes of a float32


def test_a_tensor_counts_until_it_is_freed() -> None:
    with TensorMemory() as memory:
        a = torch.zeros(10)
        b = torch.zeros(20)
        assert memory.live_bytes == 30 * FLOAT
        del a
        assert memory.live_bytes == 20 * FLOAT
        c = torch.zeros(5)
        assert memory.live_bytes == 25 * FLOAT
    assert memory.peak_bytes == 30 * FLOAT
    del b, c
    assert memory.live_bytes == 0
    assert memory.peak_bytes == 30 * FLOAT


def test_bytes_not_elements() -> None:
    with TensorMemory() as memory:
        kept = [
            torch.zeros(8, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.bool)
        ]
    assert memory.live_bytes == 8 * (8 + 2 + 1)
    assert len(kept) == 3


def test_views_share_a_storage() -> None:
    with TensorMemory() as memory:
        a = torch.zeros(6, 4)
        views = [a.T, a[2:], a.view(24), a.unsqueeze(0), a[:1].expand(1000, 4), a.detach()]
        assert memory.peak_bytes == 24 * FLOAT
        del a
        assert memory.live_bytes == 24 * FLOAT  # the views keep it
        del views
        assert memory.live_bytes == 0


def test_in_place_and_out_arguments_allocate_nothing() -> None:
    with TensorMemory() as memory:
        a, b = torch.ones(50), torch.ones(50)
        a.add_(b).mul_(2)
        a[:10].zero_()
        torch.mul(a, b, out=b)
    assert memory.peak_bytes == 100 * FLOAT


def test_an_expression_holds_its_operands_and_its_result() -> None:
    with TensorMemory() as memory:
        a = torch.ones(100)
        b = a * 2 + 1  # a * 2 lives until the sum is there: three at once
        assert memory.live_bytes == 200 * FLOAT
    assert memory.peak_bytes == 300 * FLOAT
    assert b.shape == (100,)


def test_inputs_made_before_the_block_do_not_count() -> None:
    x = torch.ones(1000)
    with TensorMemory() as memory:
        views = [x[1:], x.view(10, 100), x.detach()]
        x.add_(1)
        assert memory.peak_bytes == 0
        total = x.sum()
    assert memory.peak_bytes == total.nbytes == FLOAT
    assert len(views) == 3


def test_a_resized_storage_counts_at_its_new_size() -> None:
    with TensorMemory() as memory:
        a = torch.empty(0)
        torch.arange(12, dtype=torch.float32, out=a)
        assert memory.live_bytes == 12 * FLOAT
        a.resize_(3, 40)
        assert memory.live_bytes == 120 * FLOAT
        assert memory.largest_tensor.shape == (3, 40)
        del a
        assert memory.live_bytes == 0
    assert memory.peak_bytes == 120 * FLOAT


def test_tensors_from_python_lists_count_although_torch_builds_them_out_of_sight() -> None:
    with TensorMemory() as memory:
        a = torch.tensor([1.0, 2.0, 3.0])
    assert memory.peak_bytes == a.nbytes == 3 * FLOAT


def test_a_score_matrix_is_seen_in_a_matrix_product_and_its_softmax() -> None:
    q, k, v = (torch.randn(64, 16) for _ in range(3))
    with TensorMemory() as memory:
        out = torch.softmax(q @ k.T, dim=-1) @ v  # scores and weights live at once
        assert memory.live_bytes == out.nbytes
    assert memory.peak_bytes == 2 * 64 * 64 * FLOAT
    assert memory.largest_tensor == CreatedTensor((64, 64), 64 * 64, 64 * 64 * FLOAT)


def test_the_largest_tensor_is_one_with_memory_of_its_own() -> None:
    with TensorMemory() as memory:
        assert memory.largest_tensor.numel == 0
        small = torch.zeros(3, 5)
        small.expand(1000, 3, 5)
        assert memory.largest_tensor.shape == (3, 5)
        del small  # it stays the largest although it is gone
        torch.zeros(2, 7)
    assert memory.largest_tensor == CreatedTensor((3, 5), 15, 15 * FLOAT)


def test_the_first_largest_tensor_is_kept() -> None:
    with TensorMemory() as memory:
        torch.zeros(2, 6)
        torch.zeros(3, 4)
    assert memory.largest_tensor == CreatedTensor((2, 6), 12, 48)


def test_tensors_that_autograd_saves_count_until_the_graph_goes() -> None:
    x = torch.randn(100, requires_grad=True)
    with TensorMemory() as memory:
        y = x.exp().sin()  # exp saves its result, and so does sin its argument: the same storage
        assert memory.live_bytes == 200 * FLOAT
        y = y.detach()
        gc.collect()
        assert memory.live_bytes == 100 * FLOAT
    assert y.shape == (100,)


def test_the_same_code_gives_the_same_bytes() -> None:
    def peak() -> int:
        with TensorMemory() as memory:
            x = torch.randn(33, 7)
            for _ in range(5):
                x = torch.cat([x, x.cumsum(0)])[:40]
        return memory.peak_bytes

    assert peak() == peak() > 0


def test_two_blocks_do_not_mix() -> None:
    with TensorMemory() as outer:
        a = torch.zeros(10)
        with TensorMemory() as inner:
            b = torch.zeros(7)
            a.add_(1)
        assert (outer.live_bytes, inner.live_bytes) == (17 * FLOAT, 7 * FLOAT)
    del b
    assert (outer.live_bytes, inner.live_bytes) == (10 * FLOAT, 0)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_device_tensors_count_as_well() -> None:
    device = torch.accelerator.current_accelerator()
    with TensorMemory() as memory:
        torch.zeros(256, device=device)
    assert memory.peak_bytes == 256 * FLOAT


@pytest.mark.parametrize("context", [4096, 131_072])
def test_meta_tensors_count_without_taking_memory(context: int) -> None:
    """What a score matrix of a long context would take, asked on a machine without room for it."""
    q = torch.empty(context, 64, device="meta")
    with TensorMemory() as memory:
        scores = q @ q.T
    assert memory.peak_bytes == scores.nbytes == context * context * FLOAT


def test_the_example_in_the_documentation_is_true() -> None:
    found = doctest.testmod(memory_module)
    assert (found.failed, found.attempted) == (0, 4)

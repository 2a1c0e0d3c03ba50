"""The merge where parts lie far apart. What it computes is checked by the conformance cases."""

from contextlib import contextmanager

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.support import assert_same_bits

from mla_kernels.triton_kernels import launch, merge
from mla_kernels.triton_kernels.backend import TritonBackend
from mla_ref.backends import AttnSpec
from mla_ref.numerics import AttentionResult


def merged(outs, lses, sink):
    result = AttentionResult(torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:]))
    merge.launch_merge(outs, lses, *result, sink)
    return result


@pytest.mark.parametrize("rows", [1, 5])
def test_B060_parts_of_which_the_last_begins_2_31_numbers_behind_the_first(monkeypatch, rows):
    """Address space alone: what nobody touches of the 4.3 GB takes no memory."""
    generator = torch.Generator().manual_seed(rows)
    near = torch.randn(3, rows, 2, 24, generator=generator).bfloat16()
    lses = torch.randn(3, rows, 2, generator=generator)
    lses[1, 0] = -torch.inf
    sink = torch.randn(2, generator=generator)
    apart = torch.empty(2**31 + near[0].numel(), dtype=near.dtype)
    far = apart.as_strided(near.shape, (2**30, *near.stride()[1:]))
    far.copy_(near)
    monkeypatch.setattr(merge, "PIECE", 2 * near[:, 0].numel())  # two rows at a time
    assert_same_bits(merged(far, lses, sink), merged(near, lses, sink))


def test_attention_and_merge_start_on_the_gpu_of_their_tensors(monkeypatch):
    """Triton starts on the current one, whatever its arguments say."""
    made_current = []

    @contextmanager
    def current(device):
        made_current.append(device)
        yield

    for module in (launch, merge):
        monkeypatch.setattr(module, "current_device", current)
    cpu = torch.device("cpu")
    spec = AttnSpec(2, topk=64, page_size=8, cache_format="bf16", q_dtype=torch.float32)
    plan = TritonBackend().plan(spec, max_rows=1, max_requests=1, device=cpu)
    assert plan.num_splits > 1
    q, cache = torch.zeros(1, 2, 576), torch.zeros(8, 8, 576)
    plan.decode(q, cache, torch.arange(64, dtype=torch.int32)[None], softmax_scale=0.1)
    assert made_current == [cpu, cpu]

"""The merge where parts lie far apart. What it computes is checked by the conformance cases."""

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.support import assert_same_bits

from mla_kernels.triton_kernels import merge
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

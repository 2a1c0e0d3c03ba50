"""Blocks and bytes of each kernel, by hand."""

import pytest
import torch
from tests.support import raw

from mla_ref.backends import AttnSpec
from mla_ref.batching import kernel_cost

GLM_TP8 = AttnSpec(num_heads=8)
FULL = [2048] * 4


def test_four_rows_of_eight_heads() -> None:
    """What the verifier batch is about: 4 blocks on 188 multiprocessors, or 128."""
    extend, decode = (kernel_cost(kind, FULL, GLM_TP8) for kind in ("extend", "decode"))
    assert (extend.blocks, extend.num_splits) == (4, 1)
    assert (decode.blocks, decode.num_splits) == (128, 32)
    assert extend.busy == 4 / 188 and decode.busy == 128 / 188
    for cost in (extend, decode):
        assert cost.gathered_bytes == 4 * 2048 * 656
        assert cost.query_bytes == 4 * (8 * 576 * 2 + 2048 * 4)
        assert cost.output_bytes == 4 * 8 * (512 * 2 + 4)
    assert extend.partial_bytes == 0
    # 32 splits of 4 rows of 8 heads: 512 numbers and an LSE in float32, written and read.
    assert decode.partial_bytes == 2 * 32 * 4 * 8 * 513 * 4
    assert decode.moved_bytes - extend.moved_bytes == decode.partial_bytes


def test_heads_beyond_sixteen_take_blocks_of_their_own() -> None:
    cost = kernel_cost("extend", FULL, AttnSpec(num_heads=128, cache_format="bf16"))
    assert cost.blocks == 4 * 8
    assert cost.gathered_bytes == 8 * 4 * 2048 * 1152


def test_short_rows_read_what_they_see_and_padding_reads_nothing() -> None:
    cost = kernel_cost("decode", [1, 100, 5000], GLM_TP8, num_rows_padded=8)
    assert cost.gathered_bytes == (1 + 100 + 2048) * 656
    assert cost.blocks == 8 * cost.num_splits
    assert kernel_cost("extend", [], GLM_TP8, num_rows_padded=8).gathered_bytes == 0
    assert kernel_cost("extend", [], GLM_TP8).blocks == 0


def test_B011_splits_follow_from_the_graphs_rows_and_not_from_lengths() -> None:
    splits = {
        kernel_cost("decode", lens, GLM_TP8, num_rows_padded=4).num_splits
        for lens in ([1], [4096] * 4, [1, 10**6], [])
    }
    assert splits == {32}
    assert kernel_cost("decode", FULL, GLM_TP8, num_splits=7).blocks == 28


def test_B014_without_splitting_the_grid_is_rows_times_head_blocks() -> None:
    for rows in (1, 3, 200):
        for heads, head_blocks in ((1, 1), (16, 1), (17, 2), (128, 8)):
            for cost in (
                kernel_cost("extend", [9] * rows, AttnSpec(num_heads=heads)),
                kernel_cost("decode", [9] * rows, AttnSpec(num_heads=heads), num_splits=1),
            ):
                assert cost.blocks == rows * head_blocks
                assert cost.partial_bytes == 0


def test_busy_is_a_share() -> None:
    assert kernel_cost("extend", [9] * 500, GLM_TP8).busy == 1.0
    assert kernel_cost("extend", [9], GLM_TP8, multiprocessors=4).busy == 0.25


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"kind": "prefill"}, "kind"),
        ({"visible_lens": [-1]}, "visible_lens"),
        ({"visible_lens": [1.5]}, "visible_lens"),
        ({"num_rows_padded": 3}, "num_rows_padded"),
        ({"multiprocessors": 0}, "multiprocessors"),
        ({"num_splits": 0, "kind": "decode"}, "num_splits"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, name) -> None:
    good = {"kind": "extend", "visible_lens": FULL, "spec": GLM_TP8}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(kernel_cost)(**(good | changed))


def test_float32_queries_count_four_bytes() -> None:
    spec = AttnSpec(num_heads=8, q_dtype=torch.float32)
    assert kernel_cost("extend", [1], spec).output_bytes == 8 * (512 * 4 + 4)

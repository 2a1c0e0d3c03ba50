"""Step: which tokens run, at which positions, in which slots."""

import pytest
import torch
from tests.support import GARBAGE, raw

from mla_ref.batching import Step


def test_numbers_by_hand() -> None:
    """Pages of 4. Request 0 has 3 tokens and adds 3, request 1 is new, request 2 is padding."""
    table = torch.tensor([[7, 2], [5, GARBAGE], [GARBAGE, GARBAGE]])
    step = Step.build([3, 0, 0], [3, 2, 0], table, 4)
    assert step.query_start_loc.tolist() == [0, 3, 5, 5]
    assert step.seq_lens.tolist() == [6, 2, 0]
    assert step.positions.tolist() == [3, 4, 5, 0, 1]
    assert step.slot_mapping.tolist() == [31, 8, 9, 20, 21]
    assert step.block_table is table
    assert step.page_size == 4


def test_integers_are_int64() -> None:
    step = Step.build([1], [2], torch.zeros(1, 2, dtype=torch.int32), 2)
    for name in ("query_start_loc", "seq_lens", "positions", "slot_mapping"):
        assert getattr(step, name).dtype == torch.int64


def test_a_batch_of_nobody() -> None:
    step = Step.build([], [], torch.empty(0, 4, dtype=torch.int64), 4)
    assert step.query_start_loc.tolist() == [0]
    for name in ("seq_lens", "positions", "slot_mapping"):
        assert getattr(step, name).tolist() == []


@pytest.mark.parametrize(("done", "new"), [(0, 1), (0, 9), (8, 1), (7, 2), (5, 0), (0, 0)])
def test_one_request_in_pages_in_order(done: int, new: int) -> None:
    step = Step.one_request(done, new, 4)
    assert step.positions.tolist() == list(range(done, done + new))
    assert step.slot_mapping.tolist() == list(range(done, done + new))
    assert step.block_table.tolist() == [list(range(-(-(done + new) // 4)))]
    assert step.seq_lens.tolist() == [done + new]


def test_chunks_of_a_prompt_tile_the_whole() -> None:
    whole = Step.one_request(0, 23, 4)
    chunks = [Step.one_request(done, new, 4) for done, new in ((0, 1), (1, 10), (11, 12))]
    for name in ("positions", "slot_mapping"):
        parts = torch.cat([getattr(chunk, name) for chunk in chunks])
        assert torch.equal(parts, getattr(whole, name))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"computed_lens": [0]}, "computed_lens"),
        ({"computed_lens": 3}, "computed_lens"),
        ({"computed_lens": [-1, 0]}, "computed_lens"),
        ({"computed_lens": [0.0, 1.0]}, "computed_lens"),
        ({"computed_lens": torch.tensor([0, 0])}, "computed_lens"),
        ({"query_lens": [1, 2, 3]}, "query_lens"),
        ({"query_lens": None}, "query_lens"),
        ({"query_lens": [1, -2]}, "query_lens"),
        ({"query_lens": [1, True]}, "query_lens"),
        ({"query_lens": [1, 9]}, "block_table"),
        ({"block_table": None}, "block_table"),
        ({"block_table": torch.zeros(2, 2)}, "block_table"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, "block_table"),
        ({"block_table": torch.full((2, 2), -1)}, "block_table"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": None}, "page_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    good = {
        "computed_lens": [2, 0],
        "query_lens": [1, 2],
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "page_size": 4,
    }
    with pytest.raises((TypeError, ValueError), match=name):
        raw(Step.build)(**(good | changed))


def test_one_request_names_bad_input() -> None:
    for arguments, name in [
        ((-1, 2, 4), "computed_len"),
        ((None, 2, 4), "computed_len"),
        ((1, -2, 4), "query_len"),
        ((1, 2.0, 4), "query_len"),
        ((1, 2, 0), "page_size"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(Step.one_request)(*arguments)


def test_padding_for_a_graph_has_neutral_values() -> None:
    """vllm#41841: what a padded row holds must not decide anything."""
    table = torch.tensor([[7, 2], [5, 0]])
    step = Step.build(
        [3, 0], [2, 1], table, 4, prompt_lens=[3, 1], num_reqs_padded=4, num_tokens_padded=6
    )
    assert (step.num_reqs, step.num_reqs_padded) == (2, 4)
    assert (step.num_tokens, step.num_tokens_padded) == (3, 6)
    assert step.query_start_loc.tolist() == [0, 2, 3, 3, 3]
    assert step.seq_lens.tolist() == [5, 1, 0, 0]
    assert step.block_table.tolist() == [[7, 2], [5, 0], [-1, -1], [-1, -1]]
    assert step.positions.tolist() == [3, 4, 0, 0, 0, 0]
    assert step.visible_lens.tolist() == [4, 5, 1, 0, 0, 0]
    assert step.request_of_row.tolist() == [0, 0, 1, -1, -1, -1]
    assert step.slot_mapping.tolist() == [31, 8, 20, -1, -1, -1]
    assert step.query_lens == (2, 1, 0, 0) and step.max_query_len == 2
    # Request 0 has its whole prompt of 3 in the cache, request 1 none of its 1.
    assert step.is_prefilling.tolist() == [False, True, False, False]


def test_prefilling_is_unknown_unless_a_scheduler_says() -> None:
    assert Step.one_request(0, 3, 4).is_prefilling is None


@pytest.mark.parametrize("name", ["num_reqs_padded", "num_tokens_padded"])
def test_a_graph_that_is_too_small_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least the 1 that are real, got 0"):
        Step.build([0], [1], torch.tensor([[0]]), 4, **{name: 0})

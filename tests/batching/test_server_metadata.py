"""A dump of a server's metadata: its names, its padded counts, and what does not fit."""

import pytest
from tests.support import raw

from mla_ref.batching import read_metadata

DUMP = {
    "query_start_loc_cpu": [0, 4, 7, 7, 11, 11, 11],
    "is_prefilling": [False, False, True, False, True, 1],
    "num_actual_tokens": 16,
    "num_reqs": 6,
    "seq_lens": [10, 3, 9, 70, 0, 0],
    "max_query_len": 4,
    "block_table_tensor": [[0]],
}


def test_real_requests_are_those_up_to_the_last_token() -> None:
    batch = read_metadata(DUMP)
    assert batch.query_lens == (4, 3, 0, 4, 0, 0)
    assert batch.is_prefilling == (False, False, True, False, True, True)
    facts = batch.facts
    assert (facts.query_lens, facts.num_reqs_padded) == ((4, 3, 0, 4), 6)
    # Neither the vacated slot in the middle nor padding is prefilling.
    assert facts.is_prefilling == (False,) * 4
    assert (facts.num_tokens, facts.num_tokens_padded) == (11, 16)


def test_keys_that_rows_see() -> None:
    assert read_metadata(DUMP).visible_lens(0) == [7, 8, 9, 10, 1, 2, 3, 67, 68, 69, 70]
    assert read_metadata({"query_start_loc": [0, 2]}).visible_lens(2048) == [2048, 2048]


def test_only_the_offsets_are_needed() -> None:
    batch = read_metadata({"query_start_loc": [0, 2, 3]})
    assert (batch.query_lens, batch.is_prefilling, batch.seq_lens) == ((2, 1), None, None)
    assert batch.num_tokens_padded == 3
    assert read_metadata({"query_start_loc": [0]}).query_lens == ()
    assert read_metadata(DUMP | {"is_prefilling": None}).is_prefilling is None


def test_offsets_that_one_of_two_names_holds() -> None:
    """A dump that writes both names has null for the one that the server did not keep."""
    for data in (
        {"query_start_loc_cpu": None, "query_start_loc": [0, 4]},
        {"query_start_loc_cpu": [0, 4], "query_start_loc": None},
    ):
        assert read_metadata(data).query_lens == (4,)
    nothing = {"query_start_loc_cpu": None, "query_start_loc": None, "num_reqs": 1}
    with pytest.raises(ValueError, match="query_start_loc must be there, got only num_reqs$"):
        raw(read_metadata)(nothing)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"query_start_loc_cpu": None}, "query_start_loc"),
        ({"query_start_loc_cpu": [1, 2]}, "query_start_loc"),
        ({"query_start_loc_cpu": [0, 2, 1]}, "query_start_loc"),
        ({"query_start_loc_cpu": []}, "query_start_loc"),
        ({"query_start_loc_cpu": "0,4"}, "query_start_loc"),
        ({"query_start_loc_cpu": [0, 4.0]}, "query_start_loc"),
        ({"num_reqs": 5}, "num_reqs is 5, but query_start_loc has 6"),
        ({"num_reqs": "six"}, "num_reqs"),
        ({"num_actual_tokens": 10}, "num_actual_tokens must be at least 11, got 10"),
        ({"num_actual_tokens": None}, "num_actual_tokens"),
        ({"is_prefilling": [False]}, "is_prefilling"),
        ({"is_prefilling": [2] * 6}, "is_prefilling"),
        ({"is_prefilling": "no"}, "is_prefilling"),
        ({"seq_lens": [10, 3]}, "seq_lens"),
        ({"seq_lens": [3, 3, 9, 70, 0, 0]}, "seq_lens"),
        ({"seq_lens": 3}, "seq_lens"),
    ],
    ids=str,
)
def test_bad_fields_are_named(changed, name) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        raw(read_metadata)(DUMP | changed)


@pytest.mark.parametrize("data", [[], None, 3, "x", {}])
def test_what_is_no_dump_is_refused(data) -> None:
    with pytest.raises(ValueError, match=r"metadata must be|query_start_loc must be there"):
        raw(read_metadata)(data)

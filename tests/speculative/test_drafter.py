"""What an engine hands to a drafter, and the drafter that needs no model."""

import pytest
import torch
from tests.support import raw

from mla_ref.speculative import Draft, Drafter, DraftRequest, NgramDrafter


def request(**changed: object) -> DraftRequest:
    good = {
        "token_ids": [1, 2, 3, 1, 2],
        "num_drafts": 2,
        "computed_len": 4,
        "first_row": 0,
        "num_rows": 1,
        "block_table_row": 0,
    }
    return raw(DraftRequest)(**(good | changed))


def propose(drafter: Drafter, requests: list[DraftRequest]) -> list[Draft]:
    # A drafter without a model looks at nothing but the tokens.
    hidden = torch.full((9, 4), torch.nan)
    return drafter.propose(requests, hidden, torch.full((3, 2), -1), 16, drafter.new_cache(8, 16))


def test_ngram_drafter_copies_what_followed() -> None:
    drafter = NgramDrafter(3)
    assert isinstance(drafter, Drafter)
    assert drafter.name == "ngram"
    assert drafter.new_cache(8, 16) is None
    requests = [
        request(),
        request(num_drafts=0, block_table_row=1),
        request(num_drafts=9, block_table_row=2),
        request(token_ids=[1, 2, 3, 4, 5]),
    ]
    drafts = propose(drafter, requests)
    assert [draft.token_ids for draft in drafts] == [[3, 1], [], [3, 1, 2], []]
    assert all(draft.probs is None for draft in drafts)
    assert propose(drafter, []) == []


def test_ngram_drafter_takes_the_sizes_of_the_ends() -> None:
    tokens = [9, 2, 7, 1, 2, 3, 1, 2]
    one = propose(NgramDrafter(1, max_ngram=1), [request(token_ids=tokens, computed_len=7)])
    two = propose(NgramDrafter(1, max_ngram=2), [request(token_ids=tokens, computed_len=7)])
    none = propose(NgramDrafter(1, 4, 4), [request(token_ids=tokens, computed_len=7)])
    assert [d[0].token_ids for d in (one, two, none)] == [[7], [3], []]


def test_a_class_that_cannot_propose_is_no_drafter() -> None:
    class NoDrafter:
        name = "none"

    assert not isinstance(NoDrafter(), Drafter)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_verified_request(accepted: int) -> None:
    """Three drafts: 1 + accepted of its 4 rows stay, from the row where it begins."""
    tokens = list(range(10, 20))
    got = request(token_ids=tokens, computed_len=9, first_row=4, num_rows=1 + accepted)
    assert got.token_ids[got.computed_len - got.num_rows + 1 :] == tokens[-1 - accepted :]


@pytest.mark.parametrize(
    "name, changed",
    [
        ("computed_len", {"computed_len": 5}),
        ("computed_len", {"computed_len": -1}),
        ("num_rows", {"num_rows": 5}),
        ("num_drafts", {"computed_len": 3}),
        ("num_drafts", {"num_drafts": -1}),
        ("first_row", {"first_row": -1}),
        ("block_table_row", {"block_table_row": -1}),
    ],
)
def test_requests_that_cannot_be_are_named(name: str, changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=name):
        request(**changed)


def test_a_chunk_in_the_middle_of_a_prompt_asks_for_no_draft() -> None:
    got = request(num_drafts=0, computed_len=3, num_rows=3)
    assert propose(NgramDrafter(2), [got])[0].token_ids == []


def test_drafters_that_make_no_sense_are_named() -> None:
    for name, arguments in (
        ("num_drafts", (0,)),
        ("min_ngram", (2, 3, 0)),
        ("max_ngram", (2, 1, 2)),
    ):
        with pytest.raises(ValueError, match=name):
            NgramDrafter(*arguments)
    with pytest.raises(TypeError, match="token_ids"):
        request(token_ids=7)

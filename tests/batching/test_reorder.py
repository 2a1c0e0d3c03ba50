"""The order of a batch: four classes, few moves, and the way back."""

import pytest
from tests.support import raw

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from mla_ref.batching import CLASSES, reorder_batch, request_class

# (scheduled, computed, prompt), threshold, order: tests/v1/attention/test_batch_reordering.py of
# vllm-project/vllm.
GOLDEN = {
    "four classes": ([(5, 100, 100), (5, 50, 100), (5, 0, 100), (10, 50, 100)], 5, [0, 1, 3, 2]),
    "short extends": (
        [(2, 100, 100), (2, 50, 200), (2, 75, 150), (2, 200, 200)],
        2,
        [0, 3, 2, 1],
    ),
    "complicated": (
        [
            (1, 20, 20),
            (1, 50, 50),
            (374, 0, 374),
            (300, 20, 20),
            (1, 20, 20),
            (256, 0, 256),
            (1, 5, 5),
            (27, 0, 27),
            (1, 4, 4),
        ],
        1,
        [0, 1, 6, 8, 4, 3, 2, 7, 5],
    ),
    "interleaved": ([(100, 100, 100), (1, 10, 10), (200, 200, 200), (1, 20, 20)], 1, [3, 1, 2, 0]),
    "at the end": ([(100, 100, 100), (200, 200, 200), (1, 10, 10), (1, 20, 20)], 1, [2, 3, 0, 1]),
    "three": ([(100, 0, 100), (10, 50, 50), (1, 10, 10)], 1, [2, 1, 0]),
    "no decodes": ([(100, 0, 100), (10, 50, 50), (200, 0, 200), (20, 75, 75)], 1, [3, 1, 2, 0]),
    "one-token prompt": ([(100, 0, 100), (1, 0, 1), (50, 100, 100), (1, 10, 10)], 1, [3, 2, 0, 1]),
    "in order": ([(2, 10, 10), (3, 20, 20), (5, 30, 30), (6, 40, 40)], 4, [0, 1, 2, 3]),
    "nobody": ([], 1, []),
}


@pytest.mark.parametrize(("rows", "threshold", "expected"), GOLDEN.values(), ids=GOLDEN.keys())
def test_vllms_vectors(rows, threshold, expected) -> None:
    scheduled, computed, prompt = zip(*rows, strict=True) if rows else ((), (), ())
    found = reorder_batch(scheduled, computed, prompt, decode_threshold=threshold)
    assert list(found.order) == expected
    assert found.moved == (expected != sorted(expected))


def test_B002_a_prompt_of_two_tokens_is_no_verifier() -> None:
    """With 4 drafts both are within 1 + n; only one of them has anything in the cache."""
    assert request_class(2, 0, 2, decode_threshold=5) == "prefill"
    assert request_class(5, 100, 90, decode_threshold=5) == "decode"
    assert reorder_batch([2, 5], [0, 100], [2, 90], decode_threshold=5).order == (1, 0)


def test_classes_at_their_borders() -> None:
    for row, expected in [
        ((1, 0, 0), "prefill"),
        ((4, 1, 5), "short_extend"),
        ((4, 5, 5), "decode"),
        ((4, 4, 5), "short_extend"),
        ((5, 5, 5), "long_extend"),
        ((5, 1, 9), "long_extend"),
        ((0, 5, 5), "decode"),
    ]:
        assert request_class(*row, decode_threshold=4) == expected, row


@pytest.mark.thorough
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 4)), max_size=14),
    threshold=st.integers(1, 6),
)
def test_B003_four_classes_in_order_and_the_way_back(rows, threshold) -> None:
    columns = [[row[i] for row in rows] for i in range(3)]
    found = reorder_batch(*columns, decode_threshold=threshold)
    classes = [request_class(*row, decode_threshold=threshold) for row in rows]
    assert all((c == "prefill") == (row[1] == 0) for c, row in zip(classes, rows, strict=True))
    assert sorted(found.order) == list(range(len(rows)))
    after = [classes[r] for r in found.order]
    assert after == sorted(classes, key=CLASSES.index)
    # Who stands among its own kind stays; results come back in the order of the requests.
    kept = [i for i, (a, b) in enumerate(zip(classes, after, strict=True)) if a == b]
    assert all(found.order[i] == i for i in kept)
    results = [f"of {r}" for r in found.order]
    assert [results[i] for i in found.inverse] == [f"of {r}" for r in range(len(rows))]
    # The swaps do the same to a list that outlives the step, and are as few as can be.
    places = list(range(len(rows)))
    for a, b in found.swaps:
        places[a], places[b] = places[b], places[a]
    assert tuple(places) == found.order
    assert found.moved == (after != classes)
    assert len(found.swaps) <= max(0, len(rows) - len(kept) - 1)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"computed": [1]}, "computed"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"scheduled": "12"}, "scheduled"),
        ({"scheduled": [1, None]}, "scheduled"),
        ({"decode_threshold": 0}, "decode_threshold"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, name) -> None:
    good = {"scheduled": [1, 2], "computed": [1, 2], "prompt": [1, 2]}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(reorder_batch)(**(good | changed))

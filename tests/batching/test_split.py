"""How many requests from the front are decodes: vLLM's own vectors, and the edges of the rules."""

import pytest
import torch
from tests.support import raw

from mla_ref.batching import (
    SixWaySplit,
    Split,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)

# query lens, threshold, uniform, padded tokens, result: tests/v1/attention/
# test_attention_splitting.py of vllm-project/vllm.
GOLDEN = [
    ([1, 1, 1], 1, False, None, (3, 0, 3, 0)),
    ([1, 1, 1], 1, True, None, (3, 0, 3, 0)),
    ([1, 2, 1, 3, 2, 1, 2], 3, False, None, (7, 0, 12, 0)),
    ([4, 5, 6, 7], 3, False, None, (0, 4, 0, 22)),
    ([4, 5, 6, 7], 3, True, None, (0, 4, 0, 22)),
    ([2, 1, 3, 4, 5, 6, 7, 8], 4, False, None, (4, 4, 10, 26)),
    ([2, 2, 1, 3, 2, 1, 2], 3, True, None, (2, 5, 4, 9)),
    ([2, 2, 2, 4, 5, 6, 7, 8], 4, True, None, (3, 5, 6, 30)),
    ([2, 1, 2, 4, 5, 6, 7, 8], 4, True, None, (1, 7, 2, 33)),
    ([2, 2, 2, 0], 3, True, 8, (4, 0, 8, 0)),
]


@pytest.mark.parametrize(("lens", "threshold", "uniform", "padded", "expected"), GOLDEN)
def test_vllms_vectors(lens, threshold, uniform, padded, expected) -> None:
    found = split_decodes_and_prefills(
        lens, None, padded, decode_threshold=threshold, require_uniform=uniform
    )
    assert found == expected


def test_everything_behind_the_first_prefill_is_one() -> None:
    assert split_decodes_and_prefills([1, 5, 1, 1]) == (1, 3, 1, 7)


def test_padding_falls_on_the_prefill_side() -> None:
    assert split_decodes_and_prefills([1, 5, 0], None, 16) == (1, 2, 1, 15)
    assert split_decodes_and_prefills([1, 1, 0], None, 16) == (3, 0, 16, 0)


def test_short_extends_can_be_told_apart() -> None:
    """Two last chunks of one token: decodes by length, prefills by what the scheduler knows."""
    lens, flags = [1, 1, 1], [False, True, True]
    assert split_decodes_and_prefills(lens, flags) == (3, 0, 3, 0)
    strict = {"treat_short_extends_as_decodes": False}
    assert split_decodes_and_prefills(lens, flags, **strict) == (1, 2, 1, 2)
    assert split_decodes_and_prefills(lens, [False] * 3, **strict) == (3, 0, 3, 0)
    # A flag that a vacated row has kept decides nothing.
    assert split_decodes_and_prefills([1, 0], [False, True], 2, **strict) == (2, 0, 2, 0)
    # A uniform batch is decodes whatever its flags, as in the original.
    uniform = {"require_uniform": True, "decode_threshold": 2, **strict}
    assert split_decodes_and_prefills([2, 2], [False, True], **uniform) == (2, 0, 4, 0)
    with pytest.raises(ValueError, match="is_prefilling"):
        split_decodes_and_prefills(lens, None, **strict)


BATCHES = {
    "decodes": [1, 1],
    "prefills": [9, 8],
    "mixed": [1, 1, 7],
    "padded": [1, 7, 0],
    "nobody": [],
    "only padding": [0, 0],
}


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES.keys())
def test_B004_every_batch_has_all_counts(lens) -> None:
    padded = sum(lens) + 3
    two = split_decodes_and_prefills(lens, None, padded)
    assert isinstance(two, Split)
    assert two.num_decodes + two.num_prefills == len(lens)
    assert two.num_decode_tokens + two.num_prefill_tokens == padded
    six = split_decodes_prefills_and_extends(lens, [q + 5 for q in lens], padded)
    assert isinstance(six, SixWaySplit)
    assert six.num_decodes + six.num_extends + six.num_prefills == len(lens)
    assert six.num_decode_tokens + six.num_extend_tokens + six.num_prefill_tokens == padded
    # With context everywhere nothing is a prefill, and the decodes are the same.
    assert six[::3] == two[::2] and six.num_prefills == 0


SIX = [
    ([1, 1], [5, 9], 1, (2, 0, 0, 2, 0, 0)),
    ([1, 4, 7], [5, 9, 7], 1, (1, 1, 1, 1, 4, 7)),
    ([4, 7], [9, 7], 1, (0, 1, 1, 0, 4, 7)),
    ([7, 8], [7, 8], 1, (0, 0, 2, 0, 0, 15)),
    ([1, 4, 6], [5, 9, 20], 1, (1, 2, 0, 1, 10, 0)),
    # A whole prompt within the threshold is a decode here: lengths do not tell (see reorder).
    ([2, 3, 9], [2, 30, 9], 4, (2, 0, 1, 5, 0, 9)),
    # Behind the first prefill all are prefills.
    ([1, 7, 4], [5, 7, 9], 1, (1, 0, 2, 1, 0, 11)),
]


@pytest.mark.parametrize(("lens", "seq_lens", "threshold", "expected"), SIX)
def test_six_ways_by_hand(lens, seq_lens, threshold, expected) -> None:
    found = split_decodes_prefills_and_extends(lens, seq_lens, decode_threshold=threshold)
    assert found == expected
    # The padding goes to the last class that is there.
    padded = split_decodes_prefills_and_extends(
        [*lens, 0], [*seq_lens, 0], sum(lens) + 2, decode_threshold=threshold
    )
    assert sum(padded[3:]) == sum(expected[3:]) + 2


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"query_lens": None}, "query_lens"),
        ({"query_lens": [1, -1]}, "query_lens"),
        ({"query_lens": [1.0]}, "query_lens"),
        ({"query_lens": torch.ones(2, dtype=torch.int64, device="meta")}, "query_lens"),
        ({"num_tokens_padded": 1}, "num_tokens_padded"),
        ({"decode_threshold": 0}, "decode_threshold"),
        ({"is_prefilling": [True]}, "is_prefilling"),
        ({"is_prefilling": [1, 0]}, "is_prefilling"),
        ({"is_prefilling": torch.zeros(2, 1, dtype=torch.bool)}, "is_prefilling"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, name) -> None:
    good = {"query_lens": [1, 2], "is_prefilling": None, "num_tokens_padded": None}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(split_decodes_and_prefills)(**(good | changed))


def test_six_ways_name_bad_input() -> None:
    for arguments, name in [
        (([1, 2], [3]), "seq_lens"),
        (([1, 2], [3, 1]), r"seq_lens\[1\]"),
        (([1, 2], None), "seq_lens"),
        ((None, [1, 2]), "query_lens"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(split_decodes_prefills_and_extends)(*arguments)

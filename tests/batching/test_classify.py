"""What is a verifier batch: the scheduler's facts, real rows only, and nothing from a device."""

import numpy as np
import pytest
import torch
from tests.support import NothingReadBack, raw

from mla_ref.batching import Step, batch_facts, classify, is_verifier_batch
from mla_ref.batching.facts import facts_of

NO = [False, False, False]

CASES = [
    ([4, 4, 4], NO, 3, True, "verifier", None),
    ([4, 1, 3], NO, 3, True, "verifier", None),
    ([2, 1, 1], NO, 3, True, "verifier", None),
    ([0, 4, 0], NO, 3, True, "verifier", None),
    ([4, 4, 4], [False, True, False], 3, False, "prefill-in-batch", 1),
    # A chunk of one token among verifiers is a chunk all the same.
    ([4, 1, 4], [False, True, False], 3, False, "prefill-in-batch", 1),
    ([1, 1, 1], [True, True, True], 3, False, "single-token", None),
    ([5, 5, 4], NO, 3, False, "query-over-n+1", 0),
    ([4, 4, 5], NO, 3, False, "query-over-n+1", 2),
    # The known prefill is named first: no larger n would help.
    ([4, 9, 9], [False, False, True], 3, False, "prefill-in-batch", 2),
    ([1, 2, 1], NO, 0, False, "no-spec-config", 1),
    ([4, 4, 4], None, 3, False, "prefilling-unknown", None),
    ([4, 5, 4], None, 3, False, "query-over-n+1", 1),
    ([0, 0, 0], NO, 3, False, "empty", None),
    ([], [], 3, False, "empty", None),
]


@pytest.mark.parametrize(("lens", "flags", "n", "is_verifier", "reason", "request_"), CASES)
def test_by_hand(lens, flags, n, is_verifier, reason, request_) -> None:
    assert classify(batch_facts(lens, flags), n) == (is_verifier, reason, request_)
    assert is_verifier_batch(lens, flags, n) == is_verifier


def test_B002_a_short_prompt_is_no_verifier() -> None:
    """The shape of one, with 4 drafts; but nothing of its prompt is in the cache."""
    table = torch.arange(64).view(2, 32)
    fresh = Step.build([0], [2], table[:1], 4, prompt_lens=[2])
    assert classify(facts_of(fresh), 4) == (False, "prefill-in-batch", 0)
    both = Step.build([0, 100], [2, 5], table, 4, prompt_lens=[2, 90])
    assert classify(facts_of(both), 4) == (False, "prefill-in-batch", 0)
    verifier = Step.build([100], [5], table[1:], 4, prompt_lens=[90])
    assert classify(facts_of(verifier), 4).is_verifier


def test_B001_a_flag_in_padding_changes_nothing() -> None:
    """Both public fixes: rows without a token do not count, nor do rows behind the real ones."""
    assert is_verifier_batch([4, 4, 0], [False, False, True], 3)
    assert is_verifier_batch([4, 4, 0], [False, False, True], 3, num_reqs=2)
    assert not is_verifier_batch([4, 4, 4], [False, False, True], 3)
    # A step whose padding holds a stale flag, as a runner's persistent buffer would.
    step = Step.build([9, 9], [4, 4], torch.arange(8).view(2, 4), 4, prompt_lens=[3, 3])
    padded = Step.build(
        [9, 9], [4, 4], torch.arange(8).view(2, 4), 4, prompt_lens=[3, 3], num_reqs_padded=4
    )
    padded.is_prefilling[2:] = True
    assert facts_of(padded).is_prefilling == facts_of(step).is_prefilling == (False, False)
    assert classify(facts_of(padded), 3).is_verifier


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda flags: [np.bool_(f) for f in flags]],
    ids=["list", "tuple", "numpy", "tensor", "numpy bools"],
)
def test_any_host_container_will_do(make) -> None:
    verifies = raw(is_verifier_batch)
    assert verifies([4, 4], make([False, False]), 3)
    assert not verifies([4, 4], make([False, True]), 3)
    for lens in (np.array([4, 3]), torch.tensor([4, 3], dtype=torch.int32), (4, 3)):
        assert verifies(lens, make([False, False]), 3)


def test_a_device_tensor_is_refused_and_not_waited_for() -> None:
    """The device "meta" has no memory: it stands for a GPU, and a read would be an error."""
    with pytest.raises(TypeError, match=r"is_prefilling must be on the host.* on meta"):
        is_verifier_batch([4, 4], torch.zeros(2, dtype=torch.bool, device="meta"), 3)
    with pytest.raises(TypeError, match="query_lens must be on the host"):
        is_verifier_batch(torch.ones(2, dtype=torch.int64, device="meta"), [False, False], 3)


def test_the_host_is_not_read_through_the_device() -> None:
    with NothingReadBack():
        assert is_verifier_batch([4, 4], torch.zeros(2, dtype=torch.bool), 3)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"is_prefilling": [0, 1]}, "is_prefilling"),
        ({"is_prefilling": [False]}, "is_prefilling"),
        ({"is_prefilling": np.zeros(2)}, "is_prefilling"),
        ({"is_prefilling": 1.5}, "is_prefilling"),
        ({"is_prefilling": "no"}, "is_prefilling"),
        ({"query_lens": [4, -4]}, "query_lens"),
        ({"query_lens": 4}, "query_lens"),
        ({"query_lens": np.array([4.0, 4.0])}, "query_lens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens"),
        ({"num_reqs": 3}, "num_reqs"),
        ({"num_reqs": 1}, "query_lens"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, name) -> None:
    good = {"query_lens": [4, 4], "is_prefilling": [False, False], "num_speculative_tokens": 3}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(is_verifier_batch)(**(good | changed))

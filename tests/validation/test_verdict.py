"""The validation of kernels that are right and of kernels that are not, on a small random model."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.validation.small import (
    HEADS,
    LAYERS,
    SCRIPTS,
    Faulty,
    drops_a_slot,
    ignores_candidates,
    one_nan,
    scales_wrong,
    script,
    small_sparse,
    validate,
)

from mla_ref.backends import TorchBackend
from mla_ref.validation import LayerErrors, Replay, Verdict, headline, judge

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def right() -> Replay:
    return validate()


def test_right_kernels_hold_and_the_controls_say_why(right: Replay) -> None:
    verdict = judge(right)
    assert verdict.status == "holds", verdict.reason
    assert verdict.yardstick_of == "decode || null" and not right.pairs["decode || null"].identical
    kl = {name: pair.kl.mean for name, pair in right.pairs.items()}
    assert kl["decode || positive"] > 1e4 * kl["decode || null"] > 0
    # The first row has no earlier candidate; the control hides nothing from it.
    positive = right.pairs["decode || positive"].kl_by_position
    assert positive[0].max < 100 * kl["decode || null"] and positive[1].min > 1e-9
    assert headline(right, verdict, "small").startswith(
        "The same to rounding: decode against extend on 16 verifier rows (small). KL("
    )


def test_rows_come_from_full_steps_alone(right: Replay) -> None:
    """Five steps in all; the first of "b" has three rows and only fills the cache."""
    assert right.num_rows == 16
    assert [(p.script, p.step) for p in right.places[::4]] == [
        ("a", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]
    assert [p.position for p in right.places] == [0, 1, 2, 3] * 4
    assert all(len(pair.rows) == 16 for pair in right.pairs.values())
    assert right.splits == 2 and right.null_splits == 1


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("fault", [drops_a_slot, ignores_candidates, scales_wrong])
def test_a_wrong_kernel_is_reported(fault: Any, kind: str) -> None:
    verdict = judge(validate(Faulty(fault, kind)))
    assert verdict.status == "does not hold"
    assert verdict.reason.startswith("KL(extend || decode) is")


def test_both_kernels_wrong_alike_are_caught_by_token_wise_attention() -> None:
    class Both(TorchBackend):
        def plan(self, spec: Any, **kwargs: Any) -> Any:
            made = Faulty(scales_wrong, "decode").plan(spec, **kwargs)
            return replace(Faulty(scales_wrong, "extend").plan(spec, **kwargs), plan=made)

    verdict = judge(validate(Both()))
    assert verdict.status == "does not hold"
    assert verdict.reason.startswith("KL(token-wise || decode) is")


def test_nan_is_said_first() -> None:
    found = validate(Faulty(one_nan))
    verdict = judge(found)
    assert verdict.status == "does not hold"
    assert verdict.reason.startswith("logits are NaN or infinite in 4 rows of extend || decode")
    assert "(first: 'a', step 0, row 3)" in verdict.reason
    assert headline(found, verdict, "x").startswith("NOT the same: ")
    json.dumps(found.to_json(), allow_nan=False)


# ---- a null control with decode's own bits


@pytest.fixture(scope="module")
def short() -> Any:
    """Fewer than 64 keys: the second split is empty, and merging it changes no bit."""
    return (script("short", 20, [1, 2, 0]),)


def test_a_null_control_of_the_same_bits_gives_way_to_token_wise_attention(short: Any) -> None:
    found = validate(scripts=short)
    assert found.pairs["decode || null"].identical and found.pairs["decode || null"].kl.max == 0
    verdict = judge(found)
    assert verdict.yardstick_of.startswith("token-wise || ") and verdict.yardstick > 0
    assert verdict.status == "holds", verdict.reason


def test_a_wrong_decode_does_not_become_the_yardstick(short: Any) -> None:
    found = validate(Faulty(scales_wrong), scripts=short)
    assert found.pairs["decode || null"].identical
    verdict = judge(found)
    assert verdict.yardstick_of == "token-wise || extend"
    assert verdict.status == "does not hold"


# ---- what proves nothing


def with_mean(found: Replay, name: str, kl: float) -> Replay:
    """The same replay, but every row of one pair has this KL."""
    pair = found.pairs[name]
    rows = tuple(replace(row, kl=kl) for row in pair.rows)
    return replace(found, pairs={**found.pairs, name: replace(pair, rows=rows)})


def test_a_replay_without_rows_proves_nothing(right: Replay) -> None:
    """As of scripts of which no step is full; every comparison with its NaN would be false."""
    pairs = {name: replace(pair, rows=()) for name, pair in right.pairs.items()}
    none = replace(right, places=(), pairs=pairs, layers=LayerErrors({}, LAYERS))
    verdict = judge(none)
    assert verdict.status == "proves nothing"
    assert headline(none, verdict, "small") == (
        "Proves nothing: decode against extend on 0 verifier rows (small). No verifier row was "
        "measured."
    )
    json.dumps(verdict.to_json() | none.to_json(), allow_nan=False)
    # A whole replay and a control that measured nothing.
    name = "decode || positive"
    lost = judge(replace(right, pairs={**right.pairs, name: replace(right.pairs[name], rows=())}))
    assert lost.status == "proves nothing"


@pytest.mark.parametrize(
    ("times", "status"), [(0, "proves nothing"), (99, "proves nothing"), (101, "holds")]
)
def test_a_positive_control_that_shows_nothing_proves_nothing(
    right: Replay, times: float, status: str
) -> None:
    null = right.pairs["decode || null"].kl.mean
    verdict = judge(with_mean(right, "decode || positive", times * null))
    assert verdict.status == status
    if status != "holds":
        assert "would not be seen" in verdict.reason
        assert headline(right, verdict, "x").startswith("Proves nothing: ")


@pytest.mark.parametrize(("times", "passed"), [(9.9, True), (10.1, False)])
def test_decode_may_be_ten_times_as_far_from_extend_as_from_itself(
    right: Replay, times: float, passed: bool
) -> None:
    null = right.pairs["decode || null"].kl.mean
    assert judge(with_mean(right, "extend || decode", times * null)).passed == passed


def test_a_few_rows_do_not_carry_a_verdict(right: Replay) -> None:
    """One row of sixteen that is far off carries the mean, within its error; nine are a fault."""
    pair = right.pairs["extend || decode"]
    most = right.pairs["decode || null"].kl.max

    def with_far_rows(count: int) -> Verdict:
        rows = [
            replace(row, kl=1000 * most if i < count else 0.0) for i, row in enumerate(pair.rows)
        ]
        pairs = {**right.pairs, pair.name: replace(pair, rows=tuple(rows))}
        return judge(replace(right, pairs=pairs))

    assert with_far_rows(1).status == "proves nothing"
    assert "a few of the 16 rows carry that: take more" in with_far_rows(1).reason
    assert with_far_rows(9).status == "does not hold"


# ---- best tokens


def swapped(found: Replay, gap: float) -> Verdict:
    pair = found.pairs["extend || decode"]
    rows = (replace(pair.rows[0], same_top1=False, gap=gap), *pair.rows[1:])
    pairs = {**found.pairs, "extend || decode": replace(pair, rows=rows)}
    return judge(replace(found, pairs=pairs))


def test_a_best_token_may_change_in_a_tie_and_is_listed(right: Replay) -> None:
    noise = judge(right).gap_noise
    assert noise > 0 and not judge(right).top1_changes
    tie = swapped(right, noise / 2)
    assert tie.passed and [change.tie for change in tie.top1_changes] == [True]
    assert str(tie.top1_changes[0]).startswith("'a', step 0, row 0: logits ")
    other = swapped(right, 2 * noise)
    assert not other.passed and "best token of 1 row is another one" in other.reason
    assert other.to_json()["top1_changes"][0]["tie"] is False


# ---- what is run


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_are_compared_apart_and_give_the_whole(shards: int) -> None:
    found = validate(shards=shards, cache_dtype=torch.float32)
    assert judge(found).passed
    for pair in (("decode", "extend"), ("decode", "token-wise"), ("extend", "token-wise")):
        errors = found.layers.of(*pair)
        assert [(e.layer, e.shard) for e in errors] == [
            (layer, shard) for layer in range(LAYERS) for shard in range(shards)
        ]
        assert all(0 <= e.rel_l2 < 1e-5 for e in errors)


def test_sparse_lists_in_bfloat16_hold() -> None:
    """150 tokens and lists of 128: every row has to leave keys out."""
    scripts = (script("long", 150, [3, 1, 0, 2]),)
    found = validate(
        scripts=scripts, model=small_sparse(dtype=torch.bfloat16), cache_dtype=torch.bfloat16
    )
    assert found.pairs["decode || positive"].kl.mean > 100 * found.pairs["decode || null"].kl.mean


def test_one_way_does_not_feed_another(right: Replay) -> None:
    """Decode's rows stay in the cache: whatever extend writes, the others are as before."""
    other = validate(Faulty(scales_wrong, "extend"))
    for name in ("decode || null", "decode || positive", "token-wise || decode"):
        assert other.pairs[name] == right.pairs[name]
    assert other.pairs["extend || decode"] != right.pairs["extend || decode"]


def test_the_same_bits_twice_and_through_json(right: Replay) -> None:
    found = right.to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found == validate().to_json()


def test_requests_side_by_side_change_nothing(right: Replay) -> None:
    """A row is a row, whoever stands beside it: one request at a time gives the same numbers."""
    alone = validate(requests_at_once=1)
    for name, pair in right.pairs.items():
        found = {p: r.same_top1 for p, r in zip(alone.places, alone.pairs[name].rows, strict=True)}
        together = {p: r.same_top1 for p, r in zip(right.places, pair.rows, strict=True)}
        assert found == together


@dataclass(frozen=True)
class Silent:
    """A plan that does not tell its splits."""

    plan: Any
    nbytes: int = 0

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.plan.decode(*args, **kwargs)

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        return self.plan.extend(*args, **kwargs)


def test_a_backend_that_does_not_tell_its_splits_is_served() -> None:
    class Quiet(TorchBackend):
        def plan(self, spec: Any, **kwargs: Any) -> Any:
            return Silent(super().plan(spec, **kwargs))

    found = validate(Quiet(multiprocessors=32))
    assert found.splits is None and found.null_splits is None
    assert judge(found).status == "holds"


def test_what_cannot_be_validated_is_refused() -> None:
    with pytest.raises(ValueError, match="cuts no list of 60 keys into splits"):
        validate(model=small_sparse(topk=60))
    with pytest.raises(ValueError, match=f"shards must divide the {HEADS} heads, got 2"):
        validate(shards=2)
    with pytest.raises(ValueError, match="scripts must hold a script"):
        validate(scripts=())
    with pytest.raises(ValueError, match="requests_at_once must be at least 1"):
        validate(requests_at_once=0)
    assert SCRIPTS[0].num_rows == 12 and SCRIPTS[1].num_rows == 4

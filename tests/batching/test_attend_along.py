"""A routed step gives what rung 9 gives row by row, whatever the route, padding and order."""

import pytest
import torch
from tests.batching.routed_problem import SCALE, SPEC, routed_problem, small_plan
from tests.support import NothingReadBack, assert_agrees, assert_same_bits, raw

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_ref.batching import attend_along, route, route_per_request
from mla_ref.cache import write_rows
from mla_ref.numerics import AttentionResult

VERIFIERS = [(9, 4, 3), (17, 4, 5), (1, 4, 1)]
MIXED = [(9, 4, 3), (0, 11, 20), (17, 1, 5), (6, 3, 40), (5, 2, 5)]
EXACT = {"rel_l2": 1e-13}


def first(result: AttentionResult, rows: int) -> AttentionResult:
    return AttentionResult(result.out[:rows], result.lse[:rows])


@pytest.mark.parametrize("mode", ["auto", "0", "1"])
@pytest.mark.parametrize("router", [route, route_per_request])
@pytest.mark.parametrize("requests", [VERIFIERS, MIXED], ids=["verifiers", "mixed"])
def test_every_route_gives_the_same(requests, router, mode) -> None:
    problem, plan = routed_problem(requests), small_plan(mode)
    assert plan.decode.num_splits > 1
    assert_agrees(problem.attend(router(problem.step, plan), plan), problem.rung_9(), **EXACT)


def test_B001_decode_and_extend_agree_on_a_verifier_batch() -> None:
    problem, plan = routed_problem(VERIFIERS), small_plan()
    decode, extend = route(problem.step, plan), route(problem.step, plan, "0")
    assert (decode.kind, extend.kind) == ("decode", "extend")
    assert_agrees(problem.attend(decode, plan), problem.attend(extend, plan), **EXACT)


def test_the_mixed_batch_runs_on_both_kernels() -> None:
    problem, plan = routed_problem(MIXED), small_plan()
    assert [s.kind for s in route_per_request(problem.step, plan).segments] == [
        "decode",
        "extend",
        "decode",
        "extend",
        "decode",
    ]


def test_B017_results_are_packed() -> None:
    """Lengths 1 and 3, padded to 2 x 3 elsewhere: here four rows, and row 1 is request 1's."""
    problem, plan = routed_problem([(4, 1, 2), (6, 3, 2)]), small_plan()
    found = problem.attend(route(problem.step, plan), plan)
    assert found.out.shape[0] == 4 and found.out.isfinite().all()
    for request, rows in ((0, slice(0, 1)), (1, slice(1, 4))):
        alone = routed_problem([[(4, 1, 2), (6, 3, 2)][request]], seeds=[request])
        expected = alone.attend(route(alone.step, plan), plan)
        assert_same_bits(AttentionResult(found.out[rows], found.lse[rows]), expected)


def test_B018_rows_of_padding_are_zero() -> None:
    problem = routed_problem(VERIFIERS, num_reqs_padded=8, num_tokens_padded=32)
    plan = small_plan()
    found = problem.attend(route(problem.step, plan), plan)
    assert not found.out[12:].any() and (found.lse[12:] == -torch.inf).all()
    assert_agrees(first(found, 12), problem.rung_9(), **EXACT)


def test_B016_a_batch_whose_lengths_are_all_zero() -> None:
    problem = routed_problem([], num_reqs_padded=4, num_tokens_padded=4)
    plan = small_plan()
    found = problem.attend(route(problem.step, plan), plan)
    assert found.out.shape[0] == 4
    assert not found.out.any() and (found.lse == -torch.inf).all()


def test_B008_a_small_batch_after_a_large_one() -> None:
    """One plan, first a batch of 8 requests and then one of 3, in the graph of the 8."""
    used, fresh = small_plan(), small_plan()
    large = routed_problem([(c, 4, 1) for c in range(2, 10)])
    large.attend(route(large.step, used), used)
    small = routed_problem(VERIFIERS, num_reqs_padded=8, num_tokens_padded=32)
    assert route(small.step, used).graph_key == route(large.step, used).graph_key
    assert small.step.query_start_loc[3:].tolist() == [12] * 6
    assert small.step.seq_lens[3:].tolist() == [0] * 5
    alone = routed_problem(VERIFIERS)
    found = small.attend(route(small.step, used), used)
    assert_same_bits(first(found, 12), alone.attend(route(alone.step, fresh), fresh))


def test_B014_what_the_buffers_held_is_never_read() -> None:
    plan, problem = small_plan(), routed_problem(MIXED)
    way = route_per_request(problem.step, plan)
    expected = problem.attend(way, plan)
    for buffers in (plan.decode.partials, plan.extend.partials):
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0x7F)
    assert_same_bits(problem.attend(way, plan), expected)


def test_B011_splits_depend_on_what_is_planned_and_not_on_lengths() -> None:
    """A split behind the end of a short request contributes nothing, and the count stays."""
    plan = small_plan("0")
    splits = plan.decode.num_splits
    assert splits > 1
    for computed in (0, 3, 11, 40):
        problem = routed_problem([(computed, 1, 1)])
        way = route(problem.step, plan)
        assert way.kind == "decode"
        assert_agrees(problem.attend(way, plan), problem.rung_9(), **EXACT)
        assert plan.decode.num_splits == splits


def test_B013_running_moves_no_buffer() -> None:
    plan = small_plan()
    before = [t.data_ptr() for p in (plan.decode, plan.extend) for t in p.partials]
    for requests in (VERIFIERS, MIXED, VERIFIERS[:1]):
        problem = routed_problem(requests)
        problem.attend(route_per_request(problem.step, plan), plan)
    assert [t.data_ptr() for p in (plan.decode, plan.extend) for t in p.partials] == before


def test_B020_rows_of_padding_are_written_nowhere() -> None:
    """A table of 2 pages a request and a pool of 7: no page is taken for padding's own."""
    problem = routed_problem(
        [(2, 4, 1), (1, 4, 1), (3, 4, 1)], num_reqs_padded=6, num_tokens_padded=20
    )
    rows = torch.full((20, SPEC.row_dim), torch.inf, dtype=SPEC.q_dtype)
    before = problem.kv_cache.clone()
    write_rows(problem.kv_cache, rows, problem.step.slot_mapping)
    changed = (problem.kv_cache == torch.inf).all(dim=-1).flatten().nonzero().flatten()
    assert changed.tolist() == sorted(problem.step.slot_mapping[:12].tolist())
    untouched = torch.ones(before.shape[0] * 4, dtype=torch.bool)
    untouched[changed] = False
    same = torch.equal(
        before.flatten(0, 1)[untouched].nan_to_num(7),
        problem.kv_cache.flatten(0, 1)[untouched].nan_to_num(7),
    )
    assert same


def test_a_routed_step_reads_nothing_back() -> None:
    problem, plan = routed_problem(MIXED), small_plan()
    with NothingReadBack():
        for router in (route, route_per_request):
            problem.attend(router(problem.step, plan), plan)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 14), st.integers(1, 5), st.integers(0, 16)), min_size=1, max_size=5
)


@pytest.mark.thorough
@settings(max_examples=15)
@given(requests=REQUESTS, data=st.data(), mode=st.sampled_from(["auto", "0", "1"]))
def test_padding_changes_no_result(requests, data, mode) -> None:
    """Padded rows hold NaN, and flags that lie."""
    plan = small_plan(mode, seqs=5)
    plain = routed_problem(requests)
    most = max(plain.step.num_tokens, plan.decode_rows)
    padded = routed_problem(
        requests,
        num_reqs_padded=len(requests) + data.draw(st.integers(0, 3)),
        num_tokens_padded=data.draw(st.integers(plain.step.num_tokens, most)),
    )
    padded.step.is_prefilling[len(requests) :] = True
    one, two = route(plain.step, plan), route(padded.step, plan)
    assert (one.kind, one.reason, one.blame) == (two.kind, two.reason, two.blame)
    real = plain.step.num_tokens
    assert_same_bits(first(padded.attend(two, plan), real), plain.attend(one, plan))
    apart = route_per_request(padded.step, plan)
    assert_agrees(first(padded.attend(apart, plan), real), plain.rung_9(), **EXACT)


@pytest.mark.thorough
@settings(max_examples=15)
@given(requests=REQUESTS, data=st.data())
def test_permuted_requests_permute_the_results_bit_for_bit(requests, data) -> None:
    plan = small_plan(seqs=5)
    order = data.draw(st.permutations(range(len(requests))))
    plain = routed_problem(requests)
    turned = routed_problem([requests[r] for r in order], seeds=order)
    starts = plain.step.query_start_loc.tolist()
    rows = [row for r in order for row in range(starts[r], starts[r + 1])]
    for router in (route, route_per_request):
        one = plain.attend(router(plain.step, plan), plan)
        two = turned.attend(router(turned.step, plan), plan)
        assert_same_bits(two, AttentionResult(one.out[rows], one.lse[rows]))


def test_bad_input_is_named() -> None:
    problem, plan = routed_problem(VERIFIERS), small_plan()
    good = {
        "route": route(problem.step, plan),
        "plan": plan,
        "q": problem.q,
        "kv_cache": problem.kv_cache,
        "indices": problem.indices,
    }
    for changed, name in [
        ({"q": problem.q[1:]}, "q"),
        ({"q": None}, "q"),
        ({"indices": problem.indices[1:]}, "indices"),
        ({"indices": problem.indices.double()}, "indices"),
        ({"counts": torch.ones(3, dtype=torch.int32)}, "counts"),
        ({"plan": small_plan(seqs=2)}, "rows is 12, but decode is planned for 8"),
        ({"plan": None}, "plan"),
        ({"route": "decode"}, "route"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(attend_along)(**(good | changed), softmax_scale=SCALE)

"""Where a batch goes: the table, the rule's consequences, padding, and each request by itself."""

from dataclasses import replace

import pytest
import torch
from tests.batching.routed_problem import routed_problem
from tests.support import NothingReadBack, raw

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_ref.batching import (
    REASONS,
    TRUTH_TABLE,
    ScratchRows,
    Segment,
    ServingLimits,
    SpecMode,
    batch_facts,
    decide,
    original_route,
    route,
    route_per_request,
)

OFF, AUTO, FORCED = SpecMode.OFF, SpecMode.AUTO, SpecMode.FORCED


def rows(n: int = 3, mode: str = "auto", seqs: int = 16, tokens: int = 8192, max_q: int = 8):
    return ScratchRows(ServingLimits(seqs, tokens, n, max_q), SpecMode(mode))


def kinds(lens, flags, n: int) -> str:
    """Kernels in the modes auto, 0 and 1, by their first letters."""
    facts = batch_facts(lens, flags)
    return "".join(route(facts, rows(n, mode)).kind[0] for mode in (AUTO, OFF, FORCED))


@pytest.mark.parametrize("mode", list(SpecMode), ids=str)
@pytest.mark.parametrize("kind", TRUTH_TABLE, ids=lambda kind: kind.name)
def test_the_table_of_truth(kind, mode) -> None:
    found = route(kind.facts, ScratchRows(kind.limits, mode))
    assert (found.kind, found.reason) == kind.routes[mode]
    assert found.text.startswith(REASONS[found.reason])
    assert len(found.segments) == 1


def test_the_table_has_every_reason_and_no_other() -> None:
    shown = {reason for kind in TRUTH_TABLE for _, reason in kind.routes.values()}
    assert shown == set(REASONS)


def test_B001_consequences_of_the_dispatch_rule() -> None:
    nobody = [False, False, False]
    assert kinds([4, 4, 4], nobody, 3) == "ded"
    assert kinds([4, 4, 4], [False, True, False], 3) == "eed"
    assert kinds([1, 1, 1], nobody, 3) == kinds([1, 1, 1], [True] * 3, 0) == "ddd"
    assert kinds([5, 5], nobody[:2], 3) == "eed"
    assert kinds([9], nobody[:1], 3) == "eee"
    assert kinds([4, 1, 3], nobody, 3) == "ded"
    assert kinds([8, 8], nobody[:2], 7) == "ded"
    assert kinds([10], nobody[:1], 9) == "eee"
    assert kinds([4, 4], nobody[:2], 0) == kinds([4, 4], None, 3) == "eed"
    # A padded dummy row that is flagged changes nothing.
    assert kinds([4, 4, 0], [False, False, True], 3) == "ded"


def test_who_is_to_blame_and_what_would_help() -> None:
    found = route(batch_facts([4, 4, 4, 4], [False, True, False, True]), rows())
    assert (found.reason, found.blame) == ("prefill-in-batch", 1)
    assert found.remedy.change == "without_requests" and found.remedy.value == (1, 3)
    assert "requests 1, 3" in found.remedy.text
    assert "request 1, with 4 tokens" in found.text

    found = route(batch_facts([4, 5], [False, False]), rows())
    assert (found.reason, found.blame) == ("query-over-n+1", 1)
    assert (found.remedy.change, found.remedy.value) == ("num_speculative_tokens", 4)

    found = route(batch_facts([10], [False]), rows(9))
    assert (found.remedy.change, found.remedy.value) == ("max_q", 10)

    found = route(batch_facts([4, 4], None), rows())
    assert (found.remedy.change, found.blame) == ("is_prefilling", None)

    found = route(batch_facts([4, 4], [False] * 2), rows(mode="0"))
    assert (found.remedy.change, found.remedy.value) == ("mode", "auto")

    # Nothing helps a prompt, and no larger limit is advised for one.
    for mode in ("auto", "0", "1"):
        assert route(batch_facts([512], [True]), rows(mode=mode)).remedy is None
    assert route(batch_facts([4], [False]), rows()).remedy is None


def test_over_the_decode_plan_and_inside_the_extend_plan() -> None:
    """A plan for mode 0 has one row a request: the batch is not refused, it goes to extend."""
    facts = batch_facts([4] * 6, [False] * 6)
    found = route(facts, rows(mode="0"), "auto")
    assert (found.kind, found.reason, found.blame) == ("extend", "over-planned-rows", None)
    assert "24 rows, planned are 16" in found.text
    assert (found.remedy.change, found.remedy.value) == ("planned_mode", "auto")
    assert route(facts, rows(mode="auto"), "auto").kind == "decode"
    assert route(batch_facts([4] * 4, [False] * 4), rows(mode="0"), "auto").kind == "decode"


def test_beyond_the_limits_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="17 requests, but max_num_seqs is 16"):
        route(batch_facts([1] * 17, None), rows())
    with pytest.raises(ValueError, match="33 rows, but max_num_batched_tokens is 32"):
        route(batch_facts([33], [True]), rows(tokens=32))
    with pytest.raises(ValueError, match="64 rows, but max_num_batched_tokens is 32"):
        route_per_request(batch_facts([1], None, num_tokens_padded=64), rows(tokens=32))
    # Padded requests are nobody.
    assert route(batch_facts([1] * 16 + [0] * 4, None, num_reqs=16), rows()).kind == "decode"


def test_B018_a_graph_larger_than_the_decode_plan() -> None:
    """100 requests in a graph of 112 rows: the kernel gets 112, and 100 are planned."""
    planned = rows(0, seqs=100)
    facts = batch_facts([1] * 100 + [0] * 12, None, num_reqs=100, num_tokens_padded=112)
    found = route(facts, planned)
    assert (found.kind, found.reason) == ("extend", "over-planned-rows")
    assert (found.remedy.change, found.remedy.value) == ("max_num_seqs", 112)
    assert found.segments == ((0, 112, 0, 112, "extend"),)
    assert route(facts, rows(0, seqs=112)).kind == "decode"


@pytest.mark.parametrize("router", [route, route_per_request])
def test_B016_a_batch_of_nobody(router) -> None:
    for facts in (
        batch_facts([], []),
        batch_facts([0, 0, 0, 0], None),
        batch_facts([0, 0], [True, True], num_reqs=0, num_tokens_padded=8),
    ):
        found = router(facts, rows())
        assert (found.kind, found.reason, found.blame) == ("decode", "empty", None)
        (segment,) = found.segments
        assert segment == (0, facts.num_tokens_padded, 0, facts.num_reqs_padded, "decode")
        over = router(replace(facts, num_tokens_padded=65), rows())
        assert (over.kind, over.reason) == ("extend", "over-planned-rows")


def test_B002_a_prompt_beside_a_verifier_goes_its_own_way() -> None:
    """Two tokens without context and five behind 100, with 4 drafts: one chunk, one verifier."""
    problem = routed_problem([(0, 2, 2), (100, 5, 90)])
    assert route(problem.step, rows(4)).kind == "extend"
    apart = route_per_request(problem.step, rows(4))
    assert apart.segments == (Segment(0, 2, 0, 1, "extend"), Segment(2, 7, 1, 2, "decode"))
    assert apart.reasons == ("prefill-in-batch", "verifier")


def test_each_request_by_itself() -> None:
    lens = [4, 0, 4, 1, 512, 3, 0]
    flags = [False, False, False, True, True, False, False]
    facts = batch_facts(lens, flags, num_tokens_padded=600)
    found = route_per_request(facts, rows(tokens=600))
    # The padding goes with the last request, which has too many rows for the decode plan then.
    assert found.segments == (Segment(0, 9, 0, 4, "decode"), Segment(9, 600, 4, 7, "extend"))
    assert found.reasons[-2:] == ("over-planned-rows",) * 2
    found = route_per_request(batch_facts(lens, flags), rows())
    assert found.segments == (
        Segment(0, 9, 0, 4, "decode"),
        Segment(9, 521, 4, 5, "extend"),
        Segment(521, 524, 5, 7, "decode"),
    )
    assert (found.kind, found.reason, found.blame) == ("mixed", "prefill-in-batch", 4)
    assert found.reasons[:4] == ("verifier", "empty", "verifier", "single-token")
    assert found.remedy is None
    # A short chunk could go to decode, so the advice for it is the mode.
    found = route_per_request(batch_facts([4, 4], [False, True]), rows())
    assert (found.remedy.change, found.remedy.value) == ("mode", "1")
    assert route_per_request(batch_facts([0, 4], [False] * 2), rows()).segments == (
        Segment(0, 4, 0, 2, "decode"),
    )


def test_a_request_without_a_token_is_not_to_blame_for_the_one_behind_it() -> None:
    """It has the kernel of its neighbour, and no reason of its own."""
    found = route_per_request(batch_facts((0, 512), (False, True)), rows(tokens=1024))
    assert (found.kind, found.reason, found.blame) == ("extend", "prefill-in-batch", 1)
    assert found.reasons == ("empty", "prefill-in-batch")
    assert "request 1, with 512 tokens" in found.text
    # A short chunk could go to decode: the advice is for it, and not for the empty request.
    found = route_per_request(batch_facts((0, 0, 4), (False, False, True)), rows())
    assert (found.reason, found.blame) == ("prefill-in-batch", 2)
    assert (found.remedy.change, found.remedy.value) == ("mode", "1")


def test_a_graphs_key_includes_the_route() -> None:
    """A replay repeats the branch that was taken at capture: one shape, two routes, two graphs."""
    verifier = route(batch_facts([4, 4], [False, False]), rows())
    chunks = route(batch_facts([4, 4], [True, True]), rows())
    padded = route(batch_facts([4, 4], [False, False], num_tokens_padded=16), rows())
    again = route(batch_facts([4, 3], [False, False], num_tokens_padded=8), rows())
    assert verifier.graph_key == again.graph_key == (2, 8, ((0, 8, "decode"),))
    assert len({verifier.graph_key, chunks.graph_key, padded.graph_key}) == 3


def test_device_facts_are_refused() -> None:
    step = routed_problem([(9, 4, 3)]).step
    assert route(step, rows()).kind == "decode"
    flags = torch.zeros(1, dtype=torch.bool, device="meta")
    for router in (route, route_per_request):
        with pytest.raises(TypeError, match="is_prefilling must be on the host"):
            router(replace(step, is_prefilling=flags), rows())


def test_a_route_reads_nothing_of_the_device() -> None:
    """All tensors but the flags lie on a device without memory: reading one would be an error."""
    step = routed_problem([(9, 4, 3), (9, 1, 12)]).step
    names = ("query_start_loc", "seq_lens", "block_table", "positions", "visible_lens")
    names += ("request_of_row", "slot_mapping")
    away = replace(step, **{name: getattr(step, name).to("meta") for name in names})
    with NothingReadBack():
        assert route(away, rows()) == route(step, rows())
        assert route_per_request(away, rows()) == route_per_request(step, rows())


def test_bad_input_is_named() -> None:
    facts = batch_facts([4], [False])
    for arguments, name in [
        (((4,), rows()), "step"),
        ((facts, None), "plan"),
        ((facts, rows(), "maybe"), "mode"),
    ]:
        for router in (route, route_per_request):
            with pytest.raises((TypeError, ValueError), match=name):
                raw(router)(*arguments)


LENS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 40]), max_size=6)
SERVERS = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(6, 9),
    max_num_batched_tokens=st.just(300),
    num_speculative_tokens=st.integers(0, 9),
    max_q=st.integers(1, 10),
)
MODES = st.sampled_from(list(SpecMode))


@st.composite
def batches(draw):
    lens = draw(LENS)
    flags = st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))
    return lens, draw(st.one_of(st.none(), flags))


@pytest.mark.thorough
@settings(max_examples=60)
@given(batch=batches(), limits=SERVERS, planned=MODES, mode=MODES, data=st.data())
def test_padded_rows_decide_nothing(batch, limits, planned, mode, data) -> None:
    lens, flags = batch
    plan = ScratchRows(limits, planned)
    plain = batch_facts(lens, flags)
    extra = data.draw(st.integers(0, 4))
    stale = None if flags is None else [*flags, *([True] * extra)]
    if flags is not None:  # a vacated slot in the middle may lie as well
        stale = [f or q == 0 for f, q in zip(stale, [*lens, *[0] * extra], strict=True)]
    padded_rows = data.draw(st.integers(plain.num_tokens, max(plain.num_tokens, plan.decode_rows)))
    padded = batch_facts(
        [*lens, *[0] * extra], stale, num_reqs=len(lens), num_tokens_padded=padded_rows
    )
    for router in (route, route_per_request):
        one, two = router(plain, plan, mode), router(padded, plan, mode)
        if router is route:
            assert (one.kind, one.reason, one.blame) == (two.kind, two.reason, two.blame)
            assert one.remedy == two.remedy or "over-planned-rows" in (one.reason, two.reason)
        # Only the end of the last segment differs.
        elif "over-planned-rows" not in two.reasons:
            assert one.segments[:-1] == two.segments[:-1] and one.reasons == two.reasons


@pytest.mark.thorough
@settings(max_examples=60)
@given(batch=batches(), limits=SERVERS, planned=MODES, mode=MODES, extra=st.integers(0, 3))
def test_segments_cover_all_rows_once_and_fit_their_plans(batch, limits, planned, mode, extra):
    plan, facts = ScratchRows(limits, planned), batch_facts(*batch)
    facts = replace(facts, num_tokens_padded=facts.num_tokens + extra)
    for router in (route, route_per_request):
        found = router(facts, plan, mode)
        row = request = 0
        for segment in found.segments:
            assert (segment.row_start, segment.req_start) == (row, request)
            row, request = segment.row_end, segment.req_end
            assert segment.row_end - segment.row_start <= plan.rows(segment.kind)
        assert (row, request) == (facts.num_tokens_padded, facts.num_reqs_padded)
        neighbours = zip(found.segments, found.segments[1:], strict=False)
        assert all(a.kind != b.kind for a, b in neighbours)
        # Rows of decode by the batch-wide rule are rows of decode by the other.
        if found.kind == "decode" and router is route and extra == 0:
            assert route_per_request(facts, plan, mode).kind == "decode"


@pytest.mark.thorough
@settings(max_examples=60)
@given(batch=batches(), limits=SERVERS, planned=MODES, mode=MODES)
def test_a_remedy_keeps_its_word(batch, limits, planned, mode) -> None:
    """Make the change that is advised, and nothing else: the batch is decode."""
    facts, plan = batch_facts(*batch), ScratchRows(limits, planned)
    found = route(facts, plan, mode)
    assert found.kind == "extend" or found.remedy is None
    if found.remedy is None:
        return
    change, value = found.remedy.change, found.remedy.value
    if change == "mode":
        plan, mode = ScratchRows(limits, SpecMode(value)), SpecMode(value)
    elif change == "planned_mode":
        plan = ScratchRows(limits, SpecMode(value))
    elif change == "is_prefilling":
        facts = replace(facts, is_prefilling=(False,) * facts.num_reqs)
    elif change == "without_requests":
        facts = facts.without(value)
        assert facts.num_reqs > 0
    else:
        plan = ScratchRows(replace(limits, **{change: value}), planned)
    assert decide(facts, plan, mode).kind == "decode", found.remedy


@pytest.mark.thorough
@settings(max_examples=60)
@given(batch=batches(), limits=SERVERS, mode=MODES)
def test_without_padding_the_original_answers_the_same(batch, limits, mode) -> None:
    lens, flags = batch
    lens = [max(q, 1) for q in lens]
    plan = ScratchRows(limits, mode)
    answer = original_route(lens, flags, sum(lens), plan, mode)
    assert answer.kind == route(batch_facts(lens, flags), plan).kind


def test_vllm41841_the_original_is_misled_by_a_vacated_row() -> None:
    plan, lens = rows(), [4, 4, 0]
    assert original_route(lens, [False, False, True], 8, plan, AUTO) == ("extend", False, False)
    assert original_route(lens, [False, False, False], 8, plan, AUTO) == ("decode", True, True)
    assert route(batch_facts(lens, [False, False, True]), plan).kind == "decode"

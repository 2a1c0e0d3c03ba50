"""Who runs with how many tokens, and who gives way. No model: a step is played by `advance`."""

from collections.abc import Sequence

import pytest

from mla_ref.batching import ServingLimits
from mla_ref.engine import BlockManager, Request, RequestState, Schedule, Scheduler, Status


def scheduler(
    seqs: int = 4, tokens: int = 10, n: int = 0, pages: int = 40, page_size: int = 4, **more: int
) -> Scheduler:
    return Scheduler(ServingLimits(seqs, tokens, n), BlockManager(pages, page_size), **more)


def queued(plan: Scheduler, *sizes: tuple[int, int]) -> list[RequestState]:
    """Requests of (prompt, new tokens)."""
    states = [
        RequestState(Request(str(i), [1] * prompt, new)) for i, (prompt, new) in enumerate(sizes)
    ]
    for state in states:
        plan.add(state)
    return states


def advance(schedule: Schedule, drafts: Sequence[int] = ()) -> list[tuple[str, int]]:
    """All drafts accepted; `drafts` are those of the next step. Who ran, with how many tokens."""
    ran = []
    for item in schedule.items:
        state = item.state
        ran.append((state.request.request_id, item.num_tokens))
        state.num_computed += item.num_tokens
        if item.samples:
            state.output_ids += [*item.drafts, 7]
            state.drafts = tuple(drafts)
    return ran


def test_prompts_run_in_chunks_and_share_the_budget_in_order_of_arrival() -> None:
    plan = scheduler()
    first, second, third = queued(plan, (14, 4), (3, 4), (6, 4))
    assert advance(plan.schedule()) == [("0", 10)]
    assert first.is_prefilling and second.status == third.status == Status.WAITING
    # The rest of the first prompt, the second, and what is left of the budget for the third.
    assert advance(plan.schedule()) == [("0", 4), ("1", 3), ("2", 3)]
    assert not first.is_prefilling and not second.is_prefilling and third.is_prefilling
    assert [len(s.output_ids) for s in (first, second, third)] == [1, 1, 0]
    assert advance(plan.schedule()) == [("0", 1), ("1", 1), ("2", 3)]
    assert advance(plan.schedule()) == [("0", 1), ("1", 1), ("2", 1)]


def test_a_chunk_limit_leaves_budget_to_others() -> None:
    plan = scheduler(max_chunk=4)
    queued(plan, (14, 4), (3, 4))
    assert advance(plan.schedule()) == [("0", 4), ("1", 3)]
    assert advance(plan.schedule()) == [("0", 4), ("1", 1)]


def test_running_requests_come_before_waiting_ones() -> None:
    plan = scheduler(tokens=4, n=3)
    queued(plan, (4, 9), (2, 4))
    assert advance(plan.schedule(), [5, 5, 5]) == [("0", 4)]
    # Verifier rows take the whole budget, so the second prompt has to wait.
    assert advance(plan.schedule(), [5]) == [("0", 4)]
    assert advance(plan.schedule()) == [("0", 2), ("1", 2)]


def test_no_more_requests_than_places() -> None:
    plan = scheduler(seqs=2)
    states = queued(plan, (2, 4), (2, 4), (2, 4))
    assert advance(plan.schedule()) == [("0", 2), ("1", 2)]
    plan.finish(states[0], "length")
    assert advance(plan.schedule()) == [("1", 1), ("2", 2)]


def test_drafts_are_cut_to_the_budget() -> None:
    plan = scheduler(tokens=5, n=3)
    states = queued(plan, (2, 9), (2, 9))
    advance(plan.schedule(), [4, 5, 6])
    schedule = plan.schedule()
    assert [item.drafts for item in schedule.items] == [(4, 5, 6), ()]
    assert [item.token_ids for item in schedule.items] == [(7, 4, 5, 6), (7,)]
    assert [item.valid_rows(a) for item, a in zip(schedule.items, (1, 0), strict=True)] == [2, 1]
    assert all(item.samples for item in schedule.items)
    assert states[0].max_drafts == 7


def test_a_request_without_budget_keeps_its_place_and_its_drafts() -> None:
    plan = scheduler(tokens=4, n=3)
    states = queued(plan, (2, 9), (2, 9))
    advance(plan.schedule(), [4, 5, 6])
    assert advance(plan.schedule(), [4, 5, 6]) == [("0", 4)]
    assert states[1].status == Status.RUNNING and states[1].drafts == (4, 5, 6)


def test_pages_hold_what_a_drafter_writes_further_and_no_row_more_than_there_can_be() -> None:
    plan = scheduler(n=3, page_size=1)
    (state,) = queued(plan, (2, 5))
    advance(plan.schedule(), [4, 5, 6])
    assert len(state.pages) == 2 + 3
    plan.schedule()
    # 2 + 5 tokens, of which the last is never run: six rows, not 2 + 4 + 3.
    assert len(state.pages) == 6 == state.request.max_rows


def test_the_request_that_came_last_gives_way_and_runs_all_again() -> None:
    plan = scheduler(pages=5, page_size=2)
    first, _, third = queued(plan, (3, 4), (2, 4), (2, 4))
    assert advance(plan.schedule()) == [("0", 3), ("1", 2), ("2", 2)]
    assert plan.blocks.num_free == 1
    # The first needs no page, the second takes the last one, the third finds none.
    schedule = plan.schedule()
    assert [s.request.request_id for s in schedule.preempted] == ["2"]
    assert advance(schedule) == [("0", 1), ("1", 1)]
    assert third.status == Status.WAITING and third.pages == [] and third.output_ids == [7]
    assert (third.num_computed, third.num_preemptions) == (0, 1)
    # Two pages are needed for its three tokens: it waits, however small its first chunk is.
    schedule = plan.schedule()
    assert schedule.preempted == [] and advance(schedule) == [("0", 1), ("1", 1)]
    plan.finish(first, "length")
    schedule = plan.schedule()
    assert advance(schedule)[-1] == ("2", 3)
    assert third.num_prefill == 3 and third.output_ids == [7, 7]


def test_several_give_way_to_the_oldest_and_keep_their_order() -> None:
    plan = scheduler(pages=6, page_size=1, tokens=20)
    states = queued(plan, (3, 4), (1, 2), (1, 2), (1, 1))
    assert len(plan.schedule().items) == 4
    states[0].num_computed, states[0].output_ids = 3, [7]
    for state in states[1:]:
        state.num_computed, state.output_ids = 1, [7]
    schedule = plan.schedule()
    assert [s.request.request_id for s in schedule.preempted] == ["3", "2"]
    assert [s.request.request_id for s in plan.waiting] == ["2", "3"]
    assert [item.state.request.request_id for item in schedule.items] == ["0", "1"]


def test_nobody_is_admitted_in_a_step_in_which_somebody_gave_way() -> None:
    """The second has many pages from drafts that were rejected, and would fit in again at once."""
    plan = scheduler(pages=19, page_size=1, tokens=20, n=3)
    first, second = queued(plan, (1, 19), (1, 18))
    advance(plan.schedule(), [4, 5, 6])
    advance(plan.schedule(), [4, 5, 6])
    second.num_computed, second.output_ids = 2, [7, 7]
    assert [len(first.pages), len(second.pages), plan.blocks.num_free] == [8, 8, 3]
    schedule = plan.schedule()
    assert schedule.preempted == [second] and [i.state for i in schedule.items] == [first]
    assert plan.blocks.num_free == 7 and second.status == Status.WAITING


def test_a_request_that_can_never_fit_is_refused() -> None:
    plan = scheduler(pages=3, page_size=4)
    (fits,) = queued(plan, (8, 5))
    assert fits.request.max_rows == 12
    with pytest.raises(ValueError, match=r"request 'x' may need 4 pages of 4 tokens \(8 \+ 6 - 1"):
        plan.add(RequestState(Request("x", [1] * 8, 6)))
    assert list(plan.waiting) == [fits]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_chunk must be at least 1, got 0"):
        scheduler(max_chunk=0)

"""Drafts of the MTP module against the module without pages, and what its cache holds."""

import random
from dataclasses import replace

import pytest
import torch
from tests.engine.serving import small_model
from tests.models.test_mtp import CONFIG, hidden_states, small_module
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import pages_needed
from mla_ref.engine import Engine, Request
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.speculative import Draft, Drafter, DraftRequest, MTPDrafter
from mla_ref.training.unroll import unroll

PAGE, PAGES, DRAFTS = 4, 40, 3


def naive_draft(
    module: MTPModule, token_ids: list[int], num_drafts: int, hidden: Tensor | None = None
) -> list[int]:
    """Everything anew for each token, by the training's passes over one window."""
    guesses: list[int] = []
    anchor = len(token_ids) - 2
    known = torch.tensor(token_ids)
    if hidden is None:
        hidden = hidden_states(module, known[:-1])
    for number in range(1, num_drafts + 1):
        window = torch.cat([known, torch.tensor(guesses, dtype=torch.int64)])
        # Hidden states of guesses are looked at by nobody at this anchor.
        padded = torch.cat([hidden, hidden.new_zeros(len(window) - len(hidden), 48)])
        *_, state = unroll(module.model, module.weights, window[None], padded[None], number)
        guesses.append(int(module.guess(state[:, anchor])))
    return guesses


def pages_of(requests: int, seed: int) -> Tensor:
    order = list(range(PAGES))
    random.Random(seed).shuffle(order)
    width = PAGES // requests
    return torch.tensor([order[r * width : (r + 1) * width] for r in range(requests)])


def asked(texts: list[list[int]], drafts: list[int], rows: list[int]) -> list[DraftRequest]:
    """Requests whose target has run all but the newest token, `rows` of them in this step."""
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    return [
        DraftRequest(text, n, len(text) - 1, first, row, place)
        for place, (text, n, first, row) in enumerate(zip(texts, drafts, firsts, rows, strict=True))
    ]


def some_texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(60) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("attention", ["gqa", "packed"])
def test_drafts_are_those_of_the_module_without_pages(attention: str) -> None:
    module = small_module(attention)
    texts, wanted = some_texts([9, 2, 6, 13]), [3, 2, 0, 1]
    drafter = MTPDrafter(module, DRAFTS)
    assert isinstance(drafter, Drafter)
    hidden = torch.cat([hidden_states(module, torch.tensor(t[:-1])) for t in texts])
    cache = drafter.new_cache(PAGES, PAGE).fill_(torch.nan)
    drafts = drafter.propose(
        asked(texts, wanted, [len(t) - 1 for t in texts]), hidden, pages_of(4, 1), PAGE, cache
    )
    expected = [naive_draft(module, t, n) for t, n in zip(texts, wanted, strict=True)]
    assert drafts == [Draft(token_ids) for token_ids in expected]


def test_the_order_of_requests_changes_nothing() -> None:
    module = small_module()
    texts = some_texts([9, 5, 7], seed=4)
    drafter = MTPDrafter(module, DRAFTS)
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        mine = [texts[i] for i in order]
        hidden = torch.cat([hidden_states(module, torch.tensor(t[:-1])) for t in mine])
        requests = asked(mine, [3, 3, 3], [len(t) - 1 for t in mine])
        cache = drafter.new_cache(PAGES, PAGE)
        drafts = drafter.propose(requests, hidden, pages_of(3, 0), PAGE, cache)
        found.append({i: draft.token_ids for i, draft in zip(order, drafts, strict=True)})
    assert found[0] == found[1]


def test_a_prompt_in_chunks_is_a_prompt_at_once() -> None:
    module, [text] = small_module(), some_texts([11], seed=2)
    drafter, table = MTPDrafter(module, DRAFTS), pages_of(1, 3)
    hidden = hidden_states(module, torch.tensor(text[:-1]))
    cache = drafter.new_cache(PAGES, PAGE)
    for first, end in ((0, 4), (4, 5), (5, 10)):
        wanted = DRAFTS if end == 10 else 0
        request = DraftRequest(text, wanted, end, 0, end - first, 0)
        [draft] = drafter.propose([request], hidden[first:end], table, PAGE, cache)
        assert draft.token_ids == (naive_draft(module, text, DRAFTS) if wanted else [])


@pytest.mark.usefixtures("plain_calls")
def test_B101_B102_whatever_was_rejected_the_cache_is_that_of_a_fresh_run() -> None:
    """Fifty rounds with 0 to 3 accepted drafts: bonus, recovered, and all between."""
    module, draw = small_module(), random.Random(6)
    drafter, table = MTPDrafter(module, DRAFTS), pages_of(1, 5)
    cache = drafter.new_cache(PAGES, PAGE).fill_(torch.nan)
    [text] = some_texts([4], seed=7)
    rows = len(text) - 1
    for number in range(50):
        if len(text) + DRAFTS + 2 > CONFIG.context_length:
            text, rows = text[:4], 3
            cache.fill_(torch.nan)
        computed = len(text) - 1
        hidden = hidden_states(module, torch.tensor(text[:-1]))
        # The target ran rejected drafts as well; their states lie behind and must not be read.
        states = torch.cat([hidden[computed - rows :], hidden.new_full((2, 48), torch.nan)])
        request = DraftRequest(text, DRAFTS, computed, 0, rows, 0)
        [draft] = drafter.propose([request], states, table, PAGE, cache)
        if number % 10 == 0:
            assert draft.token_ids == naive_draft(module, text, DRAFTS)
        fresh = drafter.new_cache(PAGES, PAGE).fill_(torch.nan)
        drafter.propose(
            [DraftRequest(text, 0, computed, 0, computed, 0)], hidden, table, PAGE, fresh
        )
        kept, wanted = rows_of(cache, table, computed), rows_of(fresh, table, computed)
        assert torch.allclose(kept, wanted, rtol=0, atol=1e-12)
        # The drafts' own rows, of which the last draft has none, and not one more.
        written = rows_of(cache, table, PAGES * PAGE).isfinite().flatten(1).all(dim=1)
        longest = computed + DRAFTS - 1
        assert written[:longest].all()
        accepted = draw.randrange(DRAFTS + 1)
        text = [*text, *draft.token_ids[:accepted], draw.randrange(60)]
        rows = 1 + accepted


def test_B104_a_step_writes_the_slots_of_its_valid_rows_and_drafts_alone() -> None:
    module = small_module()
    texts = some_texts([6, 9], seed=3)
    drafter, table = MTPDrafter(module, DRAFTS), pages_of(2, 2)
    hidden = torch.cat([hidden_states(module, torch.tensor(t[:-1])) for t in texts])
    cache = drafter.new_cache(PAGES, PAGE).fill_(torch.nan)
    drafter.propose(asked(texts, [3, 1], [5, 8]), hidden, table, PAGE, cache)
    for place, (computed, extra) in enumerate(((5, 2), (8, 0))):
        written = rows_of(cache, table[place : place + 1], PAGES // 2 * PAGE)
        finite = written.isfinite().flatten(1).all(dim=1)
        assert finite[: computed + extra].all() and not finite[computed + extra :].any()


def test_B043_a_sparse_targets_lists_are_not_the_modules() -> None:
    """The module attends to all its keys, whatever few the target's last layer has selected."""
    target = small_model("sparse")
    weights = MTPWeights.random(target.config, torch.arange(60), 3).to(dtype=torch.float64)
    drafter, table = MTPDrafter(MTPModule(target.dense, weights), DRAFTS), pages_of(1, 4)
    for text in some_texts([14, 20, 26], seed=5):
        computed = len(text) - 1
        lists: list[Tensor] = []
        hidden = target.forward(
            torch.tensor(text[:-1]),
            Step.build([0], [computed], table, PAGE),
            target.new_cache(PAGES, PAGE, torch.float64),
            selected=lists,
        )
        assert (lists[-1] >= 0).sum(dim=1).max() < computed
        for positions in (None, computed - 1, -1):  # as selected; the newest alone; none
            if positions is not None:
                lists[-1].fill_(positions)
            cache = drafter.new_cache(PAGES, PAGE)
            requests = asked([text], [DRAFTS], [computed])
            (draft,) = drafter.propose(requests, hidden, table, PAGE, cache)
            assert draft.token_ids == naive_draft(drafter.module, text, DRAFTS, hidden)


def test_drafting_leaves_the_targets_cache_alone() -> None:
    """The module has a cache of its own."""
    module = small_module("packed")
    engine = Engine(
        module.model, drafter=MTPDrafter(module, DRAFTS), num_drafts=DRAFTS, page_size=PAGE
    )
    engine.add(Request("a", tuple(range(1, 12)), max_new_tokens=12))
    engine.step()
    before = engine.runner.cache.clone()
    state = engine.requests["a"]
    request = DraftRequest(state.token_ids, DRAFTS, state.num_computed, 0, 1, 0)
    hidden = torch.zeros(1, 48, dtype=torch.float64)
    table = torch.tensor([state.pages])
    engine.runner.drafter.propose([request], hidden, table, PAGE, engine.runner.draft_cache)
    assert torch.equal(engine.runner.cache, before)


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("attention", ["gqa", "packed"])
def test_the_engine_says_what_plain_decoding_says(attention: str) -> None:
    module = small_module(attention)
    prompts = some_texts([5, 1, 12, 8], seed=9)
    requests = [Request(str(i), tuple(p), max_new_tokens=20) for i, p in enumerate(prompts)]
    plain = Engine(module.model, page_size=PAGE).run(requests)
    drafter = MTPDrafter(module, DRAFTS)
    tight = pages_needed(32, PAGE) * 2 + 2  # so that requests are preempted
    engine = Engine(
        module.model,
        drafter=drafter,
        num_drafts=DRAFTS,
        page_size=PAGE,
        num_pages=tight,
        max_num_batched_tokens=9,
    )
    drafted = engine.run(requests)
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    assert sum(record.num_drafts for record in engine.timeline) > 20


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The rows of the first positions of a request, of a cache of keys and values or of rows."""
    if cache.ndim == 5:
        cache = cache.permute(1, 2, 0, 3, 4)
    return cache[table[0]].flatten(0, 1)[:length]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"first_row": 6}, "first_row . num_rows must be at most the 8 rows of hidden, got 6 . 4"),
        ({"block_table_row": 2}, "block_table_row must be below the 2 rows of block_table, got 2"),
    ],
)
def test_a_row_that_is_not_there_is_named(change: dict[str, int], message: str) -> None:
    module = small_module("gqa")
    [text] = some_texts([9])
    [request] = asked([text], [1], [4])
    drafter, hidden = MTPDrafter(module, DRAFTS), torch.zeros(8, 48)
    with pytest.raises(ValueError, match=message):
        drafter.propose(
            [replace(request, **change)],
            hidden,
            pages_of(2, 0),
            PAGE,
            drafter.new_cache(PAGES, PAGE),
        )

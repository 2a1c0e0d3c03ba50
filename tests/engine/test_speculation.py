"""Drafts in the engine: what is accepted, what is rolled back, what the caches hold afterwards."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.serving import (
    MOST_NEW,
    KnowingDrafter,
    plain_tokens,
    poison_free_pages,
    prompt,
    serve,
    small_model,
    watch_batches,
    with_own_head,
)
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import gather_rows
from mla_ref.engine import Engine, Request, RequestState, generate, logits_rows
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.numerics import compare
from mla_ref.speculative import (
    Draft,
    NgramDrafter,
    SamplingParams,
    position_noise,
    rejection_sample,
)

PROMPT = prompt(6)  # 5 tokens
TEXT = (*PROMPT, *plain_tokens("packed", PROMPT, MOST_NEW))


def speculating(script: list[int] | None = None, n: int = 3, **more: object) -> Engine:
    """An engine whose drafter proposes script[i] right tokens in its call number i."""
    drafter = KnowingDrafter([TEXT], small_model("packed"), script=script)
    engine = Engine(small_model("packed"), drafter=drafter, num_drafts=n, page_size=4, **more)
    poison_free_pages(engine)
    return engine


def rows_of(engine: Engine, state: RequestState, layer: int, count: int) -> Tensor:
    return gather_rows(engine.runner.cache[layer], torch.tensor(state.pages), count)


def fresh_rows(token_ids: tuple[int, ...], layer: int) -> Tensor:
    """Rows of a run that knows no drafts: the whole text at once."""
    model = small_model("packed")
    cache = model.new_cache(1, len(token_ids))
    model.forward(
        torch.tensor(token_ids), Step.one_request(0, len(token_ids), len(token_ids)), cache
    )
    return cache[layer][0]


def test_the_rows_whose_logits_are_needed() -> None:
    """The worked example of vLLM's gpu_model_runner, and the same with a prompt that goes on."""
    lens, drafts = [4, 100, 3, 100, 2], [3, 0, 2, 0, 1]
    every = [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert logits_rows(lens, drafts, [True] * 5).tolist() == every
    goes_on = logits_rows(lens, drafts, [True, False, True, True, True])
    assert goes_on.tolist() == [row for row in every if row != 103]
    assert logits_rows([5], [0], [False]).tolist() == []


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_B100_a_step_gives_the_accepted_drafts_and_one_token_more(right: int) -> None:
    """The token behind them is recovered or bonus, never both; either is the target's own."""
    engine = speculating([right])
    state = engine.add(Request("0", PROMPT, MOST_NEW))
    (first,) = engine.step()
    assert (first.token_ids, first.drafts, first.num_prefilled) == (TEXT[5:6], (), 5)
    (second,) = engine.step()
    assert len(second.drafts) == 3 and second.num_accepted == right
    assert second.token_ids == TEXT[6 : 6 + right + 1]
    assert second.drafts[:right] == second.token_ids[:right]
    assert state.output_ids == list(TEXT[5 : 7 + right])


def test_B101_the_cache_holds_what_a_prefill_of_the_same_text_holds() -> None:
    """Rejected rows lie behind the valid ones, and the next step writes over them."""
    engine = speculating([3, 0, 1])
    state = engine.add(Request("0", PROMPT, MOST_NEW))
    rejected_was_seen = False
    while engine.requests:
        engine.step()
        if not state.pages:
            break
        count = state.num_computed
        for layer in (0, 1):
            expected = fresh_rows(state.token_ids[:count], layer)
            assert compare(rows_of(engine, state, layer, count), expected).agrees(rel_l2=1e-12)
        behind = rows_of(engine, state, 1, count + 1)[count:]
        if not behind.isnan().any():
            true_row = fresh_rows(TEXT[: count + 1], 1)[count:]
            rejected_was_seen |= compare(behind, true_row).rel_l2 > 0.1
    assert state.output_ids == list(TEXT[5:])
    assert rejected_was_seen


@pytest.mark.thorough
def test_B102_lengths_after_fifty_rounds() -> None:
    """With a of k drafts accepted the target goes back by k - a, and no round adds a row."""
    config = SmolLM2Config(num_layers=1, vocab_size=60, context_length=256)
    model = with_own_head(SmolLM2.random(config, 5, attention="gqa", dtype=torch.float64))
    text = list(generate(model, PROMPT, max_new_tokens=200))
    drafter = KnowingDrafter([(*PROMPT, *text)], script=[0, 1, 2, 3, 4])
    engine = Engine(model, drafter=drafter, num_drafts=4)
    batches = watch_batches(engine)
    state = engine.add(Request("0", PROMPT, 200))
    engine.step()
    for number in range(50):
        before = state.num_computed
        (output,) = engine.step()
        accepted = number % 5
        assert output.num_accepted == accepted and len(output.drafts) == 4
        ran = batches[-1].items[0].num_tokens
        assert before + ran - state.num_computed == 4 - accepted
        assert state.num_computed == len(PROMPT) + len(state.output_ids) - 1
        # What the drafter is told for its own cache: the valid rows, neither more nor fewer.
        (told,) = drafter.calls[-1]
        assert (told.computed_len, told.num_rows) == (state.num_computed, accepted + 1)
    assert state.output_ids == text[: len(state.output_ids)]
    assert len(state.output_ids) == 1 + 50 + 10 * (0 + 1 + 2 + 3 + 4)


def test_B103_a_step_after_rejected_drafts_is_a_step_that_never_drafted() -> None:
    """The page keeps the rows of three wrong drafts; nobody may see them."""
    drafted, plain = speculating([0]), Engine(small_model("packed"), page_size=4)
    seen: list[list[Tensor]] = []
    for engine in (drafted, plain):
        states: list[Tensor] = []
        execute = engine.runner.execute

        def watched(batch, watch, execute=execute, states=states):
            done = execute(batch, watch)
            states.append(done.hidden[0])
            return done

        engine.runner.execute = watched
        engine.add(Request("0", PROMPT, 6))
        for _ in range(4):
            engine.step()
        seen.append(states)
    assert drafted.acceptance.num_drafted == 3 + 3 + 2 and drafted.acceptance.num_accepted == 0
    for with_drafts, without in zip(*seen, strict=True):
        assert compare(with_drafts, without).agrees(rel_l2=1e-12)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_B104_lengths_advance_by_accepted_plus_one_and_once(accepted: int) -> None:
    engine = speculating([accepted])
    batches = watch_batches(engine)
    state = engine.add(Request("0", PROMPT, MOST_NEW))
    engine.step()
    for _ in range(2):
        before = state.num_computed
        engine.step()
        assert state.num_computed == before + accepted + 1
    # The next step starts there: its first row has that position and sees that many keys and one.
    engine.step()
    step = batches[-1].step
    assert int(step.positions[0]) == before + accepted + 1
    assert int(step.visible_lens[0]) == before + accepted + 2


def test_B109_a_drafter_that_is_always_right_and_one_that_never_is() -> None:
    for script, length in (([3], 4.0), ([0], 1.0)):
        engine = speculating(script)
        (state,) = engine.run([Request("0", PROMPT, 13)])
        assert state.output_ids == list(TEXT[5:18])
        assert engine.acceptance.mean_acceptance_length == length


# --- ends of requests


def test_an_end_token_among_accepted_drafts_cuts_off_the_rest() -> None:
    eos_id = TEXT[8]
    assert eos_id not in TEXT[5:8]
    engine = speculating([3])
    state = engine.add(Request("0", PROMPT, MOST_NEW, eos_id=eos_id))
    engine.step()
    calls = len(engine.runner.drafter.calls)
    (output,) = engine.step()
    assert output.token_ids == TEXT[6:9] and output.finish_reason == "eos"
    # The verifier accepted three drafts; the token behind them is not wanted.
    assert output.num_accepted == 3
    assert state.output_ids == list(TEXT[5:9]) and not engine.requests
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_pages
    # Nobody drafts for a request that has ended.
    assert len(engine.runner.drafter.calls) == calls
    assert engine.step() == []


@pytest.mark.parametrize("new", range(1, 9))
def test_no_more_tokens_than_asked_for_and_no_draft_in_vain(new: int) -> None:
    engine = speculating([3])
    state = engine.add(Request("0", PROMPT, new))
    for output in engine.stream():
        assert len(output.drafts) <= new - (len(state.output_ids) - len(output.token_ids)) - 1
    assert state.output_ids == list(TEXT[5 : 5 + new]) and state.finish_reason == "length"


def test_the_context_can_be_filled_to_the_last_token_with_drafts() -> None:
    context = small_model("gqa").config.context_length
    request = Request("0", PROMPT, context - len(PROMPT))
    model = small_model("gqa")
    text = list(generate(model, PROMPT, max_new_tokens=request.max_new_tokens))
    drafter = KnowingDrafter([(*PROMPT, *text)], model, wrong=0.3)
    engine = Engine(model, drafter=drafter, num_drafts=4, page_size=8)
    (state,) = serve(engine, [request], [0])
    assert state.output_ids == text


def test_no_drafts_are_wanted_or_none_are_proposed() -> None:
    class Silent(KnowingDrafter):
        def propose(self, requests, *args):
            return [Draft([]) for _ in requests]

    for drafter, n in ((KnowingDrafter([]), 0), (Silent([]), 3)):
        engine = Engine(small_model("packed"), drafter=drafter, num_drafts=n)
        (state,) = engine.run([Request("0", PROMPT, 6)])
        assert state.output_ids == list(TEXT[5:11])
        assert engine.acceptance.num_drafts == 0


@pytest.mark.parametrize(
    "token_ids, message",
    [
        ([1, 2, 3, 4], "drafter 'bad' must propose at most 3 ids below 60 for request '0'"),
        ([60], r"at most 3 ids below 60 for request '0', got \[60\]"),
        ([-1], "drafter 'bad': a draft for request '0' must be at least 0, got -1"),
        ([np.int64(3)], r"drafter 'bad': a draft .* must be an int, got .*\(int64\)"),
        ([3.0], r"drafter 'bad': a draft for request '0' must be an int, got 3.0"),
        ([torch.tensor(3)], "a draft for request '0' must be an int, got a int64 tensor"),
        ([1], "must choose its drafts, but has sampled them"),
        (None, "drafter 'bad' must propose for each of 2 requests, got 1 drafts"),
    ],
    ids=["many", "id", "negative", "numpy", "float", "tensor", "sampled", "one for two"],
)
def test_a_drafter_that_breaks_its_word_is_named(
    plain_calls: None, token_ids: list[Any] | None, message: str
) -> None:
    """And leaves no drafts behind, not even right ones of others: so the next steps go on."""

    class Bad(KnowingDrafter):
        def propose(self, requests, *args):
            self.calls.append(requests)
            if len(self.calls) > 1:
                return [Draft([]) for _ in requests]
            return [Draft([59]), *others]

    probs = torch.ones(1, 60) / 60 if "sampled" in message else None
    others = [] if token_ids is None else [Draft(token_ids, probs)]
    engine = Engine(small_model("packed"), drafter=Bad([], name="bad"), num_drafts=3)
    first = engine.add(Request("1", PROMPT, 6))
    second = engine.add(Request("0", PROMPT, 6))
    with pytest.raises((TypeError, ValueError), match=message):
        engine.step()
    assert first.drafts == second.drafts == ()
    list(engine.stream())
    assert first.output_ids == second.output_ids == list(TEXT[5:11])


def test_a_drafter_that_fails_leaves_a_request_without_drafts() -> None:
    """Not with those that were judged already; its tokens stand in its state."""

    class Failing(KnowingDrafter):
        def propose(self, requests, *args):
            self.calls.append(requests)
            if len(self.calls) == 2:
                raise RuntimeError("no drafts today")
            return [Draft([59] * request.num_drafts) for request in requests]

    engine = Engine(small_model("packed"), drafter=Failing([]), num_drafts=3)
    state = engine.add(Request("0", PROMPT, 6))
    engine.step()
    assert len(state.drafts) == 3
    with pytest.raises(RuntimeError, match="no drafts today"):
        engine.step()
    assert state.drafts == () and state.output_ids == list(TEXT[5:7])
    list(engine.stream())
    assert state.output_ids == list(TEXT[5:11])


# --- sampled requests

SEEDED = Request("s", prompt(2), 10, SamplingParams(temperature=1.0, seed=42))


def sampled(requests: list[Request], **settings: object) -> tuple[list[int], RequestState, Engine]:
    engine = Engine(small_model("packed"), page_size=4, **settings)
    states = engine.run(requests)
    state = next(state for state in states if state.request is SEEDED)
    return state.output_ids, state, engine


def others(count: int, **sampling: object) -> list[Request]:
    return [
        Request(str(i), prompt(i), 9, SamplingParams(**({"seed": i} | sampling)))
        for i in range(count)
    ]


def test_B106_the_noise_of_a_token_is_that_of_its_place_in_the_output() -> None:
    """By hand: the whole text again for every token, and the noise of (seed, place)."""
    model, ids = small_model("packed"), list(SEEDED.prompt_ids)
    for place in range(SEEDED.max_new_tokens):
        step = Step.one_request(0, len(ids), len(ids))
        hidden = model.forward(torch.tensor(ids), step, model.new_cache(1, len(ids)))
        probs = model.logits(hidden[-1:])[0].softmax(0)
        ids.append(int((probs / position_noise(42, place, len(probs)).exponential).argmax()))
    assert sampled([SEEDED])[0] == ids[len(SEEDED.prompt_ids) :]


def test_B106_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    alone, _, _ = sampled([SEEDED])
    assert alone != plain_tokens("packed", SEEDED.prompt_ids, 10)
    for neighbours in (
        others(1),
        others(1, temperature=0.7),
        others(3, temperature=0.7),
        # The same seed in another request, at other positions of the step.
        others(2, temperature=1.0, seed=42),
    ):
        assert sampled([SEEDED, *neighbours])[0] == alone
        assert sampled([*neighbours, SEEDED])[0] == alone
    assert sampled([SEEDED], max_num_batched_tokens=8, pad_to=4)[0] == alone
    assert sampled([SEEDED], max_chunk=3)[0] == alone
    assert sampled([*others(2, temperature=0.7), SEEDED], max_num_batched_tokens=3)[0] == alone


def test_B106_a_seeded_request_goes_on_as_before_after_a_preemption() -> None:
    alone, _, _ = sampled([SEEDED])
    first = Request("0", prompt(1), 16)
    tokens, state, _ = sampled([first, SEEDED], num_pages=9)
    assert state.num_preemptions > 0
    assert tokens == alone


def test_B106_with_drafts_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    """The drafts are the same, since they are made from the request's own text."""
    settings = {"drafter": NgramDrafter(3, min_ngram=1), "num_drafts": 3}
    alone, _, engine = sampled([SEEDED], **settings)
    assert engine.acceptance.num_drafted > 0
    assert sampled([*others(3, temperature=0.7), SEEDED], **settings)[0] == alone
    assert sampled([SEEDED, *others(2)], **settings)[0] == alone


@pytest.mark.thorough
def test_a_backends_sampler_judges_sampled_requests_alone() -> None:
    calls = []

    def sampler(*arguments):
        calls.append(arguments)
        return rejection_sample(*arguments)

    def run(sampling: SamplingParams, **more) -> tuple[int, ...]:
        engine = Engine(small_model("gqa"), page_size=4, **more)
        (state,) = engine.run([Request("r", prompt(2), 4, sampling)])
        return tuple(state.output_ids)

    sampled = SamplingParams(temperature=1.0, seed=3)
    assert run(sampled, sampler=sampler) == run(sampled) and len(calls) == 4
    run(SamplingParams(), sampler=sampler)
    assert len(calls) == 4


def test_sampled_requests_with_drafts_have_the_law_of_plain_sampling() -> None:
    """First two tokens of many requests, the second with a draft: counts against plain ones."""

    class Same(KnowingDrafter):
        """Drafts 58, which is the second token of every fourth request or so."""

        def propose(self, requests, *args):
            return [Draft([58] * request.num_drafts) for request in requests]

    counts = []
    for drafter in (Same([]), None):
        engine = Engine(
            small_model("gqa"),
            drafter=drafter,
            num_drafts=1 if drafter else 0,
            max_num_seqs=50,
            page_size=8,
        )
        requests = [
            Request(str(seed), prompt(1), 3, SamplingParams(1.0, 3, seed=seed))
            for seed in range(200)
        ]
        counts.append(Counter(tuple(s.output_ids[:2]) for s in engine.run(requests)))
        if drafter:
            assert 0.1 < engine.acceptance.acceptance_rate < 0.6
    drafted, plain = counts
    assert len(plain) > 5
    # Both are samples of one law: no pair's count differs by more than chance makes likely.
    for pair in drafted | plain:
        a, b = drafted[pair], plain[pair]
        assert abs(a - b) <= 4 * (a + b) ** 0.5

"""The engine from outside: requests in, tokens out, whatever stands between them."""

import pytest
import torch
from tests.engine.serving import (
    MOST_NEW,
    VOCAB,
    KnowingDrafter,
    plain_answer,
    plain_tokens,
    prompt,
    serve,
    small_model,
    watch_batches,
)

from mla_ref.engine import PARTS, Engine, Request, Status
from mla_ref.speculative import SamplingParams


def requests_of(*numbers: int, new: int = 8, **more: object) -> list[Request]:
    return [Request(str(i), prompt(n), new, **more) for i, n in enumerate(numbers)]


def knowing(kind: str, requests: list[Request], **more: object) -> KnowingDrafter:
    texts = [(*r.prompt_ids, *plain_tokens(kind, r.prompt_ids, MOST_NEW)) for r in requests]
    return KnowingDrafter(texts, **more)


def test_an_empty_engine_does_nothing() -> None:
    engine = Engine(small_model("packed"))
    assert engine.step() == [] and engine.run([]) == [] and list(engine.stream()) == []
    assert engine.timeline == [] and engine.requests == {}


def test_one_token_in_and_one_token_out() -> None:
    engine = Engine(small_model("packed"), page_size=1, num_pages=1)
    request = Request("0", prompt(0), 1)
    assert len(request.prompt_ids) == 1
    (state,) = serve(engine, [request], [0])
    assert state.output_ids == plain_tokens("packed", prompt(0), 1)
    assert len(engine.timeline) == 1 and state.finish_reason == "length"


def test_a_step_reports_what_it_did_and_how_long_each_part_took() -> None:
    requests = requests_of(2, 1, new=6)
    drafter = knowing("sparse", requests)
    engine = Engine(
        small_model("sparse"), drafter=drafter, num_drafts=2, max_num_batched_tokens=16, pad_to=4
    )
    heard = [(o, engine.timeline[-1]) for o in engine.stream(requests)]
    output, record = heard[0]
    assert (output.request_id, output.token_ids, output.num_prefilled) == ("0", (), 16)
    assert (record.num_tokens, record.num_prefill_tokens, record.num_new_tokens) == (16, 16, 0)
    second = engine.timeline[1]
    assert (second.num_reqs, second.num_tokens, second.num_tokens_padded) == (2, 7, 8)
    assert (second.num_prefill_tokens, second.num_new_tokens) == (7, 2)
    third = engine.timeline[2]
    assert (third.num_tokens, third.num_drafts, third.num_accepted) == (6, 4, 4)
    assert third.num_new_tokens == 6 and third.preempted == ()
    assert (third.route, third.reason) == ("decode", "verifier")
    for record in engine.timeline:
        assert tuple(record.seconds) == PARTS
        # A part may take less than a tick of the clock.
        assert all(seconds >= 0 for seconds in record.seconds.values())
        assert record.total_seconds == sum(record.seconds.values()) > 0
    assert [o.token_ids for o, _ in heard if o.request_id == "1"][-1] == tuple(
        plain_tokens("sparse", prompt(1), 6)[4:]
    )


@pytest.mark.parametrize("kind, pad_to", [("packed", 5), ("gqa", 2), ("sparse", 2), ("sparse", 16)])
def test_padding_changes_nothing(kind: str, pad_to: int) -> None:
    requests = requests_of(2, 1, 5)
    engine = Engine(
        small_model(kind),
        drafter=knowing(kind, requests, wrong=0.3),
        num_drafts=3,
        max_num_batched_tokens=pad_to * 2,
        max_num_seqs=3,
        page_size=4,
        pad_to=pad_to,
    )
    batches = watch_batches(engine)
    states = serve(engine, requests, [0, 0, 2])
    assert [s.output_ids for s in states] == [plain_tokens(kind, r.prompt_ids, 8) for r in requests]
    for batch in batches:
        step = batch.step
        assert step.num_tokens_padded % pad_to == 0
        assert step.num_reqs <= step.num_reqs_padded <= 3
        assert batch.token_ids[step.num_tokens :].eq(0).all()
        assert step.slot_mapping[step.num_tokens :].eq(-1).all()
    assert any(b.step.num_tokens_padded > b.step.num_tokens for b in batches)


# --- where rows go

ROUTES = {
    "auto": ("decode", "verifier"),
    "0": ("extend", "mode-off"),
    "1": ("decode", "verifier"),
}


@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_a_mode_that_is_none_is_refused_by_every_model(kind: str) -> None:
    with pytest.raises(ValueError, match="mode must be one of .*got 'sometimes'"):
        Engine(small_model(kind), mode="sometimes")


@pytest.mark.parametrize("mode", ROUTES)
def test_a_verifier_batch_goes_where_the_mode_says_and_gives_the_same(mode: str) -> None:
    requests = requests_of(2, 1)
    engine = Engine(
        small_model("sparse"), drafter=knowing("sparse", requests), num_drafts=3, mode=mode
    )
    batches = watch_batches(engine)
    states = serve(engine, requests, [0, 0])
    assert [s.output_ids for s in states] == [
        plain_tokens("sparse", r.prompt_ids, 8) for r in requests
    ]
    verifiers = [
        (record.route, record.reason)
        for batch, record in zip(batches, engine.timeline, strict=True)
        if any(item.drafts for item in batch.items)
    ]
    assert len(verifiers) == 2 and set(verifiers) == {ROUTES[mode]}
    assert (engine.timeline[0].route, engine.timeline[0].num_prefill_tokens) == ("extend", 23)


def test_a_chunk_takes_the_batch_to_extend_or_only_itself() -> None:
    """Two requests verify drafts when the prompt of a third comes."""
    requests = requests_of(1, 5, 2)
    routes = []
    for per_request in (False, True):
        engine = Engine(
            small_model("sparse"),
            drafter=knowing("sparse", requests),
            num_drafts=3,
            per_request_routes=per_request,
        )
        batches = watch_batches(engine)
        states = serve(engine, requests, [0, 0, 1])
        assert [s.output_ids for s in states] == [
            plain_tokens("sparse", r.prompt_ids, 8) for r in requests
        ]
        assert [item.num_tokens for item in batches[1].items] == [4, 4, 20]
        assert batches[1].step.is_prefilling.tolist() == [False, False, True]
        routes.append((engine.timeline[1].route, engine.timeline[1].reason))
    assert routes == [("extend", "prefill-in-batch"), ("mixed", "prefill-in-batch")]


def test_verifiers_stand_in_front_of_chunks_though_they_came_later() -> None:
    requests = requests_of(2, 1)
    engine = Engine(
        small_model("sparse"),
        drafter=knowing("sparse", requests),
        num_drafts=3,
        max_chunk=6,
        per_request_routes=True,
    )
    batches = watch_batches(engine)
    states = serve(engine, requests, [0, 0])
    assert [s.output_ids for s in states] == [
        plain_tokens("sparse", r.prompt_ids, 8) for r in requests
    ]
    order = [[item.state.request.request_id for item in b.items] for b in batches[:3]]
    assert order == [["0", "1"], ["1", "0"], ["1", "0"]]
    assert engine.timeline[1].route == "mixed"


def test_a_resumed_request_is_prefilling_until_it_has_run_what_it_had() -> None:
    """By its prompt alone, the rest of its output would pass for a verifier's rows: 2 <= 1 + n."""
    requests = [Request("0", prompt(1), MOST_NEW), Request("1", prompt(1)[::-1], MOST_NEW)]
    engine = Engine(
        small_model("sparse"),
        drafter=knowing("sparse", requests, wrong=1.0),
        num_drafts=3,
        page_size=1,
        num_pages=24,
        max_chunk=2,
        max_num_batched_tokens=16,
    )
    batches = watch_batches(engine)
    states = serve(engine, requests, [0, 0])
    assert states[1].num_preemptions > 0
    assert [s.output_ids for s in states] == [
        plain_tokens("sparse", r.prompt_ids, MOST_NEW) for r in requests
    ]
    seen = 0
    for batch, record in zip(batches, engine.timeline, strict=True):
        starts = batch.step.seq_lens - torch.tensor(batch.step.query_lens)
        for place, item in enumerate(batch.items):
            rerun = item.num_tokens == 2 and not item.drafts and int(starts[place]) >= 3
            if rerun and record.num_reqs == 1:
                assert batch.step.is_prefilling[place]
                assert (record.route, record.reason) == ("extend", "prefill-in-batch")
                seen += 1
    assert seen > 0


# --- life of a request


def test_all_ends_have_their_reason() -> None:
    text = plain_tokens("packed", prompt(5), 8)
    for more, expected in (
        ({}, "length"),
        ({"eos_id": text[3]}, "eos"),
        ({"stop_ids": [VOCAB - 1, text[2]]}, "stop"),
        ({"eos_id": text[2], "stop_ids": [text[2]]}, "eos"),
        ({"eos_id": text[7]}, "eos"),
        ({"eos_id": VOCAB - 1}, "length"),
    ):
        request = Request("0", prompt(5), 8, **more)
        (state,) = Engine(small_model("packed")).run([request])
        assert (state.output_ids, state.finish_reason) == plain_answer("packed", request)
        assert state.finish_reason == expected and state.status == Status.FINISHED


def test_requests_can_be_dropped_while_they_run_and_while_they_wait() -> None:
    requests = requests_of(2, 1, 5)
    engine = Engine(small_model("packed"), max_num_seqs=2, page_size=4)
    states = [engine.add(request) for request in requests]
    for _ in range(3):
        engine.step()
    assert states[2].status == Status.WAITING
    for name in ("0", "2"):
        assert engine.abort(name).finish_reason == "abort"
    assert states[0].output_ids == plain_tokens("packed", prompt(2), 3)
    assert states[2].output_ids == [] and states[0].pages == []
    list(engine.stream())
    assert states[1].output_ids == plain_tokens("packed", prompt(1), 8)
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_pages
    for name in ("0", "1", "never"):
        with pytest.raises(ValueError, match=f"request_id must be of a live request, got '{name}'"):
            engine.abort(name)
    # The name is free again.
    assert engine.run(requests[:1])[0].output_ids == plain_tokens("packed", prompt(2), 8)


def test_others_may_come_while_a_stream_runs() -> None:
    first, second = requests_of(1, 5)
    engine, late = Engine(small_model("packed")), []
    for output in engine.stream([first]):
        if not late:
            late.append(engine.add(second))
        assert output.request_id in ("0", "1")
    assert late[0].output_ids == plain_tokens("packed", prompt(5), 8)


def test_a_request_that_is_aborted_is_not_heard_of_again() -> None:
    """Not even with what the step at hand has given it; one that has ended in it is."""
    requests = [Request("0", prompt(1), 8), Request("1", prompt(5), 8), Request("2", prompt(2), 2)]
    engine, heard, aborted = Engine(small_model("packed")), [], None
    for output in engine.stream(requests):
        heard.append((output.request_id, len(output.token_ids), output.finish_reason))
        if len(engine.timeline) == 2 and aborted is None:
            aborted = engine.abort("1")
            # The name is free again, and its new bearer is heard.
            engine.add(Request("1", prompt(1), 1))
    assert len(aborted.output_ids) == 2
    assert [entry for entry in heard if entry[0] == "1"] == [("1", 1, None), ("1", 1, "length")]
    assert ("2", 1, "length") in heard and heard[-1] == ("0", 1, "length")


def test_a_stream_that_is_left_leaves_its_requests_live() -> None:
    engine = Engine(small_model("packed"))
    for _ in engine.stream(requests_of(1, 5)):
        break
    assert sorted(engine.requests) == ["0", "1"]
    for name in list(engine.requests):
        engine.abort(name)
    assert list(engine.stream()) == []


def test_a_step_that_fails_has_changed_no_text_and_can_be_repeated() -> None:
    requests = requests_of(2, 1)
    engine = Engine(small_model("packed"), max_num_batched_tokens=16, page_size=4)
    states = [engine.add(request) for request in requests]
    engine.step()
    engine.step()
    before = [(s.num_computed, list(s.output_ids)) for s in states]
    model, engine.runner.model = engine.runner.model, Failing(engine.runner.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert [(s.num_computed, list(s.output_ids)) for s in states] == before
    engine.runner.model = model
    list(engine.stream())
    assert [s.output_ids for s in states] == [
        plain_tokens("packed", r.prompt_ids, 8) for r in requests
    ]


class Failing:
    """A model whose last projection fails."""

    def __init__(self, model: object) -> None:
        self.model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_two_runs_are_the_same_step_by_step() -> None:
    requests = requests_of(2, 1, 5)
    runs = []
    for _ in range(2):
        engine = Engine(
            small_model("sparse"),
            drafter=knowing("sparse", requests, wrong=0.4),
            num_drafts=3,
            num_pages=8,
            page_size=4,
            max_num_batched_tokens=9,
        )
        batches = watch_batches(engine)
        serve(engine, requests, [0, 0, 1])
        runs.append([(b.token_ids.tolist(), b.step.slot_mapping.tolist()) for b in batches])
    assert runs[0] == runs[1]


# --- what is refused


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt_ids": []}, "prompt_ids must hold a token at least, got an empty prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"prompt_ids": [-1]}, "prompt_ids must be at least 0, got -1"),
        ({"prompt_ids": [1.5]}, "prompt_ids must be an int, got 1.5"),
        ({"prompt_ids": "ab"}, "prompt_ids must be a sequence of ints, got 'ab'"),
        ({"stop_ids": 3}, "stop_ids must be a sequence of ints, got 3"),
        ({"request_id": 3}, "request_id must be a string, got 3"),
        ({"sampling": None}, "sampling must be SamplingParams, got None"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be(fields: dict[str, object], message: str) -> None:
    fields = {"request_id": "0", "prompt_ids": [1], "max_new_tokens": 1} | fields
    with pytest.raises((TypeError, ValueError), match=message):
        Request(**fields)


@pytest.mark.usefixtures("plain_calls")
def test_a_request_that_the_engine_cannot_serve_is_refused_on_arrival() -> None:
    engine = Engine(small_model("packed"), num_pages=4, page_size=4)
    running = engine.add(Request("0", [1, 2], 4))
    for request, message in (
        (Request("0", [1], 1), "request_id must be new, but '0' is running or waiting"),
        (Request("1", [VOCAB], 1), "request '1': prompt_ids must lie below the vocabulary of 60"),
        (Request("1", [1], 1, eos_id=VOCAB), "request '1': eos_id must lie below .* 60, got 60"),
        (Request("1", [1], 1, stop_ids=[2, 99]), "request '1': stop_ids must lie .* 60, got 99"),
        (Request("1", [1] * 60, 5), r"must fit into the model's context of 64, got 60 \+ 5"),
        (Request("1", [1] * 14, 4), "request '1' may need 5 pages of 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(request)
        assert list(engine.requests) == ["0"]
        # Of several, none is taken if one is refused.
        with pytest.raises(ValueError, match=message):
            engine.stream([Request("fine", [1], 1), request])
        assert list(engine.requests) == ["0"]
        assert list(engine.scheduler.waiting) == [running]
    with pytest.raises(TypeError, match="request must be a Request, got"):
        engine.add([1, 2, 3])


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_drafts": 2}, "num_drafts must be 0 without a drafter, got 2"),
        ({"num_drafts": -1}, "num_drafts must be at least 0, got -1"),
        ({"pad_to": 0}, "pad_to must be at least 1, got 0"),
        ({"pad_to": 3}, "max_num_batched_tokens must be a multiple of pad_to = 3, got 256"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"max_chunk": 0}, "max_chunk must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_pages": -1}, "num_pages must be at least 0, got -1"),
        ({"drafter": 3}, "drafter must be a Drafter or None, got 3"),
        ({"mode": "sometimes"}, "mode must be one of auto, 0"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(small_model("sparse"), **settings)
    with pytest.raises(TypeError, match="model must be a LanguageModel, got None"):
        Engine(None)


def test_by_default_there_are_pages_for_one_request_of_the_whole_context() -> None:
    engine = Engine(small_model("gqa"), page_size=5)
    assert engine.scheduler.blocks.num_pages == 13
    engine.add(Request("0", [1] * 63, 1))


def test_the_cache_stores_the_dtype_asked_for() -> None:
    engine = Engine(small_model("packed"), cache_dtype=torch.bfloat16)
    assert engine.runner.cache.dtype == torch.bfloat16
    (state,) = engine.run([Request("0", prompt(5), 3, SamplingParams())])
    assert len(state.output_ids) == 3

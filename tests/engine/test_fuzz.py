"""Random servers, requests and drafts: every request gets what plain decoding gives it.

Pages that nobody owns hold NaN from the start and again whenever they are freed.
"""

import random
from collections.abc import Sequence

import pytest
from tests.engine.serving import (
    KINDS,
    MOST_NEW,
    VOCAB,
    KnowingDrafter,
    plain_answer,
    plain_tokens,
    prompt,
    serve,
    small_model,
)

from mla_ref.cache import pages_needed
from mla_ref.engine import Engine, Request
from mla_ref.speculative import NgramDrafter

pytestmark = pytest.mark.thorough


def random_requests(rng: random.Random, kind: str) -> list[Request]:
    """Some end by a token of their own text; some have the same prompt."""
    requests: list[Request] = []
    for number in range(rng.randint(2, 5)):
        prompt_ids, new = prompt(rng.randrange(6)), rng.choice([1, 5, 9, MOST_NEW, MOST_NEW])
        text = plain_tokens(kind, prompt_ids, new)
        eos_id = rng.choice(text) if rng.random() < 0.15 else None
        stop_ids = [rng.choice(text), VOCAB - 1] if rng.random() < 0.15 else []
        requests.append(Request(str(number), prompt_ids, new, eos_id=eos_id, stop_ids=stop_ids))
    return requests


def random_engine(rng: random.Random, kind: str, requests: Sequence[Request]) -> Engine:
    """Often with as few pages as the largest request needs."""
    page_size, pad_to = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 4])
    largest = max(pages_needed(r.max_rows, page_size) for r in requests)
    num_drafts = rng.choice([0, 1, 2, 3, 3, 4])
    drafter = None
    if num_drafts:
        texts = [
            (*r.prompt_ids, *plain_tokens(kind, tuple(r.prompt_ids), r.max_new_tokens))
            for r in requests
        ]
        wrong, seed = rng.choice([0.0, 0.2, 0.5, 1.0]), rng.randrange(1000)
        knowing = KnowingDrafter(texts, small_model(kind), wrong, seed)
        drafter = rng.choice([knowing, knowing, knowing, NgramDrafter(num_drafts)])
    return Engine(
        small_model(kind),
        drafter=drafter,
        num_drafts=num_drafts,
        mode=rng.choice(["auto", "auto", "0", "1"]),
        max_num_seqs=rng.randint(2, 4),
        max_num_batched_tokens=pad_to * rng.choice([2, 5, 8, 13, 20]),
        max_chunk=rng.choice([None, None, 1, 3, 6]),
        num_pages=largest + rng.choice([0, 0, 1, 3, 40]),
        page_size=page_size,
        per_request_routes=rng.random() < 0.5,
        pad_to=pad_to,
    )


@pytest.mark.parametrize(
    "seed",
    [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 65))],
)
def test_every_schedule_gives_the_tokens_of_plain_decoding(seed: int) -> None:
    rng = random.Random(seed)
    kind = KINDS[seed % 3]
    requests = random_requests(rng, kind)
    arrivals = sorted(rng.choice([0, 0, 0, 1, 4]) for _ in requests)
    engine = random_engine(rng, kind, requests)
    states = serve(engine, requests, arrivals)
    for request, state in zip(requests, states, strict=True):
        assert (state.output_ids, state.finish_reason) == plain_answer(kind, request)

"""Greedy generation against the plainest loop there is: run the whole text again for each token."""

import pytest
import torch

from mla_ref.batching import Step
from mla_ref.engine import generate
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config

pytestmark = pytest.mark.thorough

CONFIG = SmolLM2Config(num_layers=2, context_length=32)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]


@pytest.fixture(scope="module")
def model() -> SmolLM2:
    return SmolLM2.random(CONFIG, 5)


def without_cache(model: SmolLM2, prompt: list[int], new_tokens: int) -> list[int]:
    """The whole text in one step for every token."""
    ids = list(prompt)
    for _ in range(new_tokens):
        step = Step.one_request(0, len(ids), len(ids))
        hidden = model.forward(torch.tensor(ids), step, model.new_cache(1, len(ids)))
        ids.append(int(model.logits(hidden)[-1].argmax()))
    return ids[len(prompt) :]


def token_ids(model: SmolLM2, prompt: list[int], **settings: object) -> list[int]:
    return list(generate(model, prompt, **settings))


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    token_ids = without_cache(model.with_attention("gqa"), PROMPT, 12)
    # Tokens that repeat would hide an error of one position.
    assert len(set(token_ids)) > 6
    return token_ids


@pytest.mark.parametrize(
    "attention, page_size, chunk_size",
    [
        ("packed", 64, 256),
        ("packed", 1, 1),
        ("packed", 4, 5),
        ("packed", 16, 4),
        ("packed", 13, 13),
        ("split", 4, 5),
        ("gqa", 4, 5),
    ],
)
def test_the_tokens_are_those_of_a_run_without_a_cache(
    model, expected, attention, page_size, chunk_size
):
    model = model.with_attention(attention)
    settings = {"page_size": page_size, "chunk_size": chunk_size}
    assert token_ids(model, PROMPT, max_new_tokens=12, **settings) == expected


def test_one_token_prompt_and_one_new_token(model):
    assert token_ids(model, PROMPT[:1], max_new_tokens=1) == without_cache(model, PROMPT[:1], 1)


def test_the_context_can_be_filled_to_the_last_token(model):
    new = CONFIG.context_length - len(PROMPT)
    assert token_ids(model, PROMPT, max_new_tokens=new) == without_cache(model, PROMPT, new)


def test_it_ends_at_the_end_token(model, expected):
    eos_id = expected[4]
    tokens = token_ids(model, PROMPT, max_new_tokens=12, eos_id=eos_id)
    assert tokens == expected[: expected.index(eos_id) + 1]


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ([], {}, "prompt_ids must hold a token at least, got an empty prompt"),
        ([1, CONFIG.vocab_size], {}, "prompt_ids must lie below the vocabulary"),
        ([-1], {}, "prompt_ids must be at least 0, got -1"),
        (PROMPT, {"eos_id": -7}, "eos_id must be at least 0, got -7"),
        (PROMPT, {"eos_id": 10**6}, "eos_id must lie below the vocabulary of .*, got 1000000"),
        (PROMPT, {"max_new_tokens": 20}, r"the model's context of 32, got 13 \+ 20"),
        ([1] * 32, {}, r"the model's context of 32, got 32 \+ 1"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (PROMPT, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (PROMPT, {"page_size": 0}, "page_size must be at least 1, got 0"),
    ],
)
def test_a_request_that_cannot_be_is_refused_at_the_call(
    model, prompt, settings, message, plain_calls
):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1, **settings})


@pytest.mark.parametrize(
    "prompt, eos_id, message",
    [
        ([1.0, 2.0], None, "prompt_ids must be an int, got 1.0"),
        (PROMPT, float("nan"), "eos_id must be an int, got nan"),
    ],
)
def test_what_is_no_token_is_refused_at_the_call(model, prompt, eos_id, message, plain_calls):
    with pytest.raises(TypeError, match=message):
        generate(model, prompt, max_new_tokens=1, eos_id=eos_id)


def test_the_cache_stores_the_dtype_asked_for(model, monkeypatch):
    made = []
    new_cache = model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda *args: made.append(new_cache(*args)) or made[-1])
    token_ids(model, PROMPT, max_new_tokens=4, page_size=4, cache_dtype=torch.bfloat16)
    (cache,) = made
    # 13 + 4 tokens, of which the last is never run: 16 rows, 4 pages, no page to spare.
    assert cache.dtype == torch.bfloat16 and cache.shape[1] == 4
    assert (cache != 0).flatten(3).any(-1).all()

"""A request's text: whole characters, no end token, nothing of the stop text."""

import random

import pytest
from tests.engine.byte_tokenizer import ByteTokenizer

from mla_ref.engine import Transcript

TOKENIZER = ByteTokenizer()


def written(text: bytes, *, steps: int = 1, reason: str = "length", stop: str | None = None):
    """A transcript of that text in steps of so many tokens, and the pieces it gave."""
    transcript, pieces = Transcript(TOKENIZER, stop), []
    for first in range(0, len(text), steps):
        last = first + steps >= len(text)
        pieces += transcript.add(list(text[first : first + steps]), reason if last else None)
        if transcript.finish_reason:
            break
    return transcript, pieces


@pytest.mark.parametrize("steps", [1, 2, 3, 99])
def test_characters_come_when_they_are_whole(steps):
    transcript, pieces = written("aß€".encode(), steps=steps)
    assert pieces == ["a", "", "ß", "", "", "€"]
    assert (transcript.text, transcript.finish_reason) == ("aß€", "length")
    transcript, pieces = written("a€".encode()[:-1], steps=steps)
    assert pieces == ["a", "", "\ufffd"] and transcript.text == "a\ufffd"


@pytest.mark.parametrize("reason", ["eos", "stop"])
def test_the_token_that_ends_a_text_is_kept_and_not_shown(reason):
    transcript, pieces = written(b"ab\0", steps=2, reason=reason)
    assert pieces == ["a", "b", ""]
    assert (transcript.token_ids, transcript.text) == ([97, 98, 0], "ab")
    assert transcript.finish_reason == reason


@pytest.mark.parametrize("steps", [1, 2, 4, 99])
def test_a_text_ends_in_front_of_the_stop_text_and_shows_nothing_of_it(steps):
    transcript, pieces = written(b"x aab aabc rest", steps=steps, stop="aabc")
    assert transcript.text == "x aab " and "".join(pieces) == "x aab "
    assert transcript.token_ids == list(b"x aab aabc")
    assert transcript.finish_reason == "stop" and len(pieces) == 10
    # What might have been its beginning is held, and comes when it was not.
    assert pieces[:6] == ["x", " ", "", "", "", "aab "]


def test_what_is_held_comes_at_the_end():
    assert written(b"xaa", stop="aab")[0].text == "xaa"
    assert written(b"xaa\0", reason="eos", stop="aab")[0].text == "xaa"


def test_a_stop_text_is_found_wherever_it_stands():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 30)))
        stop = "".join(rng.choices("ab", k=rng.randrange(1, 5)))
        transcript, _ = written(text.encode(), steps=rng.randrange(1, 6), stop=stop)
        assert transcript.text == text.partition(stop)[0]
        assert transcript.finish_reason == ("stop" if stop in text else "length")

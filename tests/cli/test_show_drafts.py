"""The marks of drafts: what stands between none is the text itself."""

import random
import re

import pytest

from mla_ref.cli.show_drafts import COLOURS, PLAIN, marked, marks_for_stdout
from mla_ref.engine import Output


def output(token_ids, drafts=(), num_accepted=0, finish_reason=None):
    return Output("a", tuple(token_ids), tuple(drafts), num_accepted, 0, finish_reason)


def shown(token_ids, drafts, num_accepted, pieces=None, marks=PLAIN):
    pieces = list(map(chr, token_ids)) if pieces is None else pieces
    return marked(output(token_ids, drafts, num_accepted), pieces, chr, marks)


@pytest.mark.parametrize(
    "tokens, drafts, accepted, expected",
    [
        (b"x", b"", 0, "x"),
        (b"abx", b"ab", 2, "{+ab+}x"),
        (b"ax", b"abc", 1, "{+a+}[-bc-]x"),
        (b"x", b"ab", 0, "[-ab-]x"),
        # Ended by an accepted draft: the next one was neither accepted nor rejected.
        (b"a", b"ab", 2, "{+a+}"),
        (b"a", b"ab", 1, "{+a+}"),
        # What is rejected breaks no line; what is accepted does.
        (b"\nx", b"\n\n", 1, "{+\n+}[-\\n-]x"),
        (b"", b"", 0, ""),
    ],
)
def test_each_token_has_its_mark(tokens, drafts, accepted, expected):
    assert shown(tokens, drafts, accepted) == expected


def test_tokens_without_characters_leave_no_empty_marks():
    assert shown(b"ab", b"a", 1, pieces=["", ""]) == ""
    assert shown(b"ab", b"a", 1, pieces=["", "€"]) == "€"
    assert shown(b"abc", b"ab", 2, pieces=["a"]) == "{+a+}"


def test_colours():
    text = shown(b"abx", b"abc"[:2] + b"c", 2, marks=COLOURS)
    assert text == "\x1b[32mab\x1b[0m\x1b[31m\x1b[9mc\x1b[0m\x1b[1m\x1b[4mx\x1b[0m"
    assert COLOURS.legend.count("\x1b[0m") == 3 and PLAIN.legend.startswith("{+drafted and acc")
    assert "\n" not in PLAIN.legend + COLOURS.legend


def test_without_the_rejected_drafts_and_the_marks_stands_the_text():
    rng = random.Random(1)
    for _ in range(200):
        drafts = rng.choices(b"abc\n", k=rng.randrange(5))
        accepted = rng.randrange(len(drafts) + 1)
        tokens = drafts[:accepted] + [rng.choice(b"xyz")]
        kept = re.sub(r"\[-.*?-\]", "", shown(tokens, drafts, accepted))
        assert kept.replace("{+", "").replace("+}", "") == bytes(tokens).decode()


@pytest.mark.parametrize(
    "terminal, environment, marks",
    [
        (True, {}, COLOURS),
        (False, {}, PLAIN),
        (True, {"NO_COLOR": "1"}, PLAIN),
        (True, {"NO_COLOR": ""}, COLOURS),
        (True, {"TERM": "dumb"}, PLAIN),
    ],
)
def test_colours_are_for_terminals_that_want_them(monkeypatch, terminal, environment, marks):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert marks_for_stdout() is marks

"""The switch: words, precedence, and what a slip of the operator does."""

import warnings

import pytest
from tests.support import raw

from mla_ref.batching import SpecMode, read_max_q, read_mode
from mla_ref.batching.modes import MAX_Q_VARIABLES, MODE_VARIABLES

OURS, THEIRS = MODE_VARIABLES
OUR_MAX_Q, THEIR_MAX_Q = MAX_Q_VARIABLES


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (("auto", "AUTO", " Auto\t"), SpecMode.AUTO),
        (("0", "false", "off", "no", "OFF", " No ", "False\n"), SpecMode.OFF),
        (("1", "true", "on", "yes", "On", " TRUE "), SpecMode.FORCED),
    ],
)
def test_the_originals_words_in_any_case_and_with_blanks(words, mode) -> None:
    for word in words:
        assert read_mode(word, {}) is mode
        assert read_mode(None, {THEIRS: word}) is mode
    assert read_mode(mode, {}) is mode


def test_names_of_the_variables() -> None:
    assert MODE_VARIABLES == (
        "MLA_REF_SPEC_EXTEND_AS_DECODE",
        "VLLM_B12X_MLA_SPEC_EXTEND_AS_DECODE",
    )
    assert MAX_Q_VARIABLES == ("MLA_REF_SPEC_DECODE_MAX_Q", "VLLM_B12X_MLA_SPEC_DECODE_MAX_Q")


def test_the_argument_then_ours_then_the_originals_then_auto() -> None:
    environ = {OURS: "0", THEIRS: "1"}
    assert read_mode("auto", environ) is SpecMode.AUTO
    assert read_mode(None, environ) is SpecMode.OFF
    assert read_mode(None, {THEIRS: "1"}) is SpecMode.FORCED
    assert read_mode(None, {}) is SpecMode.AUTO
    limits = {OUR_MAX_Q: "5", THEIR_MAX_Q: "6"}
    assert read_max_q(4, limits) == 4
    assert read_max_q(None, limits) == 5
    assert read_max_q(None, {THEIR_MAX_Q: " 6 "}) == 6
    assert read_max_q(None, {}) == 8


def test_the_environment_is_read_at_the_call(monkeypatch) -> None:
    for name in (*MODE_VARIABLES, *MAX_Q_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert (read_mode(), read_max_q()) == (SpecMode.AUTO, 8)
    monkeypatch.setenv(THEIRS, "off")
    monkeypatch.setenv(OUR_MAX_Q, "12")
    assert (read_mode(), read_max_q()) == (SpecMode.OFF, 12)


@pytest.mark.parametrize("word", ["", "2", "maybe", "autos", "-1"])
def test_another_word_is_refused_by_name_with_the_list(word) -> None:
    for name in MODE_VARIABLES:
        with pytest.raises(ValueError, match=name) as error:
            read_mode(None, {name: word})
        for good in ("auto", "0", "false", "off", "no", "1", "true", "on", "yes"):
            assert f" {good}," in str(error.value).replace("one of", ",")
    with pytest.raises(ValueError, match="mode must be one of auto"):
        read_mode(word, {})


@pytest.mark.parametrize("value", [True, 1, 0.0])
def test_a_mode_that_is_no_word_is_refused(value) -> None:
    with pytest.raises(ValueError, match="mode must be one of"):
        raw(read_mode)(value, {})


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "2.5", "8 8"])
def test_a_bad_max_q_in_the_environment_warns_and_is_8(text) -> None:
    for name in MAX_Q_VARIABLES:
        with pytest.warns(UserWarning, match=name):
            assert read_max_q(None, {name: text}) == 8
    # A slip in ours does not let the other one through.
    with pytest.warns(UserWarning, match=OUR_MAX_Q):
        assert read_max_q(None, {OUR_MAX_Q: text, THEIR_MAX_Q: "6"}) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_max_q(3, {OUR_MAX_Q: text}) == 3


@pytest.mark.parametrize("value", [0, -1, True, "8", 2.0])
def test_a_bad_max_q_as_an_argument_is_refused(value) -> None:
    with pytest.raises((TypeError, ValueError), match="max_q"):
        raw(read_max_q)(value, {})

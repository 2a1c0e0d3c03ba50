"""An example is printed as its author quoted it, and split as a shell splits it."""

from mla_ref.cli.example import Example


def test_a_string_keeps_its_quotes_and_is_split_like_a_shell_does():
    example = Example('generate "two words" --tokens 4', "note")
    assert example.line == 'mla-ref generate "two words" --tokens 4'
    assert example.argv == ("generate", "two words", "--tokens", "4")


def test_words_are_taken_as_they_are_and_quoted_for_print():
    example = Example(("generate", "two words"), "note", needs_model=True)
    assert example.argv == ("generate", "two words")
    assert example.line == "mla-ref generate 'two words'"

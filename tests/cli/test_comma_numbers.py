"""Numbers with commas: what is read, and what is said of anything else."""

import pytest

from mla_ref.cli.comma_numbers import comma_numbers


def test_numbers_with_commas_and_spaces() -> None:
    assert comma_numbers("--rows", "4, 16,64", such_as="4,16") == [4, 16, 64]
    assert comma_numbers("--layers", "0", such_as="0,14", at_least=0) == [0]


@pytest.mark.parametrize("text", ["", "4,", "4,,16", "x", "-4", "+4", "4.0", "1e3", "²", "0,4"])
def test_anything_else_is_named_with_its_option(text: str) -> None:
    with pytest.raises(ValueError, match="^--rows must be numbers of 1 or more with") as error:
        comma_numbers("--rows", text, such_as="4,16")
    assert str(error.value).endswith(f", such as 4,16; got {text!r}")

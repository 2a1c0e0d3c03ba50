"""Numbers with commas, as options take them."""


def comma_numbers(name: str, text: str, *, such_as: str, at_least: int = 1) -> list[int]:
    """The numbers of a text such as 8,64,128.

    Args:
        name: The option, for the message.
        text: What the user gave.
        such_as: An example, for the message.
        at_least: The least that a number may be.

    Raises:
        ValueError: A word is no whole number, or a smaller one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= at_least for word in words):
        raise ValueError(
            f"{name} must be numbers of {at_least} or more with commas, such as {such_as}; got "
            f"{text!r}"
        )
    return [int(word) for word in words]

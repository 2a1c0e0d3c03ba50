"""The three modes of the switch that sends verifier batches to decode, and where they are set.

The original (local-inference-lab/vllm#164) reads two environment variables. This project has its
own two and falls back on those, so that a server's environment can be taken over as it is.
"""

import os
import warnings
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from mla_ref.checks import describe, require_count

DEFAULT_MAX_Q = 8
# The first one that is set counts.
MODE_VARIABLES = ("MLA_REF_SPEC_EXTEND_AS_DECODE", "VLLM_B12X_MLA_SPEC_EXTEND_AS_DECODE")
MAX_Q_VARIABLES = ("MLA_REF_SPEC_DECODE_MAX_Q", "VLLM_B12X_MLA_SPEC_DECODE_MAX_Q")


class SpecMode(StrEnum):
    """Which batches of several tokens a request go to decode.

    Attributes:
        AUTO: Those of a verifier: see `classify`.
        OFF: None.
        FORCED: All whose requests have few enough tokens, short prefill chunks included.
    """

    AUTO = "auto"
    OFF = "0"
    FORCED = "1"


WORDS = MappingProxyType(
    {
        SpecMode.AUTO: ("auto",),
        SpecMode.OFF: ("0", "false", "off", "no"),
        SpecMode.FORCED: ("1", "true", "on", "yes"),
    }
)


def parse_mode(name: str, text: object) -> SpecMode:
    """The mode that a word means, in any case and with blanks around it.

    Raises:
        ValueError: It is none of `WORDS`; the message lists them and holds `name`.
    """
    if isinstance(text, str):
        for mode, words in WORDS.items():
            if text.strip().lower() in words:
                return mode
    listed = ", ".join(word for words in WORDS.values() for word in words)
    raise ValueError(f"{name} must be one of {listed}, got {describe(text)}")


def read_mode(
    mode: str | SpecMode | None = None, environ: Mapping[str, str] | None = None
) -> SpecMode:
    """The mode: the argument, else the first variable that is set, else auto.

    Args:
        mode: A mode or a word for one; None: look into the environment.
        environ: The environment; None: the process's own, as it is now.

    Raises:
        ValueError: A word that means no mode; the message names the argument or the variable.
    """
    if mode is not None:
        return parse_mode("mode", mode)
    found = _first_set(MODE_VARIABLES, environ)
    return SpecMode.AUTO if found is None else parse_mode(*found)


def read_max_q(max_q: int | None = None, environ: Mapping[str, str] | None = None) -> int:
    """The most tokens a request that decode takes: the argument, else a variable, else 8.

    A bad variable gives the default and a warning, as in the original: an operator's slip must not
    stop a server. A bad argument is a ValueError.

    Args:
        max_q: At least 1; None: look into the environment.
        environ: The environment; None: the process's own, as it is now.
    """
    if max_q is not None:
        return require_count("max_q", max_q, at_least=1)
    found = _first_set(MAX_Q_VARIABLES, environ)
    if found is None:
        return DEFAULT_MAX_Q
    name, text = found
    try:
        return require_count(name, int(text), at_least=1)
    except ValueError:
        warnings.warn(
            f"{name} must be an int of at least 1, got {text!r}: {DEFAULT_MAX_Q} is used",
            stacklevel=2,
        )
        return DEFAULT_MAX_Q


def _first_set(names: tuple[str, ...], environ: Mapping[str, str] | None) -> tuple[str, str] | None:
    """The first variable that is set, with its text."""
    environ = os.environ if environ is None else environ
    return next(((name, environ[name]) for name in names if name in environ), None)

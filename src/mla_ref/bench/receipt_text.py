"""The text of a receipt: nothing in it names a machine or its user, and it reads back strictly."""

import getpass
import platform
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

# /home/me/kernel.so and C:\Users\me\kernel.so, but not 656 B/token or tests/quant.py
_PATH = re.compile(r"(?<![\w.)/])(?:[A-Za-z]:)?[/\\](?:[^\s:;,'\"/\\]+[/\\])+")
# A user of such a name is nobody, and the words stand in many messages.
_NOBODY = ("root", "user", "admin", "ubuntu", "runner", "nobody")


def private_words() -> tuple[str, ...]:
    """The names of this machine and its user."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such entry, as in some containers
        user = ""
    names = {platform.node(), user, Path.home().name}
    return tuple(sorted(n for n in names if len(n) > 2 and n.lower() not in _NOBODY))


def public_text(text: str) -> str:
    """A message without folders and without the names of this machine and its user."""
    text = _PATH.sub("", text)
    for word in private_words():
        text = _whole(word).sub("...", text)
    return text


def require_public(text: str) -> str:
    """Return a receipt's text, or raise a ValueError that says what of it is private."""
    found = [match.group() for match in _PATH.finditer(text)]
    found += [word for word in private_words() if _whole(word).search(text)]
    if found:
        raise ValueError(f"the receipt would name this machine or its user: {', '.join(found)}")
    return text


def _whole(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")


def from_json(kind: Any, data: Any, where: str) -> Any:
    """Plain data as a dataclass, its fields as they are annotated and none besides.

    Args:
        kind: A dataclass, tuple[X, ...], Mapping[str, X], X | None, or str, int, float, bool.
        data: What JSON gave.
        where: Names the place in errors.

    Raises:
        ValueError: A field is missing, unknown or of another type; the message names it.
    """
    if is_dataclass(kind):
        return _dataclass_from(kind, data, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return from_json(inner, data, where)
    if origin is tuple:
        _require(isinstance(data, list), where, "a list", data)
        return tuple(from_json(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is Mapping or kind is Mapping:
        _require(isinstance(data, dict), where, "an object", data)
        return {k: from_json(arguments[1], v, f"{where}.{k}") for k, v in data.items()}
    if kind is float:
        _require(type(data) in (int, float), where, "a number", data)
        return float(data)
    _require(type(data) is kind, where, kind.__name__, data)
    return data


def _dataclass_from(kind: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), where, "an object", data)
    names = [f.name for f in fields(kind) if f.init]
    for name in data:
        if name not in names:
            raise ValueError(f"{where}.{name} is no field of {kind.__name__}")
    hints = get_type_hints(kind)
    for name in names:
        if name not in data:
            raise ValueError(f"{where}.{name} is missing")
    return kind(**{n: from_json(hints[n], data[n], f"{where}.{n}") for n in names})


def _require(right: bool, where: str, wanted: str, got: Any) -> None:
    if not right:
        raise ValueError(f"{where} must be {wanted}, got {got!r}")

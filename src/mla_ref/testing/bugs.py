"""The index of known public bugs: what went wrong elsewhere, and the test that watches for it here.

The data stands in bugs.toml beside this file. A test is named after its bug, `test_B063_...`; a
test of the index holds that each such test is listed and that each listed test exists.
"""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

KINDS = MappingProxyType(
    {
        "addressing": "the right number, looked for in the wrong place",
        "convention": "two sides understand one number differently",
        "empty set": "nothing to attend to, merge or divide by",
        "environment": "packages, drivers and variables of the machine",
        "hidden assumption": "a size or device that the author's tests all had",
        "ignored setting": "a value that the configuration states and the code does not read",
        "integer overflow": "a number that no longer fits its integer",
        "masking": "what may not be seen has an influence",
        "nondeterminism": "the same call, another result",
        "overflow": "a number that no longer fits its float",
        "padding": "rows that stand for nobody",
        "precision": "too few bits, or bits counted in the wrong place",
        "question": "not a fault, but asked often enough to deserve a test",
        "silent success": "a check that passes because nothing happened",
    }
)

_ID = re.compile(r"B\d{3}")
_LINK = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
_TEST = re.compile(r"tests/[\w/]+\.py::test_\w+")


@dataclass(frozen=True)
class Bug:
    """One public bug and the tests named after it.

    Attributes:
        id: B and three digits.
        title: A few words.
        symptom: What people saw.
        cause: Why it happened, and what follows from it.
        links: The public reports, as owner/repository#number.
        kind: The general kind of fault, one of `KINDS`.
        tests: The tests that watch for it, as pytest names them, from the top of the repository.
    """

    id: str
    title: str
    symptom: str
    cause: str
    links: tuple[str, ...]
    kind: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise a ValueError that names the entry and what is wrong with it."""
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id must be B and three digits, got {self.id!r}")
        for name in ("title", "symptom", "cause"):
            if not getattr(self, name).strip():
                raise ValueError(f"{self.id}: {name} must not be empty")
        if self.kind not in KINDS:
            raise ValueError(f"{self.id}: kind must be one of {list(KINDS)}, got {self.kind!r}")
        for name, values, pattern in (("link", self.links, _LINK), ("tests", self.tests, _TEST)):
            wrong = [value for value in values if not pattern.fullmatch(value)]
            if wrong or not values:
                raise ValueError(f"{self.id}: {name} must match {pattern.pattern}, got {values}")

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the reports; GitHub forwards from an issue's to a pull request's."""
        return tuple(
            f"https://github.com/{found[1]}/issues/{found[2]}"
            for found in map(_LINK.fullmatch, self.links)
            if found
        )

    @property
    def link(self) -> str:
        """Address of the first report."""
        return self.urls[0]


def load_bugs(text: str | None = None) -> tuple[Bug, ...]:
    """The index, in the order of the ids.

    Args:
        text: TOML to read in place of the index that comes with this package.

    Raises:
        ValueError: An entry has a key too many or too few, a value of the wrong form, or an id
            that another entry has.
    """
    if text is None:
        text = files("mla_ref.testing").joinpath("bugs.toml").read_text("utf-8")
    bugs = [_bug(entry) for entry in tomllib.loads(text).get("bug", [])]
    ids = [bug.id for bug in bugs]
    if ids != sorted(set(ids)):
        raise ValueError(f"ids must rise without repetition, got {ids}")
    return tuple(bugs)


def _bug(entry: dict[str, Any]) -> Bug:
    expected = {"id", "title", "symptom", "cause", "link", "kind", "tests"}
    if entry.keys() != expected:
        raise ValueError(
            f"{entry.get('id', 'an entry')} must have the keys {sorted(expected)}, got "
            f"{sorted(entry)}"
        )
    link = entry["link"]
    return Bug(
        id=entry["id"],
        title=entry["title"],
        symptom=entry["symptom"],
        cause=entry["cause"],
        links=(link,) if isinstance(link, str) else tuple(link),
        kind=entry["kind"],
        tests=tuple(entry["tests"]),
    )


BUGS = load_bugs()

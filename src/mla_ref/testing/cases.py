"""All cases, by kind, by name, and from JSON."""

from collections.abc import Callable
from functools import cache
from typing import Any

from mla_ref.checks import require_choice
from mla_ref.testing.adapter import KINDS
from mla_ref.testing.attention_case import AttentionCase
from mla_ref.testing.attention_table import attention_cases
from mla_ref.testing.case import Case
from mla_ref.testing.part_table import TABLES, part_cases


@cache
def cases(kind: str) -> tuple[Case, ...]:
    """All cases of a kind; each has `check`.

    In pytest: `@pytest.mark.parametrize("case", mla_ref.testing.cases("decode"), ids=str)`.

    Args:
        kind: "decode" or "extend", or an optional part: "merge", "cache_write", "convert",
            "index_scores", "topk", "sampler".
    """
    require_choice("kind", kind, KINDS)
    return part_cases(kind) if kind in TABLES else attention_cases(kind)


def find_case(name: str) -> Case:
    """The case whose `str` is `name`, such as "decode/none-strewn"."""
    kind, _, rest = name.partition("/")
    found = [c for c in cases(kind) if c.name == rest] if kind in KINDS else []
    if not found:
        raise ValueError(f"case must be the name of one, such as decode/none-strewn, got {name!r}")
    return found[0]


def case_from_json(data: dict[str, Any]) -> Case:
    """The case that `Case.to_json` gave."""
    kind = require_choice("kind", data.get("kind"), KINDS)
    made: Callable[..., Case] = TABLES[kind][0] if kind in TABLES else AttentionCase
    return made(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

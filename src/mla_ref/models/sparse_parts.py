"""The steps around sparse attention that a backend may bring kernels for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_ref.cache import write_fp8_rows
from mla_ref.indexer import index_scores, positions_to_slots, select_topk


@dataclass(frozen=True)
class SparseParts:
    """Who does what; by default the library's own functions.

    Attributes:
        write: As `write_fp8_rows`. A cache of plain numbers is written by the library.
        convert: As `positions_to_slots`.
        score: As `index_scores`.
        select: As `select_topk`.
    """

    write: Callable[..., None] = write_fp8_rows
    convert: Callable[..., Tensor] = positions_to_slots
    score: Callable[..., Tensor] = index_scores
    select: Callable[..., Tensor] = select_topk

    @classmethod
    def of(cls, parts: Mapping[str, Callable[..., Any]]) -> "SparseParts":
        """A backend's parts, by their names in `backends.PARTS`; those that it lacks are ours."""
        ours = cls()
        return cls(
            write=parts.get("cache_write", ours.write),
            convert=parts.get("convert", ours.convert),
            score=parts.get("index_scores", ours.score),
            select=parts.get("topk", ours.select),
        )

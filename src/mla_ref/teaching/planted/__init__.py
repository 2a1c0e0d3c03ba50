"""Bugs that published libraries had, planted on purpose: each lesson shows its symptom and cure.

Nothing here is to be used. Every function keeps the interface of the right one, so that a lesson, a
test or a reader's own check can put it in its place and see whether anybody notices.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mla_ref.numerics import AttentionResult
from mla_ref.teaching.planted.masks import finite_mask_attention, top_left_causal_attention
from mla_ref.teaching.planted.merging import (
    backward_tiles_without_guard,
    merge_in_base_2,
    merge_without_guard,
)


@dataclass(frozen=True)
class PlantedBug:
    """A planted bug.

    Attributes:
        id: Its number in the bug museum.
        reports: Public reports, owner/repository#number.
        function: The function that has it.
        instead_of: The right function's name in this library.
        cure: What the right one does, in a sentence.
    """

    id: str
    reports: tuple[str, ...]
    function: Callable[..., AttentionResult]
    instead_of: str
    cure: str


PLANTED: tuple[PlantedBug, ...] = (
    PlantedBug(
        "B077",
        ("pytorch/pytorch#103082", "pytorch/pytorch#108108", "Dao-AILab/flash-attention#1778"),
        top_left_causal_attention,
        "mla_ref.attention.causal_attention",
        "Row i sees s_kv - s_q + i + 1 keys: the mask is aligned at the bottom right.",
    ),
    PlantedBug(
        "B064",
        ("ohdearquant/lattice#374",),
        finite_mask_attention,
        "mla_ref.attention.vectorised_attention",
        "Hidden scores are -inf, and a row that sees nothing is 0 with LSE -inf by definition.",
    ),
    PlantedBug(
        "B066",
        ("vllm-project/vllm#27491", "vllm-project/vllm#39148", "flashinfer-ai/flashinfer#4051"),
        merge_without_guard,
        "mla_ref.numerics.merge",
        "Where both parts are empty, 0 is subtracted in place of -inf.",
    ),
    PlantedBug(
        "B110",
        ("sgl-project/sglang#33064", "vllm-project/vllm#28840"),
        merge_in_base_2,
        "mla_ref.numerics.merge",
        "One base everywhere, natural; a foreign LSE is converted by name, with to_natural_lse.",
    ),
    PlantedBug(
        "B063",
        ("vllm-project/vllm#48364",),
        backward_tiles_without_guard,
        "mla_ref.attention.online_attention",
        "A row whose running maximum is still -inf subtracts 0 in its place.",
    ),
)

__all__ = [
    "PLANTED",
    "PlantedBug",
    "backward_tiles_without_guard",
    "finite_mask_attention",
    "merge_in_base_2",
    "merge_without_guard",
    "top_left_causal_attention",
]

"""What is validated: precision, cache, lists, ranks; and the axes that a full validation covers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_ref.backends import Backend
from mla_ref.checks import require_choice, require_count
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.validation.replay import Replay, replay
from mla_ref.validation.script import Script
from mla_ref.validation.verdict import Verdict, headline, judge

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CACHES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}
TOPK = 256
# Lists of a dense configuration are as wide as the longest context, rounded up to this, and no
# narrower than sparse ones: no plan would cut them into splits.
KEYS_ROUNDED = 64
# Verifier rows of each configuration of a full validation, 2,048 in all. A CPU without instructions
# for bfloat16 takes six times as long for it.
FULL_ROWS = {"fp32": 416, "bf16": 64}


@dataclass(frozen=True)
class Configuration:
    """One way to run the model.

    Attributes:
        dtype: "fp32" or "bf16", of weights, queries and outputs.
        cache: "fp32", "bf16" or "fp8", of the cached rows.
        sparse: Whether a row attends to 256 chosen keys; else to all.
        shards: Ranks that the heads are dealt to.
    """

    dtype: str = "fp32"
    cache: str = "fp8"
    sparse: bool = True
    shards: int = 1

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        require_choice("dtype", self.dtype, tuple(DTYPES))
        require_choice("cache", self.cache, tuple(CACHES))
        require_count("shards", self.shards, at_least=1)

    def topk(self, scripts: Sequence[Script]) -> int:
        """Width of the lists."""
        if self.sparse:
            return TOPK
        longest = max(TOPK, *(script.longest for script in scripts))
        return -(-longest // KEYS_ROUNDED) * KEYS_ROUNDED

    def __str__(self) -> str:
        """In a few words."""
        words = [self.dtype, f"{self.cache} cache", "sparse" if self.sparse else "dense"]
        if self.shards > 1:
            words.append(f"{self.shards} shards")
        return ", ".join(words)


def full_axes() -> list[Configuration]:
    """Every dtype with a cache of its own kind and of FP8, sparse and dense; and ranks."""
    axes = [
        Configuration(dtype, cache, sparse)
        for dtype in DTYPES
        for cache in (dtype, "fp8")
        for sparse in (True, False)
    ]
    return axes + [Configuration("bf16", "fp8", True, shards) for shards in (3, 9)]


@dataclass(frozen=True)
class Finding:
    """One configuration, validated.

    Attributes:
        configuration: Which.
        topk: Width of its lists.
        replay: Rows, pairs and layer errors.
        verdict: What they show.
    """

    configuration: Configuration
    topk: int
    replay: Replay
    verdict: Verdict

    @property
    def headline(self) -> str:
        """What was compared, and whether it holds."""
        lists = f"{self.configuration}, {self.topk} keys a row"
        return headline(self.replay, self.verdict, lists)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "configuration": asdict(self.configuration) | {"topk": self.topk},
            "headline": self.headline,
            "verdict": self.verdict.to_json(),
            **self.replay.to_json(),
        }


def validate_configuration(
    configuration: Configuration,
    dense: SmolLM2,
    scripts: Sequence[Script],
    *,
    backend: Backend | None = None,
    prompt_model: SmolLM2 | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Finding:
    """Replay the scripts with the trained indexers of this package, and judge.

    Args:
        configuration: How to run the model.
        dense: SmolLM2-135M in the configuration's dtype; all runs on its device.
        scripts: From `write_scripts`.
        backend: Whose kernels; None: torch.
        prompt_model: Who fills the cache with the prompts' rows; None: `dense`. See `replay`.
        on_rows: As in `replay`.

    Raises:
        ValueError: The model's dtype is another, or as in `replay`.
    """
    if dense.dtype != DTYPES[configuration.dtype]:
        raise ValueError(
            f"dense must hold {DTYPES[configuration.dtype]}, as configuration.dtype "
            f"{configuration.dtype!r} says, got {dense.dtype}"
        )
    topk = configuration.topk(scripts)
    found = replay(
        SparseSmolLM2.trained(dense, topk=topk, backend=backend),
        scripts,
        cache_dtype=CACHES[configuration.cache],
        backend=backend,
        shards=configuration.shards,
        prompt_model=SparseSmolLM2.trained(prompt_model, topk=topk) if prompt_model else None,
        on_rows=on_rows,
    )
    return Finding(configuration, topk, found, judge(found))

"""Scripts replayed on one configuration: each verifier step runs several times, on one cache.

    for each step:   extend, token-wise, null control, positive control, then decode
                     the same tokens, the same cache, another way to attend in every layer

This is sound because a run leaves nothing behind that the next one reads. In each layer it first
writes the rows and index keys of the step's own tokens, all of them, and only then attends; so it
reads earlier slots, which no run of this step writes, and its own. Decode runs last, and its rows
stay: the next step builds on what a server's cache would hold, and no other way feeds it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.backends import AttnSpec, Backend, TorchBackend
from mla_ref.batching import ServingLimits, Step
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.sparse import Attend
from mla_ref.validation.kernels import Kernels, plan_kernels
from mla_ref.validation.layer_errors import LayerErrors
from mla_ref.validation.measure import PairStatistics, RowDifference, row_differences
from mla_ref.validation.paths import WithoutEarlier, masked, token_wise
from mla_ref.validation.script import MAX_TOKENS, PAGE_SIZE, Script, ScriptStep

# Who is compared with whom: p first, then q.
PAIRS = {
    "extend || decode": ("extend", "decode"),
    "token-wise || decode": ("token-wise", "decode"),
    "token-wise || extend": ("token-wise", "extend"),
    "decode || null": ("decode", "null"),
    "decode || positive": ("decode", "positive"),
}


@dataclass(frozen=True)
class RowPlace:
    """Where a row comes from.

    Attributes:
        script: Name of its prompt.
        step: Number of the step in the script.
        position: In the verifier batch; 0 is the last accepted token.
    """

    script: str
    step: int
    position: int


@dataclass(frozen=True)
class Replay:
    """What the replay of one configuration has found.

    Attributes:
        places: Where each row comes from.
        pairs: By the names of `PAIRS`.
        layers: Errors of each layer by itself.
        splits: Of decode; None where the backend does not tell.
        null_splits: Of the null control.
    """

    places: tuple[RowPlace, ...]
    pairs: Mapping[str, PairStatistics]
    layers: LayerErrors
    splits: int | None
    null_splits: int | None

    @property
    def num_rows(self) -> int:
        """Rows that were measured."""
        return len(self.places)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "rows": self.num_rows,
            "splits": self.splits,
            "null_splits": self.null_splits,
            "pairs": [pair.to_json() for pair in self.pairs.values()],
            "layers": self.layers.to_json(),
            "places": [[place.script, place.step, place.position] for place in self.places],
        }


@torch.inference_mode()
def replay(
    model: SparseSmolLM2,
    scripts: Sequence[Script],
    *,
    cache_dtype: torch.dtype,
    backend: Backend | None = None,
    shards: int = 1,
    prompt_model: SparseSmolLM2 | None = None,
    requests_at_once: int = 8,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Replay:
    """Run every step of every script in all ways and compare the logits.

    Args:
        model: The model; its lists are as long as its attention's `indexer.topk`. Cache and kernels
            are on its device.
        scripts: From `write_scripts`.
        cache_dtype: What the cache holds; uint8: rows of 656 bytes.
        backend: Whose decode and extend; None: torch.
        shards: Ranks that the heads are dealt to.
        prompt_model: Who fills the cache with the prompts' rows, which are not measured; None: the
            model. In bfloat16 a CPU without instructions for it takes six times as long as in
            float32.
        requests_at_once: Requests of a step at most.
        on_rows: Called after each step with the rows that it measured.

    Raises:
        ValueError: There is no script, or as in `plan_kernels`.
    """
    if not scripts:
        raise ValueError("scripts must hold a script at least, got none")
    require_count("requests_at_once", requests_at_once, at_least=1)
    attention = model.attention
    spec = AttnSpec(
        num_heads=attention.num_heads,
        kv_lora_rank=attention.kv_lora_rank,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        topk=attention.indexer.topk if attention.indexer else 1,
        page_size=PAGE_SIZE,
        cache_format="fp8" if cache_dtype == torch.uint8 else "bf16",
        q_dtype=model.dense.dtype,
    )
    kernels = plan_kernels(
        backend or TorchBackend(),
        spec,
        max_requests=requests_at_once,
        rows_per_request=1 + max(script.num_drafts for script in scripts),
        shards=shards,
        device=model.device,
    )
    layers = LayerErrors(
        {"decode": kernels.decode, "extend": kernels.extend, "token-wise": token_wise},
        attention.num_layers,
        shards,
    )
    places: list[RowPlace] = []
    rows: dict[str, list[RowDifference]] = {name: [] for name in PAIRS}
    for first in range(0, len(scripts), requests_at_once):
        group = _Group(model, scripts[first : first + requests_at_once], cache_dtype)
        group.prefill(prompt_model or model)
        for number in range(max(len(script.steps) for script in group.scripts)):
            found = group.run(number, kernels, layers)
            places += found[0]
            for name, differences in found[1].items():
                rows[name] += differences
            on_rows(len(found[0]))
    pairs = {
        name: PairStatistics(reference, tested, tuple(rows[name]))
        for name, (reference, tested) in PAIRS.items()
    }
    return Replay(tuple(places), pairs, layers, kernels.splits, kernels.null_splits)


class _Group:
    """A few requests that run side by side, with a cache of their own."""

    def __init__(
        self, model: SparseSmolLM2, scripts: Sequence[Script], cache_dtype: torch.dtype
    ) -> None:
        self.model, self.scripts = model, scripts
        needed = [pages_needed(script.longest, PAGE_SIZE) for script in scripts]
        # The plans of the cache itself are never run: every step brings its own way to attend.
        limits = ServingLimits(1, 1)
        self.cache = model.new_cache(sum(needed), PAGE_SIZE, cache_dtype, limits=limits)
        ends = torch.tensor(needed).cumsum(0).tolist()
        width = max(needed)
        self.tables = [
            [*range(end - pages, end), *[-1] * (width - pages)]
            for end, pages in zip(ends, needed, strict=True)
        ]

    def prefill(self, model: SparseSmolLM2) -> None:
        """Run the prompts, one after the other, in chunks."""
        for number, script in enumerate(self.scripts):
            for done in range(0, len(script.prompt_ids), MAX_TOKENS):
                chunk = script.prompt_ids[done : done + MAX_TOKENS]
                step = self._step([number], [ScriptStep(done, chunk, 0)])
                tokens = torch.tensor(chunk, device=model.device)
                model.forward(tokens, step, self.cache, attend=masked)

    def run(
        self, number: int, kernels: Kernels, layers: LayerErrors
    ) -> tuple[list[RowPlace], dict[str, list[RowDifference]]]:
        """Step `number` of all scripts that have one; what is not full runs and is not measured."""
        here = [i for i, script in enumerate(self.scripts) if number < len(script.steps)]
        full = [i for i in here if self.scripts[i].is_full(number)]
        rest = [i for i in here if i not in full]
        if rest:
            self._forward(rest, [self.scripts[i].steps[number] for i in rest], kernels.decode)
        if not full:
            return [], {}
        steps = [self.scripts[i].steps[number] for i in full]
        batch = self._step(full, steps)
        # Decode last: see above.
        ways: dict[str, Attend] = {
            "extend": kernels.extend,
            "token-wise": token_wise,
            "null": kernels.null,
            "positive": WithoutEarlier.of(kernels.decode, batch),
            "decode": layers,
        }
        logits = {name: self._logits(full, steps, attend) for name, attend in ways.items()}
        places = [
            RowPlace(self.scripts[i].name, number, position)
            for i, step in zip(full, steps, strict=True)
            for position in range(len(step.token_ids))
        ]
        positions = [place.position for place in places]
        return places, {
            name: row_differences(logits[reference], logits[tested], positions)
            for name, (reference, tested) in PAIRS.items()
        }

    def _logits(
        self, numbers: Sequence[int], steps: Sequence[ScriptStep], attend: Attend
    ) -> Tensor:
        return self.model.logits(self._forward(numbers, steps, attend))

    def _forward(
        self, numbers: Sequence[int], steps: Sequence[ScriptStep], attend: Attend
    ) -> Tensor:
        tokens = torch.tensor(
            [token for step in steps for token in step.token_ids], device=self.model.device
        )
        return self.model.forward(tokens, self._step(numbers, steps), self.cache, attend=attend)

    def _step(self, numbers: Sequence[int], steps: Sequence[ScriptStep]) -> Step:
        return Step.build(
            [step.computed_len for step in steps],
            [len(step.token_ids) for step in steps],
            torch.tensor([self.tables[number] for number in numbers]),
            PAGE_SIZE,
        ).to(self.model.device)

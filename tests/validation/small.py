"""What the tests of the validation share: a small model, scripts by hand, kernels with faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.layers import IndexerConfig, preset
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.numerics import AttentionResult
from mla_ref.validation import Replay, Script, ScriptStep, replay

VOCAB, LAYERS, HEADS, DRAFTS = 60, 2, 3, 3


@cache
def small_sparse(topk: int = 128, dtype: torch.dtype = torch.float32) -> SparseSmolLM2:
    """Random weights in the served geometry; lists of 128 keys make two splits."""
    config = SmolLM2Config(
        num_layers=LAYERS,
        hidden_size=48,
        num_heads=HEADS,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=32,
        vocab_size=VOCAB,
        context_length=256,
    )
    attention = replace(
        preset("smollm2-packed"),
        hidden_size=48,
        num_layers=LAYERS,
        num_heads=HEADS,
        indexer=IndexerConfig(4, (0,), topk=topk, rope_interleaved=True),
    )
    dense = SmolLM2.random(config, 5, dtype=dtype)
    indexers = {0: IndexerLayer.random(attention, 0, dtype)}
    return SparseSmolLM2(dense, indexers, attention=attention)


def script(name: str, prompt_len: int, accepted: Sequence[int], *, short: int | None = None) -> Any:
    """Random tokens in steps of 1 + 3 rows; step `short` has one row less and is not measured."""
    generator = torch.Generator().manual_seed(prompt_len)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())

    computed, steps = prompt_len, []
    for number, taken in enumerate(accepted):
        steps.append(ScriptStep(computed, tokens(1 + DRAFTS - (number == short)), taken))
        computed += 1 + taken
    return Script(name, tokens(prompt_len), DRAFTS, tuple(steps))


# Two requests with more than 64 tokens, so that both splits of a list have keys.
SCRIPTS = (script("a", 80, [2, 0, 3]), script("b", 100, [1, 3], short=0))


def validate(backend: Any = None, scripts: Sequence[Script] = SCRIPTS, **changed: Any) -> Replay:
    """A replay on the small model, with an FP8 cache unless another is asked for."""
    arguments = {"cache_dtype": torch.uint8} | changed
    model = arguments.pop("model", None) or small_sparse()
    return replay(model, scripts, backend=backend, **arguments)


Run = Callable[..., AttentionResult]


@dataclass(frozen=True)
class Spoiled:
    """A torch plan of which one way goes through a fault."""

    plan: Any
    kind: str
    fault: Callable[..., AttentionResult]

    @property
    def num_splits(self) -> int:
        return self.plan.num_splits

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    def decode(self, *args: Any, **kwargs: Any) -> AttentionResult:
        return self._run("decode", self.plan.decode, *args, **kwargs)

    def extend(self, *args: Any, **kwargs: Any) -> AttentionResult:
        return self._run("extend", self.plan.extend, *args, **kwargs)

    def _run(self, kind: str, run: Run, *args: Any, **kwargs: Any) -> AttentionResult:
        return self.fault(run, *args, **kwargs) if kind == self.kind else run(*args, **kwargs)


class Faulty(TorchBackend):
    """The torch backend with a fault in decode or extend."""

    def __init__(self, fault: Callable[..., AttentionResult], kind: str = "decode") -> None:
        super().__init__()
        object.__setattr__(self, "made", (kind, fault))

    def plan(self, spec: AttnSpec, **kwargs: Any) -> Any:
        return Spoiled(super().plan(spec, **kwargs), *self.made)


def drops_a_slot(
    run: Run, q: Tensor, kv_cache: Tensor, indices: Tensor, **kwargs: Any
) -> AttentionResult:
    """The newest key of every list is lost, as by a loop that ends one early."""
    newest = indices == indices.amax(dim=1, keepdim=True)
    return run(q, kv_cache, indices.masked_fill(newest, -1), **kwargs)


def ignores_candidates(
    run: Run, q: Tensor, kv_cache: Tensor, indices: Tensor, **kwargs: Any
) -> AttentionResult:
    """Rows of one request come together; each loses the slots of the rows before it."""
    own = indices.amax(dim=1)
    rows = torch.arange(len(own))
    earlier = torch.where(rows[:, None] > rows, own, -2)
    lost = (indices[:, :, None] == earlier[:, None]).any(dim=-1)
    return run(q, kv_cache, indices.masked_fill(lost, -1), **kwargs)


def scales_wrong(run: Run, *args: Any, softmax_scale: float, **kwargs: Any) -> AttentionResult:
    """The scale of a row of 66 numbers in place of 64."""
    return run(*args, softmax_scale=softmax_scale * (64 / 66) ** 0.5, **kwargs)


def one_nan(run: Run, *args: Any, **kwargs: Any) -> AttentionResult:
    """One number of the last row is none."""
    found = run(*args, **kwargs)
    out = found.out.clone()
    out[-1, 0, 0] = torch.nan
    return AttentionResult(out, found.lse)

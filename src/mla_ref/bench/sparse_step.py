"""One decode step of one attention layer, set up for everyone who will be timed on it.

A request has `length` tokens in the cache, the last 4 of which are this step's: the next token and
three drafted ones, as a verifier runs them. All contenders get the same weights, the same x and the
same cached rows and index keys, which are random.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.attention import absorb_query, project_values
from mla_ref.attention.fp8_latent import fp8_latent_attention
from mla_ref.backends import AttnSpec, TorchBackend
from mla_ref.batching import Step
from mla_ref.bench.gate import Agreement, Check, Verdict
from mla_ref.cache import write_fp8_rows, write_index_keys, write_rows
from mla_ref.cache.fp8_rows import pack_fp8_rows, unpack_fp8_rows
from mla_ref.cache.index_keys import quantise_index_keys
from mla_ref.layers import IndexerConfig, MLAConfig
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.projections import attend_latent
from mla_ref.models.sparse import SparseCache, attend_sparse
from mla_ref.numerics import compare, oracle_attention
from mla_ref.numerics.float8 import from_e4m3

ROWS = 4
PAGE_SIZE = 64
CACHE_DTYPES = {"fp8": torch.uint8, "bf16": torch.float32}

# float32 against the float64 oracle on the same keys. References were seen to err by 1e-6. The
# scores of the chosen keys are compared and not the keys, since float32 may swap near-equal ones.
REL_L2, SCORES_REL_L2 = 2e-5, 1e-5


class StepResult(NamedTuple):
    """What a contender made: the layer's output, and which keys it chose (None: takes all)."""

    out: Float[Tensor, "rows hidden"]
    positions: Int[Tensor, "rows topk"] | None


@dataclass(frozen=True)
class Layer:
    """The weights that all contenders share."""

    attention: MLALayer
    indexer: IndexerLayer

    @classmethod
    def random(cls, config: MLAConfig, seed: int = 0) -> "Layer":
        """Random weights: 0.8 GB in float32 for DeepSeek-V3.2."""
        return cls(MLALayer.random(config, seed), IndexerLayer.random(config, seed + 1))

    @property
    def config(self) -> MLAConfig:
        """The layer's dimensions."""
        return self.attention.config

    @property
    def indexer_config(self) -> IndexerConfig:
        """The indexer's dimensions."""
        return self.indexer.config


@dataclass(frozen=True)
class DecodeStep:
    """The step at one length.

    Attributes:
        layer: The weights.
        step: The batch: one request, its last `ROWS` tokens new.
        x: Input of the attention.
        rows: Cached rows of all tokens, the new ones included.
        keys: Index keys, likewise.
    """

    layer: Layer
    step: Step
    x: Float[Tensor, "rows hidden"]
    rows: Float[Tensor, "length d_row"]
    keys: Float[Tensor, "length d_i"]

    @classmethod
    def random(cls, layer: Layer, length: int) -> "DecodeStep":
        """Random x, rows and keys, the same for the same length."""
        generator = torch.Generator().manual_seed(length)
        step = Step.one_request(length - ROWS, ROWS, PAGE_SIZE)
        config, indexer = layer.config, layer.indexer_config
        x = torch.randn(ROWS, config.hidden_size, generator=generator)
        rows = torch.randn(length, config.kv_row_dim, generator=generator)
        keys = torch.randn(length, indexer.head_dim, generator=generator)
        rows[-ROWS:] = layer.attention.kv_rows(x, step.positions)
        keys[-ROWS:] = layer.indexer.keys(x, step.positions)
        return cls(layer, step, x, rows, keys)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.rows)

    def dense(self) -> Callable[[], StepResult]:
        """Rung 6 over all keys, on a cache of its own; the new rows are written by the step."""
        cache = self._new_cache("bf16").kv

        def run() -> StepResult:
            out = attend_latent(self.layer.attention, self.x, cache, self.step, form="absorbed")
            return StepResult(out, None)

        return run

    def sparse(self, cache_format: str) -> Callable[[], StepResult]:
        """Rungs 8 and 10 with the torch backend: index, select, attend in splits."""
        cache, config = self._new_cache(cache_format), self.layer.config
        spec = AttnSpec(
            num_heads=config.num_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            topk=self.layer.indexer_config.topk,
            page_size=PAGE_SIZE,
            cache_format=cache_format,
            q_dtype=self.x.dtype,
        )
        plan = TorchBackend().plan(spec, max_rows=ROWS, max_requests=1, device=self.x.device)
        attention, indexer = self.layer.attention, self.layer.indexer

        def run() -> StepResult:
            return StepResult(
                *attend_sparse(attention, indexer, self.x, cache, self.step, plan.decode)
            )

        return run

    def dense_fp8(self) -> StepResult:
        """Rung 7: all keys, from 656-byte rows."""
        cache, layer = self._new_cache("fp8").kv, self.layer.attention
        result = fp8_latent_attention(
            self._queries, cache, **self.step.batch, softmax_scale=layer.softmax_scale
        )
        return StepResult(layer.output(project_values(result.out, layer.w_uv)), None)

    def check(
        self, cache_format: str, *, rel_l2: float = REL_L2, scores_rel_l2: float = SCORES_REL_L2
    ) -> Check[StepResult]:
        """A check against float64: the choice by its index scores, the output given the choice.

        Args:
            cache_format: What the contender reads, "bf16" (plain rows and keys) or "fp8".
            rel_l2: Largest relative L2 error of the output.
            scores_rel_l2: Largest relative L2 error of the chosen keys' scores, best first.
        """

        def check(result: StepResult) -> list[Verdict]:
            expected = self._expected(result.positions, cache_format)
            found = compare(result.out, expected)
            verdicts: list[Verdict] = [
                Agreement("out", found, rel_l2=rel_l2, max_abs=rel_l2 * float(expected.abs().max()))
            ]
            if result.positions is not None:
                chosen, best = self._chosen_and_best(result.positions, cache_format)
                limit = scores_rel_l2 * float(best[best.isfinite()].abs().max())
                verdicts.append(
                    Agreement(
                        "scores of the chosen keys",
                        compare(chosen, best),
                        rel_l2=scores_rel_l2,
                        max_abs=10 * limit,
                    )
                )
            return verdicts

        return check

    def _new_cache(self, cache_format: str) -> SparseCache:
        pages = self.step.block_table.shape[1]
        cache = SparseCache.new(self.layer.config, 0, pages, PAGE_SIZE, CACHE_DTYPES[cache_format])
        slots = torch.arange(self.length)
        write = write_fp8_rows if cache_format == "fp8" else write_rows
        write(cache.kv, self.rows, slots)
        if cache.index is not None:
            rule = self.layer.indexer_config.scale_rule
            write_index_keys(cache.index, self.keys, slots, scale_rule=rule)
        return cache

    @cached_property
    def _queries(self) -> Float[Tensor, "rows h d_row"]:
        layer = self.layer.attention
        q_nope, q_pe = layer.queries(layer.query_latent(self.x), self.step.positions)
        return absorb_query(q_nope, q_pe, layer.w_uk)

    @cached_property
    def _causal(self) -> Bool[Tensor, "rows length"]:
        return torch.arange(self.length) <= self.step.positions[:, None]

    def _expected(
        self, positions: Int[Tensor, "rows topk"] | None, cache_format: str
    ) -> Float[Tensor, "rows hidden"]:
        """The output in float64 over the chosen keys; only the projections are the layer's."""
        layer, rows, visible = self.layer.attention, self.rows, self._causal
        if positions is not None:
            listed = torch.zeros(ROWS, self.length + 1, dtype=torch.bool)
            listed.scatter_(1, positions.long() % (self.length + 1), True)  # -1: the last column
            visible = visible & listed[:, :-1]
            used = visible.any(dim=0)  # 8,192 keys at most, however long the context
            rows, visible = rows[used], visible[:, used]
        if cache_format == "fp8":
            rows = unpack_fp8_rows(pack_fp8_rows(rows))
        heads = layer.config.num_heads
        # Heads as rows: one key serves all, and the oracle turns each head's keys to float64.
        result = oracle_attention(
            self._queries.flatten(0, 1)[:, None],
            rows[:, None],
            rows[:, None, : layer.config.kv_lora_rank],
            visible.repeat_interleave(heads, dim=0),
            softmax_scale=layer.softmax_scale,
        )
        latent = result.out[:, 0].unflatten(0, (ROWS, heads)).to(self.x.dtype)
        return layer.output(project_values(latent, layer.w_uv))

    def _chosen_and_best(
        self, positions: Int[Tensor, "rows topk"], cache_format: str
    ) -> tuple[Float[Tensor, "rows k"], Float[Tensor, "rows k"]]:
        """Scores of the chosen keys and the best scores there are, each in falling order."""
        scores = self._scores(cache_format)
        k = min(positions.shape[1], self.length)
        # Of a position listed twice only one counts, so such a list is short of one.
        ordered = positions.long().sort(dim=1).values
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        chosen = scores.gather(1, ordered.clamp(min=0))
        chosen = chosen.masked_fill((ordered < 0) | repeated, -torch.inf)
        return chosen.sort(dim=1, descending=True).values[:, :k], scores.topk(k, dim=1).values

    def _scores(self, cache_format: str) -> Float[Tensor, "rows length"]:
        """Index scores by the formula, in float64; -inf where a row may not look."""
        latent = self.layer.attention.query_latent(self.x)
        q, weights = self.layer.indexer.queries(latent, self.x, self.step.positions)
        keys, rule = self.keys, self.layer.indexer_config.scale_rule
        if cache_format == "fp8":
            q, keys = _dequantised(q, rule), _dequantised(keys, rule)
        products = torch.relu(q.double() @ keys.double().T)
        scores = (products * weights.double()[..., None]).sum(dim=1)
        return scores.masked_fill(~self._causal, -torch.inf)


def _dequantised(x: Float[Tensor, "*shape 128"], rule: str) -> Float[Tensor, "*shape 128"]:
    data, scale = quantise_index_keys(x, rule)
    return from_e4m3(data) * scale[..., None]

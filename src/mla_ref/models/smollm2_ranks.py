"""SmolLM2 with sparse attention on several ranks: rung 13 in every layer of a real model.

The trunk, the queries and the last projection are replicated; what is dealt out are the rows that a
request leaves in the cache, and the index keys. Each rank holds every world-th token:

    index keys     own ones ──> own candidates ──┐ gather ──> one list, the same on all ranks
    cached rows    own ones ──> partial results ─┘ gather ──> merged by their LSE, the same bits

So all ranks choose the same tokens and stay together without a word about it. A page of the
scheduler is a virtual block: of its `page_size` tokens each rank keeps page_size / world.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import absorb_query, project_values
from mla_ref.backends import KINDS, AttnSpec
from mla_ref.batching import (
    Route,
    ScratchPlan,
    ScratchRows,
    ServingLimits,
    SpecMode,
    Step,
    parse_mode,
)
from mla_ref.cache import (
    quantise_index_keys,
    read_index_keys,
    write_fp8_rows,
    write_index_keys,
    write_rows,
)
from mla_ref.checks import describe, require_count
from mla_ref.indexer import index_scores
from mla_ref.layers import index_source
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.projections import LatentProjections, padded_rows
from mla_ref.models.smollm2_sparse import CACHE_DTYPES, SparseSmolLM2, SparseState
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.models.sparse import SparseCache
from mla_ref.numerics.float8 import from_e4m3
from mla_ref.parallel import (
    attend_on_rank,
    local_lens,
    plan_for_ranks,
    select_topk_on_rank,
    slot_mapping_on_rank,
)
from mla_ref.parallel.exchange import require_group


@dataclass(frozen=True)
class _Share:
    """One step as this rank sees it.

    Attributes:
        step: The batch, with the pages of this rank.
        slots: Where this rank writes; -1 for the tokens of others.
        route: Which kernel takes which rows.
        scratch: Buffers of both kernels.
    """

    step: Step
    slots: Int[Tensor, " padded_tokens"]
    route: Route
    scratch: ScratchPlan


class DCPSmolLM2:
    """`SparseSmolLM2` on one rank of a group (decode context parallelism, DCP).

    A `LanguageModel`. Every rank runs the same steps; `forward` exchanges, so all ranks must call
    it, in the same order.

    Attributes:
        sparse: The model; its weights are whole on each rank.
        rank: This process's rank in `group`.
        world: Number of ranks in `group`.
        group: Who exchanges; None for the default group.
    """

    def __init__(
        self,
        sparse: SparseSmolLM2,
        *,
        rank: int,
        world: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Put a model on a rank.

        Raises:
            TypeError: `sparse` is no SparseSmolLM2.
            ValueError: This process is not that rank of the group.
        """
        if not isinstance(sparse, SparseSmolLM2):
            raise TypeError(f"sparse must be a SparseSmolLM2, got {describe(sparse)}")
        require_group(group, rank=rank, world=world)
        self.sparse, self.rank, self.world, self.group = sparse, rank, world, group

    @property
    def config(self) -> SmolLM2Config:
        """The model's dimensions."""
        return self.sparse.config

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.sparse.dense.device

    @property
    def captures(self) -> bool:
        """No graph: index keys are read request by request, by lengths of the host."""
        return False

    @property
    def _place(self) -> Mapping[str, int]:
        return {"rank": self.rank, "world": self.world}

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        *,
        limits: ServingLimits | None = None,
        mode: str | None = None,
    ) -> SparseState:
        """This rank's share of the caches: a world-th of what one rank would hold.

        Args:
            num_pages: As in `SparseSmolLM2.new_cache`.
            page_size: Tokens of a virtual block, a multiple of the number of ranks.
            dtype: As in `SparseSmolLM2.new_cache`.
            limits: As in `SparseSmolLM2.new_cache`.
            mode: As in `SparseSmolLM2.new_cache`.

        Raises:
            ValueError: A virtual block cannot be dealt out evenly, or the backend gives results
                that cannot be merged.
        """
        model, config = self.sparse, self.sparse.attention
        own = self._own_page(page_size)
        dtype = dtype or CACHE_DTYPES[model.cache_format]
        limits = limits or ServingLimits(model.max_rows, model.max_rows)
        spec = AttnSpec(
            num_heads=config.num_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            topk=config.indexer.topk if config.indexer else 1,
            page_size=own,
            cache_format="fp8" if dtype == torch.uint8 else "bf16",
            q_dtype=model.dense.dtype,
        )
        parsed = parse_mode("mode", mode or SpecMode.AUTO)
        rows = ScratchRows(limits, parsed)
        plans = {
            kind: plan_for_ranks(
                model.backend,
                spec,
                max_rows=rows.rows(kind),
                max_requests=rows.rows(kind),
                device=self.device,
                kinds=(kind,),
            )
            for kind in KINDS
        }
        caches = [
            SparseCache.new(config, layer, num_pages, own, dtype, self.device)
            for layer in range(config.num_layers)
        ]
        return SparseState(caches, ScratchPlan(limits, parsed, spec=spec, **plans))

    def route(self, step: Step, cache: SparseState, *, per_request: bool = False) -> Route:
        """As `SparseSmolLM2.route`: facts of the whole batch, so the same on all ranks."""
        return self.sparse.route(step, cache, per_request=per_request)

    def forward(
        self,
        token_ids: Int[Tensor, " padded_tokens"],
        step: Step,
        cache: SparseState,
        *,
        route: Route | None = None,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Run the new tokens of a step, as `SparseSmolLM2.forward`, with all ranks together."""
        dense = self.sparse.dense
        own = replace(step, page_size=self._own_page(step.page_size))
        share = _Share(
            own,
            slot_mapping_on_rank(own, step.block_table, **self._place),
            route or self.route(step, cache),
            cache.scratch,
        )
        full = tuple(sorted(self.sparse.indexers))
        chosen: dict[int, Tensor] = {}
        x = dense.embed(token_ids, step)
        for layer, weights in enumerate(dense.layers):
            h, view = weights.attention_input(x), weights.packed()
            if layer in full:
                indexer, keys = self.sparse.indexers[layer], cache.caches[layer].index
                chosen[layer] = self._select(indexer, view, h, keys, share)
            else:
                chosen[layer] = chosen[index_source(layer, full)]
            attended = self._attend(view, h, cache.caches[layer].kv, chosen[layer], share)
            x = weights.feed_forward(x + attended)
        return dense.last_norm(x)

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""
        return self.sparse.logits(hidden)

    def _own_page(self, page_size: int) -> int:
        """Tokens that each rank keeps of a virtual block."""
        if require_count("page_size", page_size, at_least=1) % self.world:
            raise ValueError(
                f"page_size must be a multiple of the {self.world} ranks, got {page_size}"
            )
        return page_size // self.world

    def _select(
        self,
        indexer: IndexerLayer,
        view: LatentProjections,
        x: Float[Tensor, "padded_tokens hidden"],
        cache: Tensor | None,
        share: _Share,
    ) -> Int[Tensor, "padded_tokens topk"]:
        """Write the own index keys and choose among everyone's: positions in whole requests."""
        if cache is None:
            raise ValueError("cache must have index keys in a layer with an indexer, got None")
        step, config = share.step, indexer.config
        keys = indexer.keys(x, step.positions)
        write_index_keys(cache, keys, share.slots, scale_rule=config.scale_rule)
        q, weights = indexer.queries(view.query_latent(x), x, step.positions)
        if cache.dtype == torch.uint8:
            data, scale = quantise_index_keys(q, config.scale_rule)
            q = from_e4m3(data) * scale[..., None]
        held = local_lens(step.seq_lens, **self._place).tolist()
        parts, start = [], 0
        for request in range(step.num_reqs):
            rows = slice(start, start + step.query_lens[request])
            mine = read_index_keys(cache, step.block_table[request], 0, held[request])
            scores = index_scores(q[rows], mine, weights[rows])
            visible = step.visible_lens[rows]
            parts.append(
                select_topk_on_rank(scores, visible, config.topk, group=self.group, **self._place)
            )
            start = rows.stop
        return padded_rows(torch.cat(parts), step, -1)

    def _attend(
        self,
        view: LatentProjections,
        x: Float[Tensor, "padded_tokens hidden"],
        cache: Tensor,
        chosen: Int[Tensor, "padded_tokens topk"],
        share: _Share,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Write the own rows and attend to everyone's, each segment by the kernel of its route."""
        step = share.step
        rows = view.kv_rows(x, step.positions)
        (write_fp8_rows if cache.dtype == torch.uint8 else write_rows)(cache, rows, share.slots)
        q = absorb_query(*view.queries(view.query_latent(x), step.positions), view.w_uk)
        outs = []
        for start, end, _, _, kind in share.route.segments:
            part = attend_on_rank(
                q[start:end],
                cache,
                chosen[start:end],
                step.visible_lens[start:end],
                request_of_row=step.request_of_row[start:end],
                block_table=step.block_table.to(torch.int32),
                plan=share.scratch.take(kind, end - start),
                softmax_scale=view.softmax_scale,
                rank=self.rank,
                world=self.world,
                group=self.group,
                route=kind,
            )
            outs.append(part.out)
        return view.output(project_values(torch.cat(outs), view.w_uv))

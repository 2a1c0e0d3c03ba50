"""How a layer's activations run on each rung; a new rung adds its function here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from mla_ref.attention import (
    causal_attention,
    causal_lens,
    mla_absorbed_attention,
    mla_expanded_attention,
    online_attention,
    paged_attention,
    vectorised_attention,
)
from mla_ref.attention.masking import visible_mask
from mla_ref.batching import Step
from mla_ref.cache.fp8_rows import LATENT, ROPE
from mla_ref.ladder.activations import LatentView, LayerActivations
from mla_ref.ladder.kernel_runs import BACKENDS, kernel_gap, on_kernels
from mla_ref.ladder.run import Run, against, on_pages, timed
from mla_ref.ladder.serving_runs import ranks, verifier
from mla_ref.ladder.sparse_runs import decode, extend, fp8_cache, lightning_indexer
from mla_ref.ladder.speculative_runs import speculative
from mla_ref.numerics import AttentionResult, Comparison, compare, oracle_attention

TILE = 64


def hand_worked() -> Comparison:
    """Rung 1 on numbers worked out by hand.

    Two query rows of 1, keys 0 and ln 3, values 0 and 4, scale 1. Row 0 sees key 0 alone: output 0,
    LSE 0. Row 1 has weights 1/4 and 3/4: output 3, LSE ln 4.
    """
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    keys = one * torch.tensor([1.0, 3.0], dtype=torch.float64).log()[:, None, None]
    values = one * torch.tensor([0.0, 4.0], dtype=torch.float64)[:, None, None]
    out, lse = causal_attention(one, keys, values, softmax_scale=1.0)
    expected = torch.tensor([[0.0, 3.0], [0.0, math.log(4.0)]], dtype=torch.float64)
    return compare(torch.stack([out.flatten(), lse.flatten()]), expected)


def _causal(layer: LayerActivations) -> Run:
    q, k, v, scale = layer.q, layer.k, layer.v, layer.softmax_scale
    result, seconds = timed(lambda: causal_attention(q, k, v, softmax_scale=scale))
    visible = visible_mask(causal_lens(q.shape[0], k.shape[0]), 0, k.shape[0])
    expected = oracle_attention(q, k, v, visible, softmax_scale=scale)
    return Run(result, against(result, expected) | {"by hand": hand_worked()}, seconds)


def _vectorised(layer: LayerActivations, below: AttentionResult) -> Run:
    q, k, v = layer.q[None], layer.k[None], layer.v[None]
    batched, seconds = timed(
        lambda: vectorised_attention(q, k, v, softmax_scale=layer.softmax_scale)
    )
    result = AttentionResult(batched.out[0], batched.lse[0])
    return Run(result, against(result, below), seconds)


def _online(layer: LayerActivations, below: AttentionResult) -> Run:
    result, seconds = timed(
        lambda: online_attention(
            layer.q, layer.k, layer.v, softmax_scale=layer.softmax_scale, block_size=TILE
        )
    )
    return Run(result, against(result, below), seconds)


def _paged(layer: LayerActivations, below: AttentionResult) -> Run:
    def run(q: Tensor, step: Step, *caches: Tensor) -> AttentionResult:
        return paged_attention(q, *caches, **step.batch, softmax_scale=layer.softmax_scale)

    return on_pages(run, (layer.q,), (layer.k, layer.v), below)


def _expanded(layer: LayerActivations, below: AttentionResult) -> Run:
    runs = [
        on_pages(
            _latent(mla_expanded_attention, layer, view),
            (view.q_nope, view.q_pe),
            (view.kv_rows,),
            below,
        )
        for view in layer.latent
    ]
    # Every view must agree; the last is the one that goes on to rung 6.
    others = {
        f"{view.name}, {name}": check
        for view, run in zip(layer.latent[:-1], runs[:-1], strict=True)
        for name, check in run.checks.items()
    }
    return replace(runs[-1], checks=runs[-1].checks | others)


def _absorbed(layer: LayerActivations, below: AttentionResult) -> Run:
    view = layer.latent[-1]
    run = _latent(mla_absorbed_attention, layer, view)
    return on_pages(run, (view.q_nope, view.q_pe), (view.kv_rows,), below)


_RUNNERS: dict[int, Callable[..., Run]] = {
    1: _causal,
    2: _vectorised,
    3: _online,
    4: _paged,
    5: _expanded,
    6: _absorbed,
    7: fp8_cache,
    8: lightning_indexer,
    9: extend,
    10: decode,
    11: verifier,
    12: speculative,
    13: ranks,
    **{number: on_kernels(number) for number in BACKENDS},
}
RUNNERS: Mapping[int, Callable[..., Run]] = MappingProxyType(_RUNNERS)


def gaps(layer: LayerActivations) -> dict[int, str]:
    """The rungs that a layer cannot climb on this machine, each with what is missing."""
    view = layer.latent[-1]
    if (view.w_uv.shape[-1], view.q_pe.shape[-1]) != (LATENT, ROPE):
        return {n: f"needs rows of {LATENT} + {ROPE} numbers" for n in RUNNERS if n >= 7}
    if layer.index is None:
        return {n: "needs an indexer" for n in RUNNERS if n >= 8}
    found = {number: kernel_gap(number, layer) for number in BACKENDS}
    return {number: reason for number, reason in found.items() if reason}


def _latent(
    attention: Callable[..., AttentionResult], layer: LayerActivations, view: LatentView
) -> Callable[..., AttentionResult]:
    def run(q_nope: Tensor, q_pe: Tensor, step: Step, kv_cache: Tensor) -> AttentionResult:
        return attention(
            q_nope,
            q_pe,
            kv_cache,
            view.w_uk,
            view.w_uv,
            **step.batch,
            softmax_scale=layer.softmax_scale,
        )

    return run

"""How good a choice of keys is: recall, attention mass and perplexity on held-out text.

Every way to choose is a mask on the trunk's attention. So all are measured by the same code, and
differ in which k keys a row sees.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mla_ref.cache import quantise_index_keys
from mla_ref.checks import describe, require_choice, require_count, require_integer
from mla_ref.indexer import index_scores, select_topk
from mla_ref.layers import index_source
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.numerics.float8 import from_e4m3
from mla_ref.training.trunk import Chooser, LayerView, attention_shares, causal_mask, run_trunk

CHOICES = ("dense", "ideal", "indexer", "window", "random")


@dataclass(frozen=True)
class Quality:
    """One choice's numbers on one text.

    Attributes:
        choice: One of `CHOICES`.
        topk: Keys a row; None for dense.
        perplexity: exp of the mean loss in nats a token.
        recall: Share of the true top-k keys (by the layer's head-summed attention) that were
            chosen, over the rows that have more than k keys; mean of all layers.
        mass: Share of the attention weight that lies on chosen keys, of the same rows.
        tokens: Tokens scored.
    """

    choice: str
    topk: int | None
    perplexity: float
    recall: float
    mass: float
    tokens: int


def keys_of(positions: Int[Tensor, "s k"]) -> Bool[Tensor, "s s"]:
    """The lists of top-k as a mask."""
    s = positions.shape[0]
    chosen = torch.zeros(s, s + 1, dtype=torch.bool, device=positions.device)
    return chosen.scatter_(1, torch.where(positions < 0, s, positions).long(), True)[:, :s]


def best_keys(scores: Float[Tensor, "b s s"], k: int) -> Bool[Tensor, "b s s"]:
    """The k keys of the highest score that each row may see."""
    lens = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    return torch.stack([keys_of(select_topk(window, lens, k)) for window in scores])


class ByIndexer:
    """The choice of trained indexers, as served: FP8 queries and keys, lists shared by layers."""

    def __init__(self, indexers: dict[int, IndexerLayer], k: int) -> None:
        self.indexers, self.k = indexers, k
        self._full = tuple(sorted(indexers))
        self._last: Tensor | None = None

    def __call__(self, view: LayerView) -> Bool[Tensor, "b s s"]:
        """The keys of a layer; a layer without an indexer gets those of the one before it."""
        if index_source(view.layer, self._full) == view.layer or self._last is None:
            self._last = best_keys(self._scores(self.indexers[view.layer], view.x), self.k)
        return self._last

    @staticmethod
    def _scores(indexer: IndexerLayer, x: Float[Tensor, "b s hidden"]) -> Float[Tensor, "b s s"]:
        positions = torch.arange(x.shape[1], device=x.device)
        rule, parts = indexer.config.scale_rule, []
        for window in x:
            q, weights = indexer.queries(window, window, positions)
            q8, k8 = (
                from_e4m3(data) * scale[..., None]
                for data, scale in (
                    quantise_index_keys(t, rule) for t in (q, indexer.keys(window, positions))
                )
            )
            parts.append(index_scores(q8, k8, weights))
        return torch.stack(parts)


def chooser(choice: str, k: int, indexers: dict[int, IndexerLayer], seed: int = 0) -> Chooser:
    """A way to choose keys, by name.

    Args:
        choice: "ideal" takes the keys of the highest head-summed attention, which costs what it
            would save; "indexer" asks the indexers; "window" takes the last k; "random" any k.
        k: Keys a row.
        indexers: For "indexer".
        seed: For "random".
    """
    require_choice("choice", choice, CHOICES[1:])
    require_count("k", k, at_least=1)
    if choice == "indexer":
        return ByIndexer(indexers, k)

    def choose(view: LayerView) -> Bool[Tensor, "b s s"]:
        b, s = view.x.shape[:2]
        causal = causal_mask(s, view.x.device)
        if choice == "window":
            return (causal & ~causal.tril(-k)).expand(b, s, s)
        if choice == "ideal":
            return best_keys(attention_shares(view, causal).sum(dim=1), k)
        generator = torch.Generator().manual_seed(seed + view.layer)
        return best_keys(torch.rand(b, s, s, generator=generator).to(view.x.device), k)

    return choose


def measure(
    model: SmolLM2,
    indexers: dict[int, IndexerLayer],
    windows: Int[Tensor, "n length"],
    *,
    topks: tuple[int, ...],
    score_from: int,
    choices: tuple[str, ...] = CHOICES,
) -> Iterator[Quality]:
    """Measure every choice at every k on the same windows.

    Args:
        model: On any device.
        indexers: On the same.
        windows: Held-out text, one window a row; they run one at a time.
        topks: Values of k.
        score_from: First position whose next token counts; rows before it are hardly sparse.
        choices: Which of `CHOICES`.

    Raises:
        ValueError: There is no window, or one has no row to score, or none with more than k keys.
            Raised by the call, not by the first step.
    """
    number, length = require_integer("windows", windows, "n length").shape
    if not number:
        raise ValueError(f"windows must hold one window at least, got {describe(windows)}")
    if require_count("score_from", score_from) >= length - 1:
        raise ValueError(
            f"score_from must be below {length - 1}, the last position of {length} that has a next "
            f"token, got {score_from}"
        )
    for k in topks:
        if require_count("topks", k, at_least=1) >= length:
            raise ValueError(f"topks must be below the window's {length} tokens, got {k}")
    return _measured(model, indexers, windows, topks, score_from, choices)


@torch.inference_mode()
def _measured(
    model: SmolLM2,
    indexers: dict[int, IndexerLayer],
    windows: Int[Tensor, "n length"],
    topks: tuple[int, ...],
    score_from: int,
    choices: tuple[str, ...],
) -> Iterator[Quality]:
    for choice in choices:
        for k in (None,) if choice == "dense" else topks:
            choose = None if k is None else chooser(choice, k, indexers)
            parts = [_measure_one(model, window[None], choose, k, score_from) for window in windows]
            tokens = sum(count for _, count, _, _ in parts)
            yield Quality(
                choice,
                k,
                perplexity=math.exp(sum(loss for loss, _, _, _ in parts) / tokens),
                recall=sum(recall for _, _, recall, _ in parts) / len(parts),
                mass=sum(mass for _, _, _, mass in parts) / len(parts),
                tokens=tokens,
            )


def _measure_one(
    model: SmolLM2,
    window: Int[Tensor, "one length"],
    choose: Chooser | None,
    k: int | None,
    score_from: int,
) -> tuple[float, int, float, float]:
    """Summed loss, tokens, recall and mass of one window."""
    recalls, masses = [], []
    causal = causal_mask(window.shape[1], window.device)

    def choose_and_count(view: LayerView) -> Tensor:
        if choose is None or k is None:
            return causal[None]
        chosen = choose(view) & causal
        share = attention_shares(view, causal).sum(dim=1)
        sparse = slice(k, None)  # the rows with more than k keys
        ideal = best_keys(share, k)
        hit = (chosen & ideal)[:, sparse].sum(dim=-1) / k
        mass = share.masked_fill(~chosen, 0.0)[:, sparse].sum(dim=-1) / view.q.shape[2]
        recalls.append(float(hit.mean()))
        masses.append(float(mass.mean()))
        return chosen

    hidden = run_trunk(model, window, choose=choose_and_count)[0, score_from:-1]
    loss = torch.nn.functional.cross_entropy(
        model.logits(hidden).float(), window[0, score_from + 1 :], reduction="sum"
    )
    layers = max(len(recalls), 1)
    dense = k is None
    return (
        float(loss),
        hidden.shape[0],
        1.0 if dense else sum(recalls) / layers,
        1.0 if dense else sum(masses) / layers,
    )

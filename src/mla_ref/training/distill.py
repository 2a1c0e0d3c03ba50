"""An indexer distilled from the attention of a model that has none.

DeepSeek-V3.2's dense warm-up: with the model frozen, each indexer learns to make softmax(scores)
equal to the attention weights summed over the heads (KL divergence). Here an indexer serves its own
layer and those behind it that share its list, so its target is the mean over these layers.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.indexer import index_scores
from mla_ref.layers import MLAConfig, index_source
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.training.corpus import Corpus
from mla_ref.training.trunk import LayerView, causal_mask, run_trunk


def window_scores(indexer: IndexerLayer, x: Float[Tensor, "b s hidden"]) -> Float[Tensor, "b s s"]:
    """Index scores of every row for every key of its window; where x is the query latent too."""
    positions = torch.arange(x.shape[1], device=x.device)
    parts = []
    for window in x:
        q, weights = indexer.queries(window, window, positions)
        parts.append(index_scores(q, indexer.keys(window, positions), weights))
    return torch.stack(parts)


def distillation_loss(
    scores: Float[Tensor, "b s s"], target: Float[Tensor, "b s s"]
) -> Float[Tensor, ""]:
    """Mean KL(target || softmax(scores)) in nats over the rows that see more than one key."""
    visible = causal_mask(scores.shape[-1], scores.device)
    log_share = torch.log_softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    # 0 log 0 is 0; where a key is hidden, both logarithms are -inf and their difference NaN.
    terms = torch.xlogy(target, target) - target * log_share.masked_fill(~visible, 0.0)
    return terms.sum(dim=-1)[:, 1:].mean()


class Distillation:
    """One batch's targets and index inputs, collected while the trunk runs."""

    def __init__(self, config: MLAConfig) -> None:
        self.full = config.indexer.full_layers if config.indexer else ()
        self.inputs: dict[int, Tensor] = {}
        self.targets: dict[int, Tensor] = {}
        self._served: dict[int, int] = {}

    def visit(self, view: LayerView, shares: Float[Tensor, "b h_q s s"]) -> None:
        """Add a layer's head-mean attention to the target of the indexer that serves it."""
        source = index_source(view.layer, self.full)
        if source == view.layer:
            self.inputs[source] = view.x
        share = shares.mean(dim=1)
        count = self._served[source] = self._served.get(source, 0) + 1
        before = self.targets.get(source, torch.zeros_like(share))
        self.targets[source] = before + (share - before) / count


def train_indexers(
    model: SmolLM2,
    config: MLAConfig,
    corpus: Corpus,
    *,
    steps: int,
    windows: int,
    length: int,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, Mapping[int, float]], None] | None = None,
) -> dict[int, IndexerLayer]:
    """Train the indexers of all full layers side by side on a frozen model.

    Args:
        model: On the device to train on.
        config: The attention with its indexer.
        corpus: Text.
        steps: Batches.
        windows: Windows a batch.
        length: Tokens a window; an indexer is good up to about the length it was trained on.
        learning_rate: Highest of a schedule that warms up and falls as a cosine to a twentieth.
        seed: Of the weights at the start.
        on_step: Called with the step and each layer's loss.

    Raises:
        ValueError: No batch or no window is asked for, or windows of one token, where a row has no
            choice to learn.
    """
    require_count("steps", steps, at_least=1)
    require_count("windows", windows, at_least=1)
    require_count("length", length, at_least=2)
    device = model.weights.embedding.device
    full = config.indexer.full_layers if config.indexer else ()
    indexers = {
        layer: IndexerLayer.random(config, seed + layer, model.dtype).to(device) for layer in full
    }
    parameters = [p for layer in indexers.values() for p in layer.requires_grad_().parameters()]
    optimiser = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    warm_up = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: warm_up_and_fall(step, steps, warm_up)
    )
    for step in range(steps):
        batch = corpus.batch(step, windows=windows, length=length).to(device)
        seen = Distillation(config)
        with torch.no_grad():
            run_trunk(model, batch, visit=seen.visit)
        losses = {}
        for layer, indexer in indexers.items():
            loss = distillation_loss(
                window_scores(indexer, seen.inputs[layer]), seen.targets[layer]
            )
            loss.backward()
            losses[layer] = loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if on_step:
            on_step(step, {layer: float(loss) for layer, loss in losses.items()})
    for indexer in indexers.values():
        indexer.requires_grad_(False)
    return indexers


def warm_up_and_fall(step: int, steps: int, warm_up: int) -> float:
    """Factor on the learning rate: up in a line, then down as a cosine to a twentieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(steps - warm_up, 1)
    return 0.05 + 0.475 * (1 + float(torch.cos(torch.tensor(done * torch.pi))))

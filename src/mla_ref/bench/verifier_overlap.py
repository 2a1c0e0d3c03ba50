"""How much of their lists four neighbouring rows have in common, measured on a real model.

SmolLM2's trained indexers choose keys for every row of a text; four rows in a row are what a
verifier batch of three drafts asks for. What four lists share is more than what all four have in
common, since two or three of them share keys too. A made-up workload knows common and own keys
only, so it takes the overlap at which it names as many different keys as the real lists do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ref.bench.kernel_workload import ROWS_PER_REQUEST
from mla_ref.checks import require_count
from mla_ref.layers import preset
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import load_indexers
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.training.quality import ByIndexer
from mla_ref.training.trunk import LayerView, run_trunk

LENGTH, TOPK = 1024, 256


@dataclass(frozen=True)
class Overlap:
    """What four neighbouring rows share.

    Attributes:
        common: Share of its list that a row has in common with all three others, mean over layers
            that choose and groups of four rows.
        different: Different keys of the four lists over the keys of one.
        topk: Keys of a list.
        tokens: Length of the text.
    """

    common: float
    different: float
    topk: int
    tokens: int

    @property
    def of_workload(self) -> float:
        """The overlap at which `make_workload` names as many different keys.

        A share c in common and the rest each row's own give c + 4 (1 - c) lists of different keys.
        """
        return (ROWS_PER_REQUEST - self.different) / (ROWS_PER_REQUEST - 1)

    def __str__(self) -> str:
        return (
            f"four rows have {self.common:.2f} of their lists in common and name "
            f"{self.different:.2f} lists of different keys (SmolLM2's indexers, top-k {self.topk} "
            f"of up to {self.tokens:,} tokens), as an overlap of {self.of_workload:.2f} does"
        )


@torch.inference_mode()
def measure_overlap(*, length: int = LENGTH, topk: int = TOPK) -> Overlap:
    """Run the model over its passage and compare the lists of rows 4 i .. 4 i + 3.

    Args:
        length: Tokens.
        topk: Keys of a list; only rows that have twice as many to choose from count.

    Raises:
        ImportError: The model's file is not here; the message names what to install.
        ValueError: The text has too few rows to compare.
    """
    require_count("topk", topk, at_least=1)
    tokens = torch.tensor(Tokenizer.from_gguf().encode(passage()))[:length]
    if len(tokens) < 2 * topk + ROWS_PER_REQUEST:
        raise ValueError(
            f"length must leave rows with {2 * topk} keys to choose from, twice topk, got "
            f"{len(tokens)} tokens"
        )
    model = SmolLM2.from_gguf(attention="gqa")
    indexers = load_indexers(preset("smollm2-packed"))
    choose = ByIndexer(indexers, topk)
    found: list[tuple[float, float]] = []

    def choose_and_compare(view: LayerView) -> Tensor:
        chosen = choose(view)
        if view.layer in indexers:
            found.append(_compare(chosen[0], topk))
        return chosen

    run_trunk(model, tokens[None], choose=choose_and_compare)
    common, different = torch.tensor(found).mean(dim=0).tolist()
    return Overlap(round(common, 3), round(different, 3), topk, len(tokens))


def _compare(chosen: Tensor, topk: int) -> tuple[float, float]:
    """Of one layer's choice [rows, keys]: shares of `topk` that four rows have all, and any."""
    first = -(-2 * topk // ROWS_PER_REQUEST) * ROWS_PER_REQUEST
    rows = (chosen.shape[0] - first) // ROWS_PER_REQUEST * ROWS_PER_REQUEST
    groups = chosen[first : first + rows].unflatten(0, (-1, ROWS_PER_REQUEST))
    common = groups.all(dim=1).sum(dim=-1) / topk
    different = groups.any(dim=1).sum(dim=-1) / topk
    return float(common.mean()), float(different.mean())

"""IndexShare: which layers of a model compute their own top-k, and which reuse one.

GLM-5.2 has an indexer in 21 of its 78 layers; each of the others takes the list of the nearest one
before it. Those layers have no indexer weights at all.
"""

from collections.abc import Sequence

from mla_ref.checks import require_count


def is_full_layer(layer: int, *, freq: int, offset: int) -> bool:
    """Whether a layer has its own indexer: max(layer - offset + 1, 0) mod freq == 0.

    freq 4 and offset 3 for GLM-5.2; freq 1 for GLM-5 and DeepSeek-V3.2, where all are. A port that
    takes layer mod 4 instead loads the weights into the wrong layers.
    """
    require_count("layer", layer)
    require_count("freq", freq, at_least=1)
    require_count("offset", offset)
    return max(layer - offset + 1, 0) % freq == 0


def full_layers(num_layers: int, *, freq: int = 1, offset: int = 2) -> tuple[int, ...]:
    """The layers that compute their own top-k, in order."""
    return tuple(i for i in range(num_layers) if is_full_layer(i, freq=freq, offset=offset))


def index_source(layer: int, full: Sequence[int]) -> int:
    """The layer whose top-k list this layer uses: itself, or the nearest full layer before it.

    Raises:
        ValueError: There is no full layer at or before it.
    """
    require_count("layer", layer)
    before = [i for i in full if i <= layer]
    if not before:
        raise ValueError(f"layer {layer} has no full layer at or before it among {tuple(full)}")
    return max(before)

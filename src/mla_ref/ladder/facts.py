"""What a table says of a rung beside its errors: bytes cached, and what agreement shows."""

from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.cache.index_keys import KEY_BYTES
from mla_ref.ladder.activations import LayerActivations
from mla_ref.ladder.rung_runs import TILE
from mla_ref.ladder.rungs import Rung
from mla_ref.numerics import compute_dtype


def kv_bytes(rung: Rung, layer: LayerActivations) -> int:
    """Bytes cached for one token in one layer: K and V of all KV heads, or one latent row.

    From rung 8 on an index key of 132 bytes stands beside the row, in layers with an indexer.
    """
    if rung.number >= 7:
        return ROW_BYTES if rung.number == 7 else ROW_BYTES + KEY_BYTES
    if rung.number >= 5:
        row = layer.latent[-1].kv_rows[0]
        return row.numel() * row.element_size()
    return (layer.k[0].numel() + layer.v[0].numel()) * layer.k.element_size()


def shown(rung: Rung, layer: LayerActivations) -> str:
    """One line in plain words: what agreement of this rung shows."""
    n, heads = layer.q.shape[:2]
    score_mb = compute_dtype(layer.q).itemsize / 1e6
    scores_mb = n * n * heads * score_mb
    tile_mb = n * min(TILE, n) * heads * score_mb
    view = layer.latent[-1]
    forms = " and ".join(v.name for v in layer.latent)
    return {
        1: "each row takes the keys up to its own: this is the definition",
        2: f"one masked product gives every row at once and holds {scores_mb:.1f} MB of scores",
        3: f"tiles of {TILE} keys give the same with {tile_mb:.1f} MB of scores at a time",
        4: "shuffled pages, NaN in every unused slot and ragged requests change nothing",
        5: f"K and V of {heads} heads come back from one row of {view.kv_rows.shape[1]} numbers "
        f"({forms})",
        6: "no key or value is rebuilt: every head reads the cached row itself",
    }[rung.number]

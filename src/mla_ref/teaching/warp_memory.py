"""Shared memory as a warp sees it: banks that serve 128 bytes a turn, and copies on their way."""

from dataclasses import dataclass

import numpy as np

from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.checks import describe, require_count
from mla_ref.teaching.fragments import LANES, G, T, token_of
from mla_ref.teaching.tile_memory import Array

PIECE = 16  # bytes that one lane loads at most
PIECES = 8  # of them, 128 bytes, are served in one turn
ROWS = 16  # of a tile


def turns(addresses: Array) -> list[int]:
    """Turns that shared memory takes to serve a load of 16 bytes by every lane, by quarter warp.

    Eight lanes are served together. A turn gives one piece of 16 bytes for each remainder modulo
    128; who wants the same piece shares it, who wants another piece of the same remainder waits.

    Args:
        addresses: [32], the byte where each lane's 16 begin, multiples of 16.

    Returns:
        Four counts, 1 at best and 8 at worst; a warp takes their sum.
    """
    if addresses.shape != (LANES,) or (addresses % PIECE).any():
        raise ValueError(f"addresses must be 32 multiples of 16, got {describe(addresses)}")
    counts = []
    for quarter in (addresses // PIECE).reshape(4, 8):
        pieces = np.unique(quarter)
        counts.append(int(np.bincount(pieces % PIECES).max()))
    return counts


def key_addresses(stride: int = ROW_BYTES, *, in_order: bool = False) -> Array:
    """Where the lanes of a warp load keys: 8 rows of a tile, and four pieces of each.

    Args:
        stride: Bytes from a row of the tile to the next.
        in_order: Let row g of the operand be token g, in place of `token_of(g)`.
    """
    return (G if in_order else token_of(G)) * stride + T * PIECE


def value_addresses(stride: int = ROW_BYTES, *, in_order: bool = False) -> Array:
    """Where the lanes load values: four rows of a tile, and eight pieces of each."""
    return T * stride + (G if in_order else token_of(G)) * PIECE


class Ring:
    """Places for tiles in shared memory, each filled by copies that take their time.

    A copy may land at any time before the wait for it is over. Which one cannot be known, so the
    two extremes are there to try: at the wait and not before, or at once. Shared memory begins
    with what somebody has left there, here with NaN.
    """

    def __init__(self, places: int = 2, *, at_once: bool = False) -> None:
        """Nothing copied yet.

        Args:
            places: Tiles that fit.
            at_once: When copies land.
        """
        require_count("places", places, at_least=1)
        self.places, self.at_once = places, at_once
        self.bytes = np.full((places, ROWS, ROW_BYTES), 0xFF, np.uint8)
        self._on_their_way: list[list[tuple[int, Array]]] = [[] for _ in range(places)]

    def start(self, i: int, rows: Array, present: Array) -> None:
        """Start the copy of tile i: of its 16 rows those that are present.

        A row that is not present keeps what its place held. Before the first use of the place that
        is cleared, since a weight of 0 times NaN is NaN.
        """
        place = i % self.places
        if i < self.places:
            self.bytes[place, ~present] = 0
        self._on_their_way[place] = [(int(r), rows[r].copy()) for r in np.flatnonzero(present)]
        if self.at_once:
            self._land(place)

    def wait(self, i: int) -> None:
        """Wait until tile i is there."""
        self._land(i % self.places)

    def tile(self, i: int) -> Array:
        """What lies in the place of tile i, [16, 656]."""
        return self.bytes[i % self.places]

    def _land(self, place: int) -> None:
        for r, row in self._on_their_way[place]:
            self.bytes[place, r] = row
        self._on_their_way[place] = []


@dataclass(frozen=True)
class TileTimes:
    """When the warp did what with one tile.

    Attributes:
        started: Its copy.
        landed: The copy was there.
        begun: The warp began to compute.
        done: The warp had read it, so its place was free.
    """

    started: float
    landed: float
    begun: float
    done: float


def timeline(tiles: int, places: int, copy: float, compute: float) -> list[TileTimes]:
    """A warp that works through tiles with a ring of places; waiting is what lies between them.

    A model, not a measurement: every copy takes as long, however many are on their way.

    Args:
        tiles: How many.
        places: Of the ring; so many copies are on their way at once.
        copy: From the start of a copy until it has landed.
        compute: Of one tile.
    """
    for name, count in (("tiles", tiles), ("places", places)):
        require_count(name, count, at_least=1)
    for name, time in (("copy", copy), ("compute", compute)):
        if not time > 0:
            raise ValueError(f"{name} must be above 0, got {time}")
    done: list[TileTimes] = []
    for i in range(tiles):
        started = done[i - places].done if i >= places else 0.0
        landed = started + copy
        begun = max(landed, done[-1].done if done else 0.0)
        done.append(TileTimes(started, landed, begun, begun + compute))
    return done

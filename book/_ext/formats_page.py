"""Byte maps, found by writing: change some numbers, and see which bytes of the format change.

So no offset is typed in here. What is drawn is where the library's own writers put things.
"""

import html
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from page_figure import inline
from page_table import table

DRAWS = 8  # random fillings of a group, after which each of its bytes has changed
WIDTH = 1000  # of a strip, in its own units
CROWDED = 60  # two offsets nearer than this would lie on each other


@dataclass(frozen=True)
class Part:
    """A run of bytes that depend on the same numbers.

    Attributes:
        first: First byte.
        nbytes: How many.
        kind: "data", "scale" or "rope"; it gives the colour.
        words: What it holds.
    """

    first: int
    nbytes: int
    kind: str
    words: str


def touched(write: Callable, numbers, span: slice) -> list[tuple[int, int]]:
    """Runs of bytes, as first byte and length, that change with the numbers of a span."""
    import torch

    generator = torch.Generator().manual_seed(0)
    before, places = write(numbers), set()
    for _ in range(DRAWS):
        other = numbers.clone()
        size = torch.exp2(torch.randint(-60, 60, (), generator=generator).float())
        other[:, span] = torch.randn(other[:, span].shape, generator=generator) * size
        places |= set((write(other) != before).flatten().nonzero().flatten().tolist())
    ends = [place for place in places if place + 1 not in places]
    starts = [place for place in places if place - 1 not in places]
    return [(a, b - a + 1) for a, b in zip(sorted(starts), sorted(ends), strict=True)]


def complete(parts: list[Part], nbytes: int) -> list[Part]:
    """The parts in order, if they cover each byte once."""
    parts = sorted(parts, key=lambda part: part.first)
    edges = [0, *(part.first + part.nbytes for part in parts)]
    if edges != [*(part.first for part in parts), nbytes]:
        raise ValueError(f"the parts found do not cover {nbytes} bytes once: {parts}")
    return parts


def groups(write: Callable, numbers, width: int, count: int, words: str) -> list[Part]:
    """Data and scale of each of `count` groups of `width` numbers."""
    found = []
    for group in range(count):
        span = slice(group * width, (group + 1) * width)
        data, scale = touched(write, numbers, span)
        found += [
            Part(*data, "data", f"{words} {group}: {width} E4M3"),
            Part(*scale, "scale", f"scale {group}: float32"),
        ]
    return found


def row_parts() -> list[Part]:
    """The row of 656 bytes."""
    import torch

    from mla_ref.cache.fp8_rows import GROUP, GROUPS, LATENT, ROPE, ROW_BYTES, pack_fp8_rows

    row = torch.ones(1, LATENT + ROPE)
    parts = groups(pack_fp8_rows, row, GROUP, GROUPS, "latent, group")
    [rope] = touched(pack_fp8_rows, row, slice(LATENT, LATENT + ROPE))
    return complete([*parts, Part(*rope, "rope", f"rotary key: {ROPE} bfloat16")], ROW_BYTES)


def index_page_parts(page_size: int = 64) -> list[Part]:
    """A page of index keys."""
    import torch

    from mla_ref.cache.index_keys import (
        INDEX_HEAD_DIM,
        KEY_BYTES,
        new_index_cache,
        write_index_keys,
    )

    def write(numbers):
        cache = new_index_cache(1, page_size)
        keys = numbers.view(page_size, INDEX_HEAD_DIM)
        write_index_keys(cache, keys, torch.arange(page_size), scale_rule="fp32")
        return cache

    numbers = torch.ones(1, page_size * INDEX_HEAD_DIM)
    parts = groups(write, numbers, INDEX_HEAD_DIM, page_size, "key")
    return complete(parts, page_size * KEY_BYTES)


def strip(parts: list[Part], words: str) -> str:
    """The parts side by side, to scale, with the offsets at which the kind changes."""
    total = parts[-1].first + parts[-1].nbytes
    boxes, marks = [], []
    for part in parts:
        x, width = WIDTH * part.first / total, WIDTH * part.nbytes / total
        # A gap between boxes of less than 2 units would be all that is seen of them.
        narrow = " map-narrow" if width < 2 else ""
        place = f'x="{x:.2f}" y="0" width="{width:.2f}" height="46"'
        boxes.append(
            f'<rect class="map-{part.kind}{narrow}" {place}>'
            f"<title>{html.escape(part.words)}, from byte {part.first}</title></rect>"
        )
    edges = [0, *(b.first for a, b in pairwise(parts) if a.kind != b.kind), total]
    xs = [WIDTH * edge / total for edge in edges]
    for before, edge, x, after in zip([-WIDTH, *xs], edges, xs, [*xs[1:], 2 * WIDTH], strict=False):
        crowded = "start" if x - before < CROWDED else "end" if after - x < CROWDED else "middle"
        side = "start" if edge == 0 else crowded
        marks.append(f'<text x="{x:.2f}" y="70" text-anchor="{side}">{edge:,}</text>')
    label = html.escape(words, quote=True)
    svg = f'<svg class="byte-map" viewBox="-2 0 {WIDTH + 48} 76" role="img" aria-label="{label}">'
    drawn = f'<div class="byte-map-frame">{svg}{"".join(boxes + marks)}</svg></div>'
    return f"```{{raw}} html\n{drawn}\n```"


def part_table(parts: list[Part]) -> str:
    rows = [["bytes", "how many", "what"], ["---", "--:", "---"]]
    for part in parts:
        last = part.first + part.nbytes - 1
        rows.append([f"{part.first:,} to {last:,}", part.nbytes, part.words])
    return table(rows)


def row_map(env) -> str:
    """The row of 656 bytes, drawn and listed."""
    parts = row_parts()
    return f"{strip(parts, 'The bytes of one cached row, to scale')}\n\n{part_table(parts)}"


def index_page_map(env) -> str:
    """A page of index keys, drawn; the first, second and last key listed."""
    parts = index_page_parts()
    keys = len(parts) // 2
    shown = [parts[i] for i in (0, 1, keys - 1, keys, keys + 1, -1)]
    return (
        strip(parts, "The bytes of a page of 64 index keys, to scale") + "\n\n" + part_table(shown)
    )


def planar_figure(env) -> str:
    """The 656-byte row beside the block-planar layout, as lesson 08 draws them."""
    from mla_ref.teaching import figures

    return inline(figures.byte_maps(), "A page of 656-byte rows and a page in block-planar layout")


def block_scaled(env) -> str:
    """What the block-scaled formats take for one row of 128 numbers."""
    import torch

    from mla_ref.numerics import quantise_mxfp8, quantise_nvfp4
    from mla_ref.numerics.mxfp8 import MXFP8_GROUP
    from mla_ref.numerics.nvfp4 import NVFP4_GROUP

    row = torch.ones(1, 128)
    head = ["format", "group", "data of group 1", "scale of group 1", "bytes for 128 numbers"]
    rows = [[*head, "bits a number"], ["---", "--:", "---", "---", "--:", "--:"]]
    for name, group, quantise in (
        ("MXFP8", MXFP8_GROUP, quantise_mxfp8),
        ("NVFP4", NVFP4_GROUP, lambda x: quantise_nvfp4(x, global_scale=1.0)),
    ):
        places = []
        for part in ("data", "scales"):
            # A group's numbers, and not its neighbours', decide these bytes.
            [(first, nbytes)] = touched(
                lambda x, part=part, quantise=quantise: getattr(quantise(x), part),
                row,
                slice(group, 2 * group),
            )
            last = first + nbytes - 1
            places.append(f"bytes {first} to {last}" if nbytes > 1 else f"byte {first}")
        made = quantise(row)
        stored = made.data.numel() + made.scales.numel()
        whole = f"{stored}" + (
            f" and {made.nbytes - stored} a tensor" if made.nbytes > stored else ""
        )
        rows.append([name, group, *places, whole, f"{8 * stored / 128:g}"])
    return table(rows)


def small_floats(env) -> str:
    """The numbers of E2M1 and the edges of E4M3, from the decoders."""
    import torch

    from mla_ref.numerics.float4 import from_e2m1
    from mla_ref.numerics.float8 import from_e4m3
    from mla_ref.numerics.mxfp8 import from_e8m0

    e2m1 = ", ".join(f"{x:g}" for x in from_e2m1(torch.arange(8, dtype=torch.uint8)).tolist())
    e4m3 = from_e4m3(torch.arange(128, dtype=torch.uint8))
    e8m0 = from_e8m0(torch.arange(255, dtype=torch.uint8))
    nan = from_e4m3(torch.arange(256, dtype=torch.uint8)).isnan().nonzero().flatten().tolist()
    low, high = float(e4m3[1]), float(e4m3.nan_to_num().max())
    least, most = float(e8m0.min()), float(e8m0.max())
    bytes_of_nan = " and ".join(f"0x{byte:02X}" for byte in nan)
    e4m3_words = f"0, {low:g} to {high:g} and their negatives; NaN in {bytes_of_nan}, no infinity"
    e8m0_words = f"powers of two, {least:.2g} to {most:.2g}; NaN in 0xFF, no zero, no sign"
    rows = [
        ["number", "bits", "values"],
        ["---", "--:", "---"],
        ["E4M3", 8, e4m3_words],
        ["E2M1", 4, f"{e2m1} and their negatives; neither NaN nor infinity"],
        ["E8M0", 8, e8m0_words],
    ]
    return table(rows)


FUNCTIONS = (row_map, index_page_map, planar_figure, block_scaled, small_floats)

"""The two workloads that a sparse MLA kernel is timed on, and what each must move and compute.

    disjoint   every row lists its own random slots of a cache that is several times the L2
    verifier   rows come in fours of one request and share most of their lists, as a verifier batch

The disjoint one is the usual benchmark and the worst case; the verifier one is what multi-token
prediction serves. Rows of the disjoint one still meet by chance: 256 lists of 2,048 of 262,144
slots hold 524,288 entries and about 227,000 different ones. So unique and gathered bytes are
counted, each for what it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.backends import AttnSpec
from mla_ref.bench.ceilings import Ceilings
from mla_ref.cache import pack_fp8_rows
from mla_ref.checks import require_choice, require_count

DISJOINT, VERIFIER = "disjoint", "verifier"
WORKLOADS = (DISJOINT, VERIFIER)
ROWS_PER_REQUEST = 4
LATENT, ROW = 512, 576
PAGE_SIZE = 64
# The un-absorbed scale of DeepSeek-V3.2: a kernel that takes 576^-0.5 by itself fails its check.
SOFTMAX_SCALE = 192**-0.5
# Scores then have a standard deviation of 0.87, as in the libraries' own tests: their tolerances,
# which peers are held to, are absolute, and a kernel that rounds queries to FP8 needs them.
Q_SIZE = 0.5
_PACKED_AT_ONCE = 32_768


@dataclass(frozen=True)
class KernelShape:
    """What a kernel is called with.

    Attributes:
        rows: Query rows.
        heads: Query heads.
        topk: Entries of a row's list, all of them valid.
        cache_format: As in `AttnSpec`.
    """

    rows: int
    heads: int
    topk: int = 2048
    cache_format: str = "fp8"

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        for name in ("rows", "heads", "topk"):
            require_count(name, getattr(self, name), at_least=1)

    @property
    def spec(self) -> AttnSpec:
        """What a backend is asked for."""
        return AttnSpec(self.heads, topk=self.topk, cache_format=self.cache_format)

    @property
    def flops(self) -> int:
        """Operations of the two products: 2 * (576 + 512) for each row, head and listed key."""
        return 2 * (ROW + LATENT) * self.rows * self.heads * self.topk

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.heads} heads, top-k {self.topk}"


@dataclass(frozen=True)
class KernelWorkload:
    """One call's tensors, on the device.

    Attributes:
        name: "disjoint" or "verifier".
        shape: Its sizes.
        q: bfloat16.
        kv_cache: Pages, shared by all workloads of a run.
        indices: int32 slots; within a row all different.
        overlap: Share of its list that a row has in common with the three others of its request; 0
            for disjoint rows.
        unique_rows: Different slots that the lists name.
    """

    name: str
    shape: KernelShape
    q: Float[Tensor, "rows h 576"]
    kv_cache: Shaped[Tensor, "pages page_size row"]
    indices: Int[Tensor, "rows topk"]
    overlap: float
    unique_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a cached row."""
        return self.kv_cache.shape[2] * self.kv_cache.element_size()

    @property
    def unique_bytes(self) -> int:
        """Bytes of the cached rows that are named, each counted once.

        Queries, lists and the output are not in it, so the floor is a little too low: it never
        flatters a kernel.
        """
        return self.unique_rows * self.row_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the cached rows that are named, as often as they are named."""
        return self.shape.rows * self.shape.topk * self.row_bytes

    def floor_s(self, ceilings: Ceilings) -> float:
        """No kernel is faster here: unique bytes at copy speed or FLOPs at the product's rate."""
        return max(
            self.unique_bytes / ceilings.copy_bytes_s, self.shape.flops / ceilings.matmul_flops_s
        )


def slots_beyond_l2(l2_bytes: int, row_bytes: int = 656) -> int:
    """Slots of a cache of at least three times the L2; at least 262,144 (172 MB of 656 bytes)."""
    slots = 262_144
    while slots * row_bytes < 3 * l2_bytes:
        slots *= 2
    return slots


def random_cache(
    slots: int, cache_format: str, device: torch.device, *, seed: int = 0
) -> Shaped[Tensor, "pages 64 row"]:
    """A cache of normal numbers in pages of 64, every slot filled.

    Scales of FP8 rows are powers of two: every reader takes those as they are, while some round
    other scales, and a peer shall not be called wrong for that. `mla-ref check` tries all rules.

    Args:
        slots: A multiple of 64.
        cache_format: "fp8" or "bf16".
        device: Where.
        seed: Of its numbers.
    """
    require_choice("cache_format", cache_format, ("fp8", "bf16"))
    if require_count("slots", slots, at_least=PAGE_SIZE) % PAGE_SIZE:
        raise ValueError(f"slots must be a multiple of {PAGE_SIZE}, got {slots}")
    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for first in range(0, slots, _PACKED_AT_ONCE):
        count = min(_PACKED_AT_ONCE, slots - first)
        numbers = torch.randn(count, ROW, generator=generator, device=device)
        if cache_format == "fp8":
            parts.append(pack_fp8_rows(numbers, scale_rule="pow2"))
        else:
            parts.append(numbers.to(torch.bfloat16))
    return torch.cat(parts).unflatten(0, (-1, PAGE_SIZE))


def make_workload(
    name: str,
    shape: KernelShape,
    kv_cache: Shaped[Tensor, "pages page_size row"],
    *,
    overlap: float = 0.9,
    seed: int = 0,
) -> KernelWorkload:
    """Queries and lists over a cache.

    Args:
        name: "disjoint" or "verifier".
        shape: Sizes; the rows of a verifier workload are a multiple of 4.
        kv_cache: From `random_cache`.
        overlap: Of a verifier workload: the share of each list that the four rows of a request have
            in common, from 0 to 1.
        seed: Of queries and lists.

    Raises:
        ValueError: The cache is smaller than the lists need.
    """
    require_choice("name", name, WORKLOADS)
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap must be from 0 to 1, got {overlap}")
    generator = torch.Generator().manual_seed(seed)
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    if name == DISJOINT:
        overlap = 0.0
        lists = [_slots(slots, shape.topk, generator) for _ in range(shape.rows)]
    else:
        if shape.rows % ROWS_PER_REQUEST:
            raise ValueError(
                f"rows of a verifier workload come in fours of a request, got {shape.rows}"
            )
        lists = []
        for _ in range(shape.rows // ROWS_PER_REQUEST):
            lists.extend(_four_lists(slots, shape.topk, overlap, generator))
    indices = torch.stack(lists)
    q = Q_SIZE * torch.randn(shape.rows, shape.heads, ROW, generator=generator)
    return KernelWorkload(
        name=name,
        shape=shape,
        q=q.to(kv_cache.device, torch.bfloat16),
        kv_cache=kv_cache,
        indices=indices.to(torch.int32).to(kv_cache.device),
        overlap=overlap,
        unique_rows=len(indices.unique()),
    )


def _slots(slots: int, count: int, generator: torch.Generator) -> Tensor:
    if slots < count:
        raise ValueError(f"kv_cache has {slots} slots, but the lists of a request name {count}")
    return torch.randperm(slots, generator=generator)[:count]


def _four_lists(
    slots: int, topk: int, overlap: float, generator: torch.Generator
) -> Sequence[Tensor]:
    """Lists of one request's rows: what is common, then what is each row's own, shuffled."""
    common = round(overlap * topk)
    own = topk - common
    drawn = _slots(slots, common + ROWS_PER_REQUEST * own, generator)
    lists = []
    for row in range(ROWS_PER_REQUEST):
        first = common + row * own
        both = torch.cat([drawn[:common], drawn[first : first + own]])
        lists.append(both[torch.randperm(topk, generator=generator)])
    return lists

"""A model of how long a sparse MLA decode kernel takes, from bytes, FLOPs and a chain of waits.

    floor      max(unique bytes / copy speed, FLOPs / product rate): no kernel is faster
    expected   launches + chain + max(gathered bytes / copy speed, FLOPs / reached rate) + partials

`expected` is of a kernel that fetches each listed row for each query row: none here shares what two
rows of a request have in common. Gathered bytes are counted at the speed of a copy even where the
L2 cache has them: on an H200, rows that share 90 % of their lists were only 9 % faster. A device
with a larger L2 may do better, at most to `best`, where a row that is read again costs nothing.

Each term is a number somebody measured, and says where (`roofline_devices`). The share of the
product rate is the one number taken from a kernel's own time, at one shape (`PROTOTYPE`). How far
the model is off is in `roofline_measured`; where the device was not measured, a time is called a
prediction.
"""

from dataclasses import dataclass

from mla_ref.bench.kernel_workload import LATENT, ROW, ROWS_PER_REQUEST, KernelShape
from mla_ref.bench.roofline_devices import Device, Fact
from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.checks import require_count, require_scale

SLOTS = 262_144  # 172 MB of 656-byte rows: several times the L2 cache of an H200
_STORED_BYTES = {"fp8": ROW_BYTES, "bf16": 2 * ROW}


@dataclass(frozen=True)
class Design:
    """How a kernel is built, as far as the model goes.

    Attributes:
        name: in words.
        heads_per_block: query heads that share one gathered row; more heads gather it again.
        most_splits: into how many pieces a row's list is cut at most.
        tensor_share: share of the product rate that it reaches when nothing else limits it.
    """

    name: str
    heads_per_block: int
    most_splits: int
    tensor_share: Fact

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_count("heads_per_block", self.heads_per_block, at_least=1)
        require_count("most_splits", self.most_splits, at_least=1)
        if require_scale("tensor_share", self.tensor_share.value) > 1:
            raise ValueError(f"tensor_share must be at most 1, got {self.tensor_share.value}")

    def head_blocks(self, heads: int) -> int:
        """Blocks that a row's heads take."""
        return -(-heads // self.heads_per_block)

    def splits(self, shape: KernelShape, multiprocessors: int) -> int:
        """Pieces of a row's list: a power of two that gives no more blocks than fit at once."""
        blocks, splits = shape.rows * self.head_blocks(shape.heads), 1
        while 2 * splits <= self.most_splits and 2 * splits * blocks <= multiprocessors:
            splits *= 2
        return splits


PROTOTYPE = Design(
    name="CUDA prototype",
    heads_per_block=64,
    most_splits=16,
    tensor_share=Fact(0.42, "from its own time at 256 rows and 64 heads on an H200"),
)


@dataclass(frozen=True)
class Estimate:
    """What the model says of one call, in seconds, part by part.

    Attributes:
        is_prediction: the device's rates were not measured.
        splits: pieces of each row's list.
        unique_bytes: different cached rows that the lists name.
        gathered_bytes: cached rows as often as blocks ask for them.
        partial_bytes: results of the splits, written once and read once; 0 for one split.
        flops: of the two products.
        launches_s: of the kernel and, after several splits, of the merge.
        chain_s: see `Device`.
        gather_s: gathered bytes at the speed of a copy.
        arithmetic_s: FLOPs at the rate that the design reaches.
        partials_s: partial results at the speed of a copy.
        floor_s: unique bytes or FLOPs, whichever takes longer at full speed.
        best_s: as `expected_s`, with every row that is read again for nothing.
    """

    is_prediction: bool
    splits: int
    unique_bytes: float
    gathered_bytes: int
    partial_bytes: int
    flops: int
    launches_s: float
    chain_s: float
    gather_s: float
    arithmetic_s: float
    partials_s: float
    floor_s: float
    best_s: float

    @property
    def expected_s(self) -> float:
        """All parts: gather and arithmetic overlap, so the longer of the two counts."""
        longer = max(self.gather_s, self.arithmetic_s)
        return self.launches_s + self.chain_s + longer + self.partials_s


def predict(
    shape: KernelShape,
    device: Device,
    design: Design = PROTOTYPE,
    *,
    overlap: float = 0.0,
    rows_per_request: int = 1,
    slots: int = SLOTS,
) -> Estimate:
    """How long one decode call takes, by the model above.

    Args:
        shape: Rows, heads, top-k and cache format.
        device: Its rates.
        design: How the kernel is built.
        overlap: Share of its list that a row has in common with the others of its request.
        rows_per_request: 1 for the disjoint workload; `ROWS_PER_REQUEST` for a verifier batch.
        slots: Of the cache, from which lists are drawn at random.

    Raises:
        ValueError: A number is out of range; see `expected_unique_rows`.
    """
    row_bytes = _STORED_BYTES[shape.cache_format]
    unique = row_bytes * expected_unique_rows(
        shape, overlap=overlap, rows_per_request=rows_per_request, slots=slots
    )
    gathered = row_bytes * shape.rows * design.head_blocks(shape.heads) * shape.topk
    splits = design.splits(shape, device.multiprocessors)
    partial = 0
    if splits > 1:
        partial = 2 * splits * shape.rows * shape.heads * (LATENT + 1) * 4
    copy, rate = device.copy_bytes_s.value, device.mma_flops_s.value
    launches = device.launch_s.value + (device.launch_more_s.value if splits > 1 else 0.0)
    arithmetic = shape.flops / (rate * design.tensor_share.value)
    chain, partials = device.chain_s.value, partial / copy
    return Estimate(
        is_prediction=not device.measured,
        splits=splits,
        unique_bytes=unique,
        gathered_bytes=gathered,
        partial_bytes=partial,
        flops=shape.flops,
        launches_s=launches,
        chain_s=chain,
        gather_s=gathered / copy,
        arithmetic_s=arithmetic,
        partials_s=partials,
        floor_s=max(unique / copy, shape.flops / rate),
        best_s=launches + chain + max(unique / copy, arithmetic) + partials,
    )


def expected_unique_rows(
    shape: KernelShape, *, overlap: float = 0.0, rows_per_request: int = 1, slots: int = SLOTS
) -> float:
    """How many different slots random lists name, on average.

    The rows of a request name topk * (overlap + rows_per_request * (1 - overlap)) slots; those of
    different requests meet by chance.

    Args:
        shape: Rows and top-k.
        overlap: From 0 to 1.
        rows_per_request: A divisor of the rows.
        slots: Of the cache; at least what one request names.

    Raises:
        ValueError: One of them is out of range.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap must be from 0 to 1, got {overlap}")
    if shape.rows % require_count("rows_per_request", rows_per_request, at_least=1):
        raise ValueError(f"rows_per_request must divide {shape.rows} rows, got {rows_per_request}")
    of_a_request = shape.topk * (overlap + rows_per_request * (1 - overlap))
    if require_count("slots", slots, at_least=1) < of_a_request:
        raise ValueError(f"slots must hold the {of_a_request:.0f} of one request, got {slots}")
    requests = shape.rows // rows_per_request
    return float(slots * (1 - (1 - of_a_request / slots) ** requests))


def verifier_estimate(
    shape: KernelShape, device: Device, design: Design = PROTOTYPE, *, overlap: float = 0.9
) -> Estimate:
    """`predict` of a verifier batch, whose rows come in fours of one request."""
    return predict(shape, device, design, overlap=overlap, rows_per_request=ROWS_PER_REQUEST)

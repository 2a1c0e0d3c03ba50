"""What the roofline model knows of each GPU, every number with where it comes from.

Three kinds of number, and each says which it is: measured on the device, given by somebody for it,
or assumed to be as on another device. No SM120 card was measured here.
"""

from dataclasses import dataclass, fields

from mla_ref.checks import require_count, require_scale


@dataclass(frozen=True)
class Fact:
    """A number in SI units, bytes or FLOP, and its source in words."""

    value: float
    source: str


@dataclass(frozen=True)
class Device:
    """One GPU, as far as the model goes.

    Attributes:
        name: the product's.
        measured: whether its rates were measured; else whatever is computed from them is a
            prediction.
        multiprocessors: how many, from NVIDIA's data sheet.
        copy_bytes_s: bytes a second of a device-to-device copy, read and written ones together.
        mma_flops_s: FLOP a second of mma.sync m16n8k16, 16-bit operands and float32 sums.
        launch_s: a graph of one empty kernel, after a flush of the L2 cache.
        launch_more_s: each further kernel of the graph.
        chain_s: from a block's first instruction to its first tile, when all is cold: the list,
            then the rows that it names, then the way back.
    """

    name: str
    measured: bool
    multiprocessors: int
    copy_bytes_s: Fact
    mma_flops_s: Fact
    launch_s: Fact
    launch_more_s: Fact
    chain_s: Fact

    def __post_init__(self) -> None:
        """Raise an error that names the fact that is not above 0."""
        require_count(f"{self.name}: multiprocessors", self.multiprocessors, at_least=1)
        for field in fields(self):
            if isinstance(fact := getattr(self, field.name), Fact):
                require_scale(f"{self.name}: {field.name}", fact.value)


_TIMER = "measured: a CUDA graph replayed after a flush of the L2 cache"
# Of the gather alone, the same rows without arithmetic: 12.4 us at 4 rows, of which 3.8 us are an
# empty kernel by the same timer and 1.3 us the 5.4 MB at the speed of a copy.
_CHAIN = 12.4e-6 - 3.8e-6 - 4 * 2048 * 656 / 4.27e12

H200 = Device(
    name="H200",
    measured=True,
    multiprocessors=132,
    copy_bytes_s=Fact(4.27e12, "measured: torch copy of a large tensor"),
    mma_flops_s=Fact(621e12, "measured: mma.sync from registers only, 16 warps a multiprocessor"),
    launch_s=Fact(4.7e-6, _TIMER),
    launch_more_s=Fact(0.67e-6, "measured: empty kernels in one graph"),
    chain_s=Fact(_CHAIN, "measured: the gather alone at 4 rows, less its launch and its bytes"),
)

_AS_H200 = "assumed: as on the H200, where it was measured"
# The share of its nominal 4.8 TB/s that the H200 reaches in a copy.
_NOMINAL_SHARE = 4.27 / 4.8
_GDDR7 = Fact(
    _NOMINAL_SHARE * 1.792e12,
    "NVIDIA's 1,792 GB/s times 0.89, the share of its nominal figure that an H200 reaches",
)

RTX_PRO_6000 = Device(
    name="RTX PRO 6000",
    measured=False,
    multiprocessors=188,
    copy_bytes_s=_GDDR7,
    mma_flops_s=Fact(503.8e12, "a third-party list of specifications: dense BF16, float32 sums"),
    launch_s=Fact(H200.launch_s.value, _AS_H200),
    launch_more_s=Fact(H200.launch_more_s.value, _AS_H200),
    chain_s=Fact(H200.chain_s.value, _AS_H200),
)

RTX_5090 = Device(
    name="RTX 5090",
    measured=False,
    multiprocessors=170,
    copy_bytes_s=_GDDR7,
    mma_flops_s=Fact(
        209.5e12, "unverified, from memory of NVIDIA's whitepaper: half rate with float32 sums"
    ),
    launch_s=Fact(H200.launch_s.value, _AS_H200),
    launch_more_s=Fact(H200.launch_more_s.value, _AS_H200),
    chain_s=Fact(H200.chain_s.value, _AS_H200),
)

DEVICES = (H200, RTX_PRO_6000, RTX_5090)


def device_named(product: str) -> Device | None:
    """The device of a product's name as its driver gives it, "NVIDIA GeForce RTX 5090"; or None."""
    return next((device for device in DEVICES if f" {device.name} " in f" {product} "), None)

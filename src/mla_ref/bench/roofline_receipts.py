"""The roofline model held against a receipt: a design for each kernel, and how far off it is.

A kernel that converts, scales and exchanges reaches a share of the product rate that nobody can
count beforehand. So that one number is taken from the receipt, for each number of heads at its
most rows, and all its other times are foretold. With the same share the model says what to expect
of a device that nobody has measured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mla_ref.bench.kernel_workload import DISJOINT, ROWS_PER_REQUEST, KernelShape
from mla_ref.bench.kernels import DECODE
from mla_ref.bench.receipt import Receipt, ReceiptLine
from mla_ref.bench.roofline_devices import Device, Fact
from mla_ref.bench.roofline_kernels import Design, Estimate, predict
from mla_ref.checks import require_choice

# Query heads that share a gathered row, and the most pieces of a list, by backend: for at most so
# many heads. Triton's programs take 32 heads at most, a block of the CUDA kernels 64, or 32 where
# that many rows do not fill the device.
BUILT = {
    "triton": ((16, 16, 32), (128, 32, 32)),
    "cupy": ((24, 8, 16), (32, 32, 16), (128, 64, 16)),
}


@dataclass(frozen=True)
class Held:
    """One time of a receipt and what the model says of it.

    Attributes:
        line: Of the receipt.
        estimate: Of the model, on the receipt's device.
        calibrates: The design's share was taken from it, so it proves nothing.
    """

    line: ReceiptLine
    estimate: Estimate
    calibrates: bool

    @property
    def error(self) -> float:
        """The model's time over the measured one, less 1: negative where it promises too much."""
        return self.estimate.expected_s * 1e6 / (self.line.median_us or 0.0) - 1


def design_of(receipt: Receipt, heads: int, device: Device) -> Design:
    """How the kernel that a receipt measured is built, with the share of the rate that it reaches.

    Args:
        receipt: With times of "decode" on the disjoint workload.
        heads: Query heads.
        device: On which the receipt was written.

    Raises:
        ValueError: Nobody has said how this backend's kernels are built, or the receipt has no
            such time.
    """
    built = BUILT[require_choice("receipt.backend", receipt.backend, tuple(BUILT))]
    _, per_block, splits = next((b for b in built if heads <= b[0]), built[-1])
    line = _most_rows(receipt, heads)
    free = Design(f"{receipt.backend}, {heads} heads", per_block, splits, Fact(1.0, "no loss"))
    shape = KernelShape(line.rows, heads, topk=line.topk)
    estimate = predict(shape, device, free)
    around = estimate.launches_s + estimate.chain_s + estimate.partials_s
    left = (line.median_us or 0.0) * 1e-6 - around
    share = min(shape.flops / (device.mma_flops_s.value * left), 1.0) if left > 0 else 1.0
    words = f"from its own time at {line.rows} rows on {receipt.machine.device}"
    return replace(free, tensor_share=Fact(share, words))


def hold(
    receipt: Receipt, device: Device, designs: Mapping[int, Design] | None = None
) -> Iterator[Held]:
    """Every time of decode in a receipt beside the model's, by heads and rows.

    Args:
        receipt: What was measured.
        device: Where.
        designs: By heads, from a receipt of another device: then nothing here calibrates, and the
            errors are those of a prediction. None: from this receipt.
    """
    own = [x for x in receipt.lines if x.own and x.contender == DECODE and x.median_us is not None]
    foretold = designs is not None
    if designs is None:
        designs = {heads: design_of(receipt, heads, device) for heads in {x.heads for x in own}}
    for line in sorted(own, key=lambda x: (x.workload, x.overlap, x.heads, x.rows)):
        disjoint = line.workload == DISJOINT
        estimate = predict(
            KernelShape(line.rows, line.heads, topk=line.topk),
            device,
            designs[line.heads],
            overlap=0.0 if disjoint else line.overlap,
            rows_per_request=1 if disjoint else ROWS_PER_REQUEST,
        )
        calibrates = not foretold and line is _most_rows(receipt, line.heads)
        yield Held(line, estimate, calibrates)


def _most_rows(receipt: Receipt, heads: int) -> ReceiptLine:
    """Decode's time of the largest disjoint batch."""
    found = [
        line
        for line in receipt.lines
        if line.own
        and (line.contender, line.workload, line.heads) == (DECODE, DISJOINT, heads)
        and line.median_us is not None
    ]
    if not found:
        raise ValueError(f"receipt must hold a time of {DECODE} with {heads} heads, disjoint lists")
    return max(found, key=lambda line: line.rows)

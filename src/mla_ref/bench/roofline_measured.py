"""How far the roofline model is off: the times that it can be held against, and its errors.

The times are of throw-away prototypes, mma.sync and at most 101,376 bytes of shared memory a block,
on one H200 (driver 580.159.04): FP8 rows, top-k 2048 of 262,144 slots, a CUDA graph replayed after
a flush of the L2 cache, median of three medians. kernels/LOG.md has the measurements of the kernels
that followed them.
"""

from dataclasses import dataclass

from mla_ref.bench.kernel_workload import ROWS_PER_REQUEST, KernelShape
from mla_ref.bench.roofline_devices import H200
from mla_ref.bench.roofline_kernels import PROTOTYPE, Estimate, predict


@dataclass(frozen=True)
class Measured:
    """One time of the CUDA prototype on the H200.

    Attributes:
        rows: query rows.
        heads: query heads.
        microseconds: of the call, the merge included.
        overlap: None for the disjoint workload; else of the four rows of a request.
        calibrates: a constant of the model was taken from it, so it proves nothing.
    """

    rows: int
    heads: int
    microseconds: float
    overlap: float | None = None
    calibrates: bool = False

    @property
    def estimate(self) -> Estimate:
        """What the model says of this call."""
        shape = KernelShape(self.rows, self.heads)
        if self.overlap is None:
            return predict(shape, H200, PROTOTYPE)
        return predict(
            shape, H200, PROTOTYPE, overlap=self.overlap, rows_per_request=ROWS_PER_REQUEST
        )

    @property
    def error(self) -> float:
        """The model's time over the measured one, less 1: negative where it promises too much."""
        return self.estimate.expected_s * 1e6 / self.microseconds - 1


MEASURED = (
    Measured(4, 8, 15.6),
    Measured(16, 8, 21.4),
    Measured(64, 8, 41.3),
    Measured(256, 8, 98.2),
    Measured(4, 64, 27.5),
    Measured(16, 64, 41.2),
    Measured(64, 64, 91.9),
    Measured(256, 64, 283.0, calibrates=True),
    Measured(4, 128, 34.1),
    Measured(16, 128, 58.4),
    Measured(64, 128, 144.4),
    Measured(256, 128, 551.0),
    Measured(4, 8, 15.3, overlap=0.9),
    Measured(16, 8, 19.6, overlap=0.9),
    Measured(64, 8, 35.1, overlap=0.9),
    Measured(256, 8, 89.9, overlap=0.9),
)

"""A bug of kernels that copy ahead, as published libraries had it."""

from mla_ref.teaching.warp_memory import Ring


class ImpatientRing(Ring):
    """BUG: the wait for a tile's copies is not there.

    Right whenever copies are faster than the warp. Otherwise it computes with what the place held
    before: with an older tile, or with what another kernel has left.
    """

    def wait(self, i: int) -> None:
        """Go on without waiting."""

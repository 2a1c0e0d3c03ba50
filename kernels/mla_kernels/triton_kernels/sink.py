"""The attention sink: one more key of value 0, applied once, after the last merge."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Beyond 2^126 the sink leaves nothing that float32 could hold.
MOST = tl.constexpr(126.0)


@triton.jit
def kept_beside_sink(lse, sink):
    """1 / (1 + exp(sink - lse)), the factor of an output: 0 at a sink of 1e5, never inf / inf.

    Args:
        lse: Natural, finite; any number where nothing was seen, since the output is 0 there.
        sink: Natural units; -inf gives 1 and +inf gives 0.
    """
    ahead = (sink - lse) * LOG2E
    return tl.where(ahead > MOST, 0.0, 1.0 / (1.0 + tl.exp2(tl.minimum(ahead, MOST))))

"""Noise on the device: the numbers of `mla_ref.speculative.noise`, for a whole batch in one launch.

Chance belongs to a request and an output position and to nothing else, so the generator has no
state: Philox-4x64 with ten rounds (Salmon et al. 2011) maps (seed, position) as its key and a
counter to four words of 64 bits. Word 0 is the uniform draw, word 1 + v makes the exponential one
of token v. NumPy counts from 1, and so does this.

A sampler that is replayed in a graph needs this: noise made on the host would be the same in every
replay, or 517 kB a row to copy in every step. The engine samples outside its graphs, with noise of
the host, so tests alone call it yet.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from mla_kernels.triton_kernels.outputs import out_or_new, require_runnable
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.checks import require_count, require_integer, require_same_device, require_size
from mla_ref.platform.stream import current_device

BLOCK = 256  # counters a program, of four words each


@triton.jit
def _philox(counter, seed, position):
    """The four words of each counter under the key (seed, position)."""
    zero = counter ^ counter
    a, b, c, d = counter, zero, zero, zero
    key_a, key_b = zero ^ seed, zero ^ position
    for _ in tl.static_range(10):
        high_a = tl.umulhi(a, zero + 0xD2E7470EE14C6C93)
        low_a = a * 0xD2E7470EE14C6C93
        high_c = tl.umulhi(c, zero + 0xCA5A826395121157)
        low_c = c * 0xCA5A826395121157
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a += 0x9E3779B97F4A7C15
        key_b += 0xBB67AE8584CAA73B
    return a, b, c, d


@triton.jit
def _store_exponential(exponential, word, token, vocab):
    # 52 bits and a half: neither 0 nor 1, so that the draw is neither infinite nor 0. In float64,
    # because a float32 near 1 knows no draw between 0 and 6e-8, and small draws win the race.
    inner = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    draw = (-tl.log(inner)).to(tl.float32)
    tl.store(exponential + token, draw, mask=(token >= 0) & (token < vocab))


@triton.jit
def noise_kernel(
    seeds, positions, uniform, exponential, vocab, seed_stride, position_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and block of counters; uniform and exponential are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row * seed_stride).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row * position_stride).to(tl.uint64, bitcast=True)
    a, b, c, d = _philox((block + 1).to(tl.uint64), seed, position)
    exponential += row * vocab
    _store_exponential(exponential, a, 4 * block - 1, vocab)
    _store_exponential(exponential, b, 4 * block, vocab)
    _store_exponential(exponential, c, 4 * block + 1, vocab)
    _store_exponential(exponential, d, 4 * block + 2, vocab)
    draw = ((a >> 11).to(tl.float64) + 1.0) * 1.1102230246251565e-16
    tl.store(uniform + row + tl.zeros([BLOCK], tl.int32), draw, mask=block == 0)


def batch_noise(
    seeds: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
    vocab: int,
    *,
    uniform: Float[Tensor, " rows"] | None = None,
    exponential: Float[Tensor, "rows vocab"] | None = None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows vocab"]]:
    """`mla_ref.speculative.noise.position_noise` of each row, on the device.

    Args:
        seeds: int64, of each row's request.
        positions: int64, of the token in the request's output, from 0.
        vocab: Number of tokens.
        uniform: Where to write, float64; a new tensor if None.
        exponential: Where to write, float32; a new tensor if None.

    Returns:
        uniform, the same bits as the twin's, and exponential, the same but for a last bit where
        two float64 logarithms fall on either side of a border between float32 numbers.
    """
    named = {"seeds": seeds, "positions": positions}
    for name, tensor in named.items():
        if require_integer(name, tensor, "rows").dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    require_size("positions", positions, 0, seeds.shape[0], "one a seed")
    require_same_device(named)
    require_count("vocab", vocab)
    require_runnable("seeds", seeds)
    rows = seeds.shape[0]
    u = out_or_new("uniform", uniform, (rows,), torch.float64, seeds)
    e = out_or_new("exponential", exponential, (rows, vocab), torch.float32, seeds)
    if rows:
        with current_device(seeds.device):
            noise_kernel[(rows, triton.cdiv(1 + vocab, 4 * BLOCK))](
                seeds, positions, u, e, vocab, seeds.stride(0), positions.stride(0), BLOCK=BLOCK
            )
    return u, e


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: one kernel, for a vocabulary that is a multiple of 16."""
    pointers = {"seeds": "*i64", "positions": "*i64", "uniform": "*fp64", "exponential": "*fp32"}
    return (
        Compilation(
            name="noise/philox",
            fn=noise_kernel,
            signature=pointers | {"vocab": "i32"},
            constexprs={"seed_stride": 1, "position_stride": 1, "BLOCK": BLOCK},
            aligned=(*pointers, "vocab"),
        ),
    )

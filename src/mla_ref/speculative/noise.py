"""The chance in sampling: numbers that belong to a request and an output position, to nothing else.

A generator that lives with a batch gives a request other numbers when a neighbour arrives, when it
is preempted and resumed, or when a draft was judged before it (vllm#6034, vllm#51226). Here the
numbers are a function of (seed, position): a counter-based generator with that pair as its key.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.random import Philox
from torch import Tensor

from mla_ref.checks import describe, require_count


class Noise(NamedTuple):
    """What chance may decide about one token.

    Attributes:
        uniform: In (0, 1]: judges a draft. Never 0, at which a draft of probability 0 would pass.
        exponential: A draw of Exp(1) for each token, on the CPU: argmax p / E has the law p.
    """

    uniform: float
    exponential: Float[Tensor, " vocab"]


def position_noise(seed: int, position: int, vocab: int) -> Noise:
    """The noise of one output position of one request.

    Philox takes (seed, position) as its 128-bit key, so seed 1 at position 2 and seed 2 at position
    1 are strangers; of seed + position they would be one. Philox's raw 64-bit words are the same in
    every NumPy, which the draws of NumPy's distributions are not, so these are made here.

    Where a draft is judged and the token is drawn again, both read this one noise: the uniform
    first, the exponentials if the draft was rejected. Noise of a position behind a rejected draft
    has decided nothing and is read afresh in the next step. So a request has the same noise however
    it was drafted; the tokens that the noise decides on may differ, their law may not. A drafter
    that samples needs noise of its own: a draft chosen by these numbers is judged by a biased E.

    Args:
        seed: Of the request; a signed int of 64 bits.
        position: Of the token in the request's output, from 0.
        vocab: Number of tokens; a larger one only adds draws at the end.

    Returns:
        The noise. Exponentials are float32, above 1.1e-16 and below 37.
    """
    # As uint64 at once: of an int beyond 2**63 and a small one NumPy makes a pair of floats.
    pair = [require_seed("seed", seed) % 2**64, require_count("position", position)]
    key = np.array(pair, dtype=np.uint64)
    words = Philox(key=key).random_raw(1 + require_count("vocab", vocab))
    uniform = ((int(words[0]) >> 11) + 1) * 2.0**-53
    # 52 bits and a half: neither 0 nor 1, so that E is neither infinite nor 0. In float64, because
    # the small E win the race, and a float32 near 1 knows no E between 0 and 6e-8.
    inner = ((words[1:] >> np.uint64(12)) + 0.5) * 2.0**-52
    return Noise(uniform, torch.from_numpy(inner).log_().neg_().float())


def require_seed(name: str, value: object) -> int:
    """Return `value` if it is an int that fits into 64 bits with its sign."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits with its sign, got {value}")
    return value

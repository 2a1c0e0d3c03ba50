"""What a router may know of a step: facts on the host about the requests that are really there.

A batch that replays a CUDA graph has rows that stand for nobody. A vacated row may hold the lengths
and the flag of a request that has left (vllm#41841), so padding is cut off here, once, and nothing
behind this file can be misled by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_ref.batching.step import Step
from mla_ref.checks import describe, require_count


@dataclass(frozen=True)
class BatchFacts:
    """Lengths and flags of the real requests, and how far the batch is padded.

    Attributes:
        query_lens: New tokens of each real request, in the order of their rows.
        is_prefilling: Whether each still runs its prompt; None: nobody has said. False for a
            request without a new token: it runs nothing.
        num_reqs_padded: Requests with padding.
        num_tokens_padded: Rows that a kernel gets.
    """

    query_lens: tuple[int, ...]
    is_prefilling: tuple[bool, ...] | None
    num_reqs_padded: int
    num_tokens_padded: int

    @property
    def num_reqs(self) -> int:
        """Real requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Real new tokens."""
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """New tokens of the request that has the most."""
        return max(self.query_lens, default=0)

    def request(self, index: int) -> "BatchFacts":
        """The facts of one request as a batch of its own, without padding."""
        length = self.query_lens[index]
        flags = None if self.is_prefilling is None else (self.is_prefilling[index],)
        return BatchFacts((length,), flags, 1, length)

    def without(self, requests: Sequence[int]) -> "BatchFacts":
        """The facts if these requests were left out and the rest not padded."""
        kept = [r for r in range(self.num_reqs) if r not in requests]
        lens = tuple(self.query_lens[r] for r in kept)
        flags = self.is_prefilling
        if flags is not None:
            flags = tuple(flags[r] for r in kept)
        return BatchFacts(lens, flags, len(lens), sum(lens))


def batch_facts(
    query_lens: Sequence[int] | np.ndarray | Tensor,
    is_prefilling: Sequence[bool] | np.ndarray | Tensor | None,
    *,
    num_reqs: int | None = None,
    num_tokens_padded: int | None = None,
) -> BatchFacts:
    """Read the facts from lists, NumPy arrays or host tensors.

    Args:
        query_lens: New tokens of each request, padding included.
        is_prefilling: One bool a request, padding included; what a padded row holds is not looked
            at. None: nobody has said.
        num_reqs: How many of them are real, the first ones; None: all. A request without a token
            decides nothing either way.
        num_tokens_padded: Rows of the graph that is replayed; None: the sum of the lengths.

    Raises:
        TypeError: A fact lies on a device. Reading it would make the host wait for the device, and
            is illegal while a graph is captured.
        ValueError: The counts do not fit each other.
    """
    lens = host_counts("query_lens", query_lens)
    real = len(lens) if num_reqs is None else require_count("num_reqs", num_reqs)
    if real > len(lens):
        raise ValueError(f"num_reqs is {real}, but query_lens has {len(lens)} requests")
    if any(lens[real:]):
        raise ValueError(f"query_lens must be 0 behind the first {real}, got {list(lens)}")
    tokens = sum(lens)
    padded = tokens if num_tokens_padded is None else num_tokens_padded
    if require_count("num_tokens_padded", padded) < tokens:
        raise ValueError(f"num_tokens_padded must be at least the {tokens} real, got {padded}")
    flags = None
    if is_prefilling is not None:
        flags = _host_list("is_prefilling", is_prefilling)
        if len(flags) != len(lens):
            raise ValueError(f"query_lens has {len(lens)} requests but is_prefilling {len(flags)}")
        for flag in flags:
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"is_prefilling must hold bools, got {describe(flag)}")
        # Two fixes for one fault, and both are kept: only real rows count (vllm#41873), and only
        # rows with a token (vllm#42947).
        flags = [bool(f) and q > 0 for f, q in zip(flags[:real], lens[:real], strict=True)]
    return BatchFacts(lens[:real], None if flags is None else tuple(flags), len(lens), padded)


def facts_of(step: Step | BatchFacts) -> BatchFacts:
    """The facts of a step; facts are handed on as they are."""
    if isinstance(step, BatchFacts):
        return step
    if not isinstance(step, Step):
        raise TypeError(f"step must be a Step or BatchFacts, got {describe(step)}")
    return batch_facts(
        step.query_lens,
        step.is_prefilling,
        num_reqs=step.num_reqs,
        num_tokens_padded=step.num_tokens_padded,
    )


def host_counts(name: str, value: object) -> tuple[int, ...]:
    """Numbers of at least 0 from a list, a NumPy array or a host tensor."""
    return tuple(require_count(name, number) for number in _host_list(name, value))


def _host_list(name: str, value: object) -> list[Any]:
    """The elements of a one-dimensional host array; never a silent wait for a device."""
    if isinstance(value, Tensor) and value.device != torch.device("cpu"):
        raise TypeError(
            f"{name} must be on the host, got {describe(value)} on {value.device}: reading it "
            "would wait for the device, and cannot be captured in a graph"
        )
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got {list(value.shape)}")
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    raise TypeError(f"{name} must be a sequence, a NumPy array or a host tensor, got {value!r}")

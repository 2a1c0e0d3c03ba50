"""What a long context costs: peak memory and time of rungs 2, 3 and 4 as the prompt grows.

All three compute n * n scores a head and mask half of them, so all times grow with n² in the end.
What differs is what they hold. Rung 2 keeps whole score matrices, so its peak grows with n² too.
Rungs 3 and 4 keep one tile of scores, n * page_size a head: their peak grows with n, as the output
itself does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.attention import online_attention, paged_attention, vectorised_attention
from mla_ref.bench.gate import close_to
from mla_ref.bench.memory import CreatedTensor, TensorMemory
from mla_ref.bench.timer import HOST_CLOCK, Clock, measure
from mla_ref.bench.timing import Timing
from mla_ref.cache import pages_needed, slot_mapping, write_rows
from mla_ref.checks import describe, require_count
from mla_ref.numerics import AttentionResult, oracle_attention

# float32 rungs against the float64 oracle. They were seen to err by 4e-7 in relative L2 at 4,096
# tokens; a mask that is off by one key errs by 1e-2 and more.
REL_L2, MAX_ABS = 5e-6, 2e-5


@dataclass(frozen=True)
class ContextRow:
    """One rung at one context length.

    Attributes:
        rung: Its number on the ladder.
        name: Its name there.
        length: Tokens, s_q = s_kv.
        peak_bytes: Most bytes of tensors held at once, without the inputs q, k, v and the cache.
        largest_tensor: The largest tensor made on the way.
        timing: Times of the same call, behind the gate.
    """

    rung: int
    name: str
    length: int
    peak_bytes: int
    largest_tensor: CreatedTensor
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        tensor = asdict(self.largest_tensor)
        return {
            "rung": self.rung,
            "name": self.name,
            "length": self.length,
            "peak_bytes": self.peak_bytes,
            "largest_tensor": {**tensor, "shape": list(self.largest_tensor.shape)},
            "timing": self.timing.to_json(),
        }


@dataclass(frozen=True)
class _Inputs:
    """One prompt of n tokens, the same for all rungs; keys and values also lie in pages."""

    q: Float[Tensor, "n h d"]
    k: Float[Tensor, "n h d"]
    v: Float[Tensor, "n h d"]
    k_cache: Float[Tensor, "pages page_size h d"]
    v_cache: Float[Tensor, "pages page_size h d"]
    batch: dict[str, Tensor]
    softmax_scale: float

    @classmethod
    def random(cls, length: int, heads: int, head_dim: int, page_size: int) -> "_Inputs":
        generator = torch.Generator().manual_seed(length)
        q, k, v = torch.randn(3, length, heads, head_dim, generator=generator)
        pages = pages_needed(length, page_size)
        batch = {
            "query_start_loc": torch.tensor([0, length]),
            "seq_lens": torch.tensor([length]),
            # In any order, as after hours of serving.
            "block_table": torch.randperm(pages, generator=generator)[None],
        }
        slots = slot_mapping(**batch, page_size=page_size)
        k_cache, v_cache = torch.full((2, pages, page_size, heads, head_dim), math.nan)
        write_rows(k_cache, k, slots)
        write_rows(v_cache, v, slots)
        return cls(q, k, v, k_cache, v_cache, batch, softmax_scale=head_dim**-0.5)

    def vectorised(self) -> AttentionResult:
        q, k, v = self.q[None], self.k[None], self.v[None]
        result = vectorised_attention(q, k, v, softmax_scale=self.softmax_scale)
        return AttentionResult(result.out[0], result.lse[0])

    def online(self) -> AttentionResult:
        page_size = self.k_cache.shape[1]
        return online_attention(
            self.q, self.k, self.v, softmax_scale=self.softmax_scale, block_size=page_size
        )

    def paged(self) -> AttentionResult:
        return paged_attention(
            self.q, self.k_cache, self.v_cache, **self.batch, softmax_scale=self.softmax_scale
        )

    def oracle(self) -> AttentionResult:
        """The right answer in float64, a few rows at a time so that its own memory stays small."""
        keys = torch.arange(len(self.k))
        parts = [
            oracle_attention(
                self.q[rows],
                self.k,
                self.v,
                keys <= rows[:, None],
                softmax_scale=self.softmax_scale,
            )
            for rows in keys.split(256)
        ]
        return AttentionResult(*(torch.cat(part) for part in zip(*parts, strict=True)))


def measure_context(
    lengths: Sequence[int],
    *,
    heads: int = 4,
    head_dim: int = 64,
    page_size: int = 64,
    warmup: int = 1,
    repeats: int = 5,
    clock: Clock = HOST_CLOCK,
) -> Iterator[ContextRow]:
    """Measure rungs 2, 3 and 4 at each context length, in float32 on the CPU.

    Peak memory and time come from separate calls, since counting tensors takes time. A time is
    taken only where output and LSE agree with the float64 oracle at that very shape.

    Args:
        lengths: Context lengths n in tokens; all n queries attend at once, as in a prefill.
        heads: Heads of q, k and v.
        head_dim: Width of a head.
        page_size: Tokens a page of rung 4, and keys a tile of rung 3.
        warmup: Runs that are not counted, 0 or more.
        repeats: Timed runs of each rung, 1 or more.
        clock: Times one call.

    Returns:
        An iterator over rows, by length and then by rung. A row is measured when it is asked for.

    Raises:
        GateError: A rung's result is wrong.
        TypeError: A number is not an int.
        ValueError: A number is too small, or there is no length.
    """
    if not lengths:
        raise ValueError(f"lengths must hold a context length at least, got {describe(lengths)}")
    for length in lengths:
        require_count("lengths", length, at_least=1)
    for name, value in (("heads", heads), ("head_dim", head_dim), ("page_size", page_size)):
        require_count(name, value, at_least=1)
    require_count("warmup", warmup)
    require_count("repeats", repeats, at_least=1)

    def rows() -> Iterator[ContextRow]:
        for length in lengths:
            inputs = _Inputs.random(length, heads, head_dim, page_size)
            check = close_to(inputs.oracle()._asdict(), rel_l2=REL_L2, max_abs=MAX_ABS)
            rungs: list[tuple[int, str, Callable[[], AttentionResult]]] = [
                (2, "vectorised", inputs.vectorised),
                (3, "online", inputs.online),
                (4, "paged", inputs.paged),
            ]
            for rung, name, run in rungs:
                with TensorMemory() as memory:
                    run()
                timing = measure(
                    f"rung {rung} ({name}), {length} tokens",
                    run,
                    check,
                    warmup=warmup,
                    repeats=repeats,
                    clock=clock,
                )
                yield ContextRow(
                    rung, name, length, memory.peak_bytes, memory.largest_tensor, timing
                )

    return rows()


def growth(rows: Sequence[ContextRow]) -> dict[str, float]:
    """How the peak grows: the p of n^p between the two longest contexts, by rung name.

    Raises:
        ValueError: A rung was measured at one length only.
    """
    exponents = {}
    for name in dict.fromkeys(row.name for row in rows):
        peaks = {row.length: row.peak_bytes for row in rows if row.name == name}
        if len(peaks) < 2:
            raise ValueError(f"rows must hold two context lengths of {name}, got {sorted(peaks)}")
        shorter, longer = sorted(peaks)[-2:]
        exponents[name] = math.log(peaks[longer] / peaks[shorter]) / math.log(longer / shorter)
    return exponents

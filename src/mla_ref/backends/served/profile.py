"""A served sparse-MLA backend as data: what it takes, how it rounds, what its LSE means.

Engines reach sparse MLA through kernels of several libraries. They compute the same attention and
round in different places: one reads a scale by its exponent alone, one rounds dequantised rows to
bfloat16, one quantises queries and weights to FP8. A profile says which, with its sources, so that
the arithmetic can be run in torch and its error measured. It says nothing about speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mla_ref.backends.protocol import CACHE_FORMATS
from mla_ref.backends.served.tolerance import PeerTolerance
from mla_ref.checks import require_choice, require_count
from mla_ref.numerics.float8 import SCALE_READERS, SCALE_RULES

ROWS = ("float32", "bfloat16")
QUERIES = ("as given", "e4m3")
WEIGHTS = ("float32", "q dtype", "e4m3", "e4m3+residual")
PARTIALS = ("float32", "bfloat16")
SINKS = ("none", "out", "out and lse")


@dataclass(frozen=True)
class Arithmetic:
    """Where a kernel rounds, between the bytes of the cache and its float32 sums.

    The default rounds nowhere.

    Attributes:
        scale_reader: How the scales of 656-byte rows are taken: "stored" or "truncated".
        rows: "bfloat16": a dequantised number is bf16(e4m3 * bf16(scale)). "float32": E4M3 numbers
            are multiplied as they are and the scale is applied to the float32 sum of its group.
        queries: "e4m3": the latent part of q is rounded to E4M3 in groups of 128 with a scale of
            2^ceil(log2(max(amax, 1e-4) / 448)); the rotary part stays as it is.
        weights: The softmax weights before the second product. "q dtype": rounded to the dtype of
            q. "e4m3": times the value's scale, then E4M3 with one float32 scale for 64 keys, a head
            and a group of 128 values. "e4m3+residual": what that rounding lost is rounded to E4M3
            too and added in a second pass. The sum of the weights is taken before rounding.
        partials: Dtype of the splits' outputs in `decode`; their LSE is float32.
    """

    scale_reader: str = "stored"
    rows: str = "float32"
    queries: str = "as given"
    weights: str = "float32"
    partials: str = "float32"

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        require_choice("scale_reader", self.scale_reader, SCALE_READERS)
        require_choice("rows", self.rows, ROWS)
        require_choice("queries", self.queries, QUERIES)
        require_choice("weights", self.weights, WEIGHTS)
        require_choice("partials", self.partials, PARTIALS)
        if self.rows == "bfloat16" and self.weights.startswith("e4m3"):
            raise ValueError(
                f"weights {self.weights!r} carry the scales of the values, so rows must be "
                f"'float32', got {self.rows!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ServedProfile:
    """One served backend.

    Attributes:
        name: Of the profile, such as "flashmla-sm90".
        stands_for: Library, kernel and the engine's name for it.
        sources: Public repositories, files and issues that the facts are from.
        architectures: GPUs that the kernel is built for. The emulation runs anywhere.
        heads: By cache format, the numbers of query heads that the kernel is built for; fewer are
            padded up to the next. None: any number. A format that is not a key is not served.
        page_sizes: Tokens a page as the engine serves it. None: any.
        q_dtypes: Of queries and output.
        topk_multiple: The width of the index lists is a multiple of it.
        scale_rule: How the library's own writer scales a group, see `numerics.float8.group_scale`;
            None where it has no 656-byte rows. vLLM writes "fp32" for every reader.
        arithmetic: Where it rounds.
        max_splits: Splits of a list in `decode` here. Kernels choose by the GPU and the batch.
        lse_base: "e" or "2", of the LSE as returned. Inside, all take the softmax in base 2.
        empty_lse: "-inf" or "+inf", the LSE of a row without a valid entry.
        sink: What the kernel's own sink reaches: "none" (it has none), "out", or "out and lse".
        hands_on_lse: Whether the engine's backend gives the LSE to its caller at all.
        lists: In words, what the engine makes of an index list for this kernel.
        tolerance: What the library's or the engine's own tests allow.
    """

    name: str
    stands_for: str
    sources: tuple[str, ...]
    architectures: tuple[str, ...]
    heads: Mapping[str, tuple[int, ...] | None] = field(hash=False)
    page_sizes: tuple[int, ...] | None
    q_dtypes: tuple[torch.dtype, ...]
    topk_multiple: int
    scale_rule: str | None
    arithmetic: Arithmetic
    max_splits: int
    lse_base: str
    empty_lse: str
    sink: str
    hands_on_lse: bool
    lists: str
    tolerance: PeerTolerance

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        for cache_format in self.heads:
            require_choice("a key of heads", cache_format, CACHE_FORMATS)
        if self.scale_rule is not None:
            require_choice("scale_rule", self.scale_rule, SCALE_RULES)
        require_count("topk_multiple", self.topk_multiple, at_least=1)
        require_count("max_splits", self.max_splits, at_least=1)
        require_choice("lse_base", self.lse_base, ("e", "2"))
        require_choice("empty_lse", self.empty_lse, ("-inf", "+inf"))
        require_choice("sink", self.sink, SINKS)

    @property
    def cache_formats(self) -> tuple[str, ...]:
        """Those of `CACHE_FORMATS` that it serves."""
        return tuple(self.heads)

    def padded_heads(self, num_heads: int, cache_format: str) -> int | None:
        """The number of heads that the kernel runs with, or None where it is built for fewer."""
        require_count("num_heads", num_heads, at_least=1)
        require_choice("cache_format", cache_format, self.cache_formats)
        built = self.heads[cache_format]
        if built is None:
            return num_heads
        return min((n for n in built if n >= num_heads), default=None)

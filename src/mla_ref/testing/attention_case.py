"""Cases of sparse attention: the two kinds "decode" and "extend", with the same arguments."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.backends import AttnSpec
from mla_ref.cache.fp8_rows import ROW_BYTES
from mla_ref.numerics import AttentionResult
from mla_ref.testing import definition
from mla_ref.testing.adapter import Adapter, Skipped
from mla_ref.testing.attention_call import call, compared, repeated
from mla_ref.testing.case import Case
from mla_ref.testing.lists import make_counts, make_lists
from mla_ref.testing.storage import in_pages, packed, poisoned, strided
from mla_ref.testing.suspects import looks_like
from mla_ref.testing.tolerance import attention_limits
from mla_ref.testing.verdict import Finding

LATENT, ROPE = 512, 64
ROUNDED = (
    "weights or dequantised rows are rounded to bfloat16, as tensor cores take them; "
    'declare maths="bfloat16"'
)


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """One call of decode or extend, in the served geometry of 512 + 64 numbers a row.

    Attributes:
        rows: Query rows.
        heads: Query heads.
        topk: Width of the lists.
        page_size: Tokens a page.
        pages: Pages of the cache; 0: just enough for the lists and two slots that nobody lists.
        q_dtype: "bfloat16" or "float32", also of a cache of float rows.
        cache_format: As in `AttnSpec`.
        scale_rule: Of the FP8 rows' scales.
        pattern: Of the lists, see `lists.PATTERNS`.
        counts: See `lists.COUNTS`.
        poison: What stands in slots that no list names, see `storage.POISONS`.
        gaps: "none", "pages" (a row of NaN behind each page) or "q" (NaN between the queries).
        sink: "none", "normal", or "extreme": +-inf, +-1e5.
        numbers: "normal", "large" (scores of thousands), "zero q", or "scales" (the rows' scales
            reach from the smallest normal float32 to 1e3).
        softmax_scale: By default that of 192-wide keys, so that 576^-0.5 is wrong.
        calling: "plain", "buffers" (out= and lse= are given, full of NaN), "float32 out", "twice"
            or "permuted" (the rows again in another order; same bits).
    """

    rows: int = 4
    heads: int = 8
    topk: int = 64
    page_size: int = 64
    pages: int = 0
    q_dtype: str = "bfloat16"
    cache_format: str = "bf16"
    scale_rule: str = "fp32"
    pattern: str = "random"
    counts: str = "none"
    poison: str = "none"
    gaps: str = "none"
    sink: str = "none"
    numbers: str = "normal"
    softmax_scale: float = 192**-0.5
    calling: str = "plain"

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        pages = self.pages or -(-(self.topk + 2) // self.page_size) + 1
        return pages * self.page_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the queries."""
        return getattr(torch, self.q_dtype)

    def nbytes(self) -> int:
        """Bytes of a cache with a given number of pages."""
        row = ROW_BYTES if self.cache_format == "fp8" else (LATENT + ROPE) * self.dtype.itemsize
        return self.pages * self.page_size * row

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """q, kv_cache, indices, counts, softmax_scale, and sink if there is one."""
        device, generator = torch.device(device), torch.Generator().manual_seed(self.seed)
        lists = make_lists(self.pattern, self.rows, self.topk, self.capacity, generator)
        counts = make_counts(self.counts, lists, self.capacity, generator)
        q = torch.randn(self.rows, self.heads, LATENT + ROPE, generator=generator)
        factor = {"large": 1e3, "zero q": 0.0, "scales": 1e-4}.get(self.numbers, 1.0)
        q = (q * factor).to(self.dtype)
        arguments = {
            "q": strided(q, device) if self.gaps == "q" else q.to(device),
            "kv_cache": self._cache(lists, counts, generator, device),
            "indices": lists.to(device),
            "counts": counts if counts is None else counts.to(device),
            "softmax_scale": self.softmax_scale,
        }
        if self.sink != "none":
            sink = torch.randn(self.heads, generator=generator) * 2 + 4
            if self.sink == "extreme":
                sizes = (math.inf, -math.inf, 1e5, -1e5)
                sink[:4] = torch.tensor(sizes[: self.heads])
            arguments["sink"] = sink.to(device)
        return arguments

    def _cache(
        self,
        lists: Tensor,
        counts: Tensor | None,
        generator: torch.Generator,
        device: torch.device,
    ) -> Tensor:
        used = lists.long()
        if counts is not None:
            used = used.masked_fill(torch.arange(self.topk) >= counts[:, None], -1)
        used = used[(used >= 0) & (used < self.capacity)].unique()
        if self.pages:  # too large to fill: what nobody lists is whatever the memory holds
            rows = self._packed(torch.randn(len(used), LATENT + ROPE, generator=generator))
            shape = (self.pages, self.page_size, rows.shape[1])
            cache = torch.empty(shape, dtype=rows.dtype, device=device)
            cache[used // self.page_size, used % self.page_size] = rows.to(device)
            return cache
        rows = torch.randn(self.capacity, LATENT + ROPE, generator=generator)
        if self.numbers == "scales":
            # amax / 448 is the scale: from 2^-126 to 1e3, another one in each group.
            size = torch.rand(self.capacity, LATENT // 128, generator=generator) * 41 - 38
            rows[:, :LATENT] *= (10.0 ** size.clamp(min=-37.9)).repeat_interleave(128, dim=1) * 120
        unlisted = torch.ones(self.capacity, dtype=torch.bool)
        unlisted[used] = False
        stored = poisoned(self._packed(rows), unlisted, self.poison)
        return in_pages(stored, self.page_size, self.gaps == "pages", device)

    def _packed(self, rows: Tensor) -> Tensor:
        return packed(rows, self.cache_format, self.dtype, self.scale_rule)

    def needs(self) -> tuple[str, ...]:
        """The optional parameters that the call uses."""
        given = {"buffers": ("out", "lse"), "float32 out": ("out_dtype",)}
        counts = ("counts",) if self.counts != "none" else ()
        sink = ("sink",) if self.sink != "none" else ()
        return (*counts, *sink, *given.get(self.calling, ()))

    def expect(self) -> AttentionResult:
        """The definition in float64."""
        arguments = self.build()
        plain = definition.attend(arguments, definition.gather(arguments))
        return definition.with_sink(plain, arguments.get("sink"))

    def tolerance(self, maths: str = "float32") -> AttentionResult:
        """Largest absolute error of each row and head, see `attention_limits`."""
        return self._reference(maths)[1]

    def _reference(self, maths: str) -> tuple[AttentionResult, AttentionResult]:
        """`expect` and `tolerance`, at the cost of one."""
        arguments = self.build()
        rows = definition.gather(arguments)
        plain = definition.attend(arguments, rows)
        expected = definition.with_sink(plain, arguments.get("sink"))
        dtype = torch.float32 if self.calling == "float32 out" else self.dtype
        limits = attention_limits(arguments, rows, plain, expected, maths=maths, out_dtype=dtype)
        return expected, limits

    def bind(self, adapter: Adapter, device: torch.device) -> Callable[..., Any]:
        """The adapter's function, or that of a plan which its backend makes for this case."""
        own = getattr(adapter, self.kind)
        if own is not None or adapter.backend is None:
            return adapter.function(self.kind)
        spec = AttnSpec(
            num_heads=self.heads,
            topk=self.topk,
            page_size=self.page_size,
            cache_format=self.cache_format,
            q_dtype=self.dtype,
        )
        if reason := adapter.backend.supports(spec, device):
            raise Skipped(reason)
        rows = max(self.rows, 1)
        plan = adapter.backend.plan(
            spec, max_rows=rows, max_requests=rows, device=device, kinds=(self.kind,)
        )
        return getattr(plan, self.kind)

    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        arguments = self.build(device)
        result, findings = call(function, arguments, self.calling, adapter)
        if result is None:
            return findings, ()
        expected, limits = self._reference(adapter.maths)
        findings += compared(result, expected, limits)
        if findings and not compared(result, expected, self._reference("bfloat16")[1]):
            return findings, (ROUNDED,)
        if findings:
            return findings, looks_like(self.build(), result, expected, limits)
        # What the call left behind, and the same call again.
        if not self.pages:  # a large cache has no known content to compare with
            fresh = self.build(device)
            findings += repeated(function, arguments, fresh, self.calling, adapter, result)
        return findings, ()

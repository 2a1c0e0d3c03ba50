"""Cases of the part "cache_write": rows become 656 bytes in the slots that are named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.numerics.float8 import E4M3_MAX, FLOAT32_TINY
from mla_ref.platform import synchronize
from mla_ref.testing.adapter import Adapter
from mla_ref.testing.case import Case
from mla_ref.testing.definition import E4M3
from mla_ref.testing.storage import in_pages
from mla_ref.testing.verdict import Finding, judge, same_bits

SENTINEL = 0xA5


@dataclass(frozen=True, kw_only=True)
class CacheWriteCase(Case):
    """One call of cache_write, in place.

    The bytes are judged by what they mean. Each number may be half a step of E4M3 off, a hair more
    for a writer that multiplies with 1 / scale; the scale by three float32 steps; the rotary key
    not at all; a byte outside the named slots not at all.

    Attributes:
        tokens: Rows to write.
        page_size: Tokens a page.
        scale_rule: See `mla_ref.numerics.float8.group_scale`; only a rule other than "fp32" is
            passed on.
        padding: Tokens whose slot is -1.
        width: 576, or 512 for a model without a rotary key, whose bytes are then zero.
        numbers: "normal", "zeros" (a whole row and a group of them) or "wide" (1e-30 to 1e4).
        gaps: "none" or "pages", as in `AttentionCase`.
        dtype: Of the rows.
    """

    kind: str = "cache_write"
    tokens: int = 20
    page_size: int = 64
    scale_rule: str = "fp32"
    padding: int = 0
    width: int = 576
    numbers: str = "normal"
    gaps: str = "none"
    dtype: str = "bfloat16"

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """cache, kv_rows, slots, and scale_rule unless it is the default."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.randn(self.tokens, self.width, generator=generator)
        if self.numbers == "zeros":
            rows[0], rows[1:, 128:256] = 0, 0
        elif self.numbers == "wide":
            size = torch.rand(self.tokens, 4, generator=generator) * 34 - 30
            rows[:, :512] *= (10.0**size).repeat_interleave(128, dim=1)
        pages = -(-self.tokens // self.page_size) + 2
        slots = torch.randperm(pages * self.page_size, generator=generator)[: self.tokens]
        slots[torch.randperm(self.tokens, generator=generator)[: self.padding]] = -1
        bytes_ = torch.full((pages * self.page_size, 656), SENTINEL, dtype=torch.uint8)
        arguments: dict[str, Any] = {
            "cache": in_pages(bytes_, self.page_size, self.gaps == "pages", torch.device(device)),
            "kv_rows": rows.to(getattr(torch, self.dtype)).to(device),
            "slots": slots.to(device),
        }
        return arguments | ({"scale_rule": self.scale_rule} if self.needs() else {})

    def needs(self) -> tuple[str, ...]:
        """A rule other than the default must be a parameter."""
        return ("scale_rule",) if self.scale_rule != "fp32" else ()

    def expect(self) -> dict[str, Tensor]:
        """The numbers, scales and rotary keys of each token, in the order of the tokens."""
        rows = self.build()["kv_rows"].float()
        k_pe = torch.zeros(self.tokens, 64)
        k_pe[:, : self.width - 512] = rows[:, 512:]
        groups = rows[:, :512].unflatten(1, (4, 128)).double()
        scales = _scale(groups.abs().amax(dim=-1), self.scale_rule)
        return {"latent": groups, "scales": scales, "k_pe": k_pe.to(torch.bfloat16).double()}

    def tolerance(self, maths: str = "float32") -> dict[str, Tensor]:
        """Half a step of E4M3 at each number, and three steps of float32 at each scale."""
        expected = self.expect()
        scale = expected["scales"][..., None]
        size = (expected["latent"] / scale).abs()
        exponent = torch.floor(torch.log2(size.clamp(min=2.0**-6)))
        step = torch.exp2(exponent - 3) * scale
        return {
            # Numbers at a step's border may round either way; beyond 448 all saturates.
            "latent": step * (0.5 + 1e-5) + scale * 448 * 2e-6,
            "scales": expected["scales"] * 3 * 2.0**-23,
            "k_pe": torch.zeros_like(expected["k_pe"]),
        }

    def _try(
        self, function: Callable[..., Any], adapter: Adapter, device: torch.device
    ) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        arguments = self.build(device)
        cache, slots = arguments["cache"], arguments["slots"].cpu()
        function(*list(arguments.values())[:3], **dict(list(arguments.items())[3:]))
        synchronize(device)
        if cache.dtype != torch.uint8:
            return (Finding("cache", f"is {describe(cache)}"),), ()
        written = cache.cpu().flatten(0, 1)
        untouched = torch.ones(len(written), dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        words = "a byte outside the named slots has been written"
        before = torch.full_like(written[untouched], SENTINEL)
        findings = [same_bits("cache", words, before, written[untouched])]
        keep = slots >= 0
        actual = _read(written[slots[keep]])
        expected, limits = self.expect(), self.tolerance()
        findings += [judge(p, actual[p], expected[p][keep], limits[p][keep]) for p in expected]
        found = tuple(f for f in findings if f)
        return found, _guesses(actual, {p: x[keep] for p, x in expected.items()}) if found else ()


def _scale(amax: Tensor, rule: str) -> Tensor:
    """The five rules in float64."""
    if rule == "fp32":
        return (amax / E4M3_MAX).clamp(min=FLOAT32_TINY)
    if rule == "fp32-one":
        return torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=FLOAT32_TINY))
    if rule == "fp32-floor":
        return amax.clamp(min=1e-4) / E4M3_MAX
    base = (amax / E4M3_MAX).clamp(min=1e-4 if rule == "pow2" else 1e-4 / E4M3_MAX)
    return torch.exp2(torch.ceil(torch.log2(base)))


def _read(rows: Tensor) -> dict[str, Tensor]:
    scales = rows[:, 512:528].clone().view(torch.float32).double()
    return {
        "latent": E4M3[rows[:, :512].long()].unflatten(1, (4, 128)) * scales[..., None],
        "scales": scales,
        "k_pe": rows[:, 528:].clone().view(torch.bfloat16).double(),
    }


def _guesses(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, ...]:
    """Known faults that would give these bytes."""
    latent, scales = expected["latent"], expected["scales"]
    found = []
    product = (latent * scales[..., None]).clamp(-448, 448) * scales[..., None]
    tiny = 1e-3 * float(latent.abs().max()) if latent.numel() else 0.0
    right = torch.allclose(actual["latent"], latent, rtol=0.07, atol=tiny)
    smallest = 2**-9 * float(scales.max()) if scales.numel() else 0.0
    if not right and torch.allclose(actual["latent"], product, rtol=0.07, atol=smallest):
        found.append("the numbers are multiplied with the scale, not divided by it")
    if torch.allclose(actual["scales"] * scales, torch.ones_like(scales), rtol=1e-3, atol=0):
        found.append("the stored scale is 1 / scale")
    shared = expected["latent"].abs().amax(dim=(1, 2), keepdim=True)[..., 0] / E4M3_MAX
    if torch.allclose(actual["scales"], shared.expand_as(scales), rtol=1e-5, atol=0):
        found.append("one scale stands for the whole row, not one for each 128 numbers")
    return tuple(found)

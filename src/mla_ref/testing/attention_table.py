"""The table of attention cases: what a kernel must survive, line by line.

A line is a name, what the case is about (the usual fault is named there), and the fields that
differ from a small plain call. Lines of `BOTH` stand for two cases, one for each cache format.
"""

from collections.abc import Iterator
from typing import Any

from mla_ref.numerics.float8 import SCALE_RULES
from mla_ref.testing.attention_case import AttentionCase

Line = tuple[str, str, dict[str, Any]]

HEADS = (1, 4, 8, 9, 12, 16, 24, 40, 64, 128)
WIDTHS = (1, 2, 7, 16, 31, 64, 65, 100, 128, 192, 257, 512, 1000, 1024, 2048)
PAGE_SIZES = (1, 2, 53, 61, 64, 69, 128)
ROWS = (0, 1, 2, 33)
# Slots of the two caches that lie beyond 2^31 bytes: 4 million rows.
FAR_PAGES = 4_000_000 // 64

NONE = "-1 means none, anywhere in a list"
BOTH: tuple[Line, ...] = (
    ("plain", "a small call without anything special", {}),
    (
        "softmax-scale",
        "the softmax scale is passed, here 0.135; it is not 576^-0.5",
        {"softmax_scale": 0.135},
    ),
    ("none-first-16", f"{NONE}: is the first block all -1, so that its maximum is -inf?",
     {"pattern": "first 16 none"}),
    ("none-first-32", f"{NONE}: are the first blocks all -1, so that exp(-inf - -inf) is NaN?",
     {"pattern": "first 32 none"}),
    ("none-alternating", f"{NONE}: every second entry", {"pattern": "alternating"}),
    ("none-but-last", f"{NONE}: only the last entry is valid", {"pattern": "only last"}),
    ("none-strewn", f"{NONE}: is -1 read as the last row, or as slot 0?", {"pattern": "strewn"}),
    ("none-nan-in-slot-0", "slot 0 holds NaN and nobody lists it: is -1 read as slot 0?",
     {"pattern": "strewn", "poison": "nan in slot 0"}),
    ("none-nan-in-last-slot", "the last slot holds NaN and nobody lists it: is -1 read as kv[-1]?",
     {"pattern": "strewn", "poison": "nan in last slot"}),
    ("short-lists", "lists end early and are filled with -1", {"pattern": "short"}),
    ("row-empty", "a row without a valid entry gives output 0 and LSE -inf",
     {"pattern": "one row empty"}),
    ("rows-all-empty", "no row has a valid entry: output 0 and LSE -inf",
     {"pattern": "all rows empty"}),
    ("row-empty-sink", "a row without a valid entry but with a sink: output 0, LSE -inf",
     {"pattern": "one row empty", "sink": "normal"}),
    ("row-empty-nan", "a row without a valid entry, and NaN in every slot that nobody lists",
     {"pattern": "one row empty", "poison": "nan"}),
    ("slots-too-large", "a slot at or beyond the capacity counts as -1 and is never read",
     {"pattern": "too large"}),
    ("slots-outside", "any index outside the cache counts as -1: -2, -2^31, 2^31 - 1",
     {"pattern": "outside"}),
    ("slots-repeated", "a slot that is listed twice counts twice", {"pattern": "repeated"}),
    ("slots-at-both-ends", "slot 0 and the last slot are data like any other",
     {"pattern": "first and last slot"}),
    ("counts-full", "counts equal to the width change nothing", {"counts": "full"}),
    ("counts-ragged", "counts cut a list: is one entry too many or too few read?",
     {"counts": "ragged"}),
    ("counts-nan-behind", "entries behind counts name a row of NaN: are they read?",
     {"counts": "behind: free slot", "poison": "nan"}),
    ("counts-outside-behind", "entries behind counts name no slot at all: are they read?",
     {"counts": "behind: outside"}),
    ("counts-and-none", "counts cut lists in which -1 is strewn",
     {"counts": "ragged", "pattern": "strewn"}),
    ("poison-nan", "NaN in every slot that no list names: is a weight of 0 multiplied with NaN?",
     {"pattern": "strewn", "poison": "nan"}),
    ("poison-inf", "infinity in every slot that no list names: is 0 multiplied with it?",
     {"pattern": "strewn", "poison": "inf"}),
    ("gaps-between-pages", "pages lie apart, with a row of NaN between: is the page stride read?",
     {"gaps": "pages"}),
    ("gaps-between-queries", "q is a view with gaps and transposed: are its strides read?",
     {"gaps": "q"}),
    ("sink", "the sink takes weight once, after the last merge: is it applied in each split?",
     {"sink": "normal", "topk": 256}),
    ("sink-extreme", "sinks of +-inf and +-1e5 give 0 or change nothing, never NaN",
     {"sink": "extreme"}),
    ("scores-large", "scores of thousands: exp overflows where the maximum is not taken off first",
     {"numbers": "large"}),
    ("q-zero", "a query of zeros weighs all listed rows alike", {"numbers": "zero q"}),
    ("out-and-lse-given", "out= and lse= come full of NaN and must hold the result",
     {"calling": "buffers", "pattern": "one row empty"}),
    ("out-float32", "out_dtype=float32 gives an output that is not rounded to q's dtype",
     {"calling": "float32 out"}),
    ("bits-twice", "the same call twice gives the same bits", {"calling": "twice", "topk": 256}),
    ("bits-permuted", "rows in another order give the same bits, each row its own",
     {"calling": "permuted", "topk": 256, "counts": "ragged"}),
)  # fmt: skip
FLOAT32: tuple[Line, ...] = (
    ("float32", "queries, rows and output in float32", {}),
    ("float32-sink", "float32 with a sink", {"sink": "normal", "pattern": "strewn"}),
    ("float32-large", "float32 with scores of thousands", {"numbers": "large"}),
)


def attention_cases(kind: str) -> tuple[AttentionCase, ...]:
    """All cases of "decode" or "extend"."""
    return tuple(
        AttentionCase(kind=kind, name=name, about=about, seed=seed, **fields)
        for seed, (name, about, fields) in enumerate(_lines())
    )


def _lines() -> Iterator[Line]:
    for suffix, cache in (("", "bf16"), ("-fp8", "fp8")):
        for name, about, fields in BOTH:
            yield name + suffix, about, {"cache_format": cache, **fields}
    yield from _grids()
    for name, about, fields in FLOAT32:
        yield name, about, {"q_dtype": "float32", **fields}
    for rule in SCALE_RULES:
        about = f'scales of FP8 rows by the rule "{rule}": is more than their exponent read?'
        yield f"scales-{rule}-fp8", about, {"cache_format": "fp8", "scale_rule": rule}
    about = "FP8 scales from the smallest normal float32 to 1e3"
    yield "scales-wide-fp8", about, {"cache_format": "fp8", "numbers": "scales"}
    for suffix, cache in (("", "bf16"), ("-fp8", "fp8")):
        about = "slots beyond 2^31 bytes: is an offset computed in 32 bits?"
        far = {"pattern": "far", "pages": FAR_PAGES, "rows": 2, "cache_format": cache}
        yield f"far{suffix}", about, far | {"point": ("page_size",)}


def _grids() -> Iterator[Line]:
    """One dimension at a time, the two cache formats in turn."""
    formats = ("bf16", "fp8")
    for i, heads in enumerate(HEADS):
        point = {"heads": heads, "rows": 2, "point": ("heads",), "cache_format": formats[i % 2]}
        yield f"heads-{heads}", f"{heads} query heads: are heads padded to a block?", point
    for i, topk in enumerate(WIDTHS):
        point = {"topk": topk, "rows": 2, "point": ("topk",), "cache_format": formats[i % 2]}
        about = f"lists {topk} wide: is the last block masked, are splits cut without a rest?"
        yield f"topk-{topk}", about, point
    for i, size in enumerate(PAGE_SIZES):
        point = {"page_size": size, "point": ("page_size",), "cache_format": formats[i % 2]}
        yield f"page-size-{size}", f"pages of {size} tokens, no power of two assumed", point
    for i, rows in enumerate(ROWS):
        point = {"rows": rows, "point": ("rows",), "cache_format": formats[i % 2]}
        yield f"rows-{rows}", f"{rows} query rows", point
    for topk in (2048, 1000):
        about = f"lists {topk} wide of which a tenth is -1 or counts, with a sink"
        fields = {"topk": topk, "pattern": "strewn", "counts": "ragged", "sink": "normal"}
        yield f"wide-{topk}", about, fields | {"point": ("topk",), "cache_format": "fp8"}

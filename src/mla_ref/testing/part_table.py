"""The table of cases for the optional parts, merge to sampler."""

from typing import Any

from mla_ref.numerics.float8 import SCALE_RULES
from mla_ref.testing.cache_write_case import CacheWriteCase
from mla_ref.testing.case import Case
from mla_ref.testing.convert_case import ConvertCase
from mla_ref.testing.index_scores_case import IndexScoresCase
from mla_ref.testing.merge_case import MergeCase
from mla_ref.testing.sampler_case import SamplerCase
from mla_ref.testing.topk_case import TopkCase

Line = tuple[str, str, dict[str, Any]]


def _pages(tokens: int) -> dict[str, Any]:
    return {"page_size": tokens, "point": ("page_size",)}


MERGE: tuple[Line, ...] = (
    ("two", "two parts: does the heavier one get the larger weight?", {"parts": 2}),
    ("sixteen", "sixteen parts in one call", {"parts": 16}),
    ("one", "one part comes back as it is", {"parts": 1}),
    ("heads-1", "one head, 33 rows", {"heads": 1, "rows": 33}),
    ("rows-0", "no rows", {"rows": 0}),
    ("far-apart", "LSEs so far apart that most weights are 0", {"lse_size": 200.0}),
    ("large", "LSEs near 1e4: exp overflows where the maximum is not taken off",
     {"lse_offset": 1e4}),
    ("negative", "LSEs near -1e4: exp gives 0 for all where it is not", {"lse_offset": -1e4}),
    ("empty-parts", "empty parts have LSE -inf and NaN as output: 0 * NaN is NaN",
     {"empty": "some"}),
    ("identity", "merging with empty parts changes no bit", {"empty": "all but one"}),
    ("all-empty", "only empty parts give output 0 and LSE -inf", {"empty": "all"}),
)  # fmt: skip
WRITE: tuple[Line, ...] = (
    ("plain", "latent / scale as E4M3, the scale, the rotary key", {}),
    ("padding", "slot -1 is not written: does it land in the last row?", {"padding": 7}),
    ("gaps", "pages lie apart: is the page stride read?", {"gaps": "pages"}),
    *((f"page-size-{n}", f"pages of {n} tokens", _pages(n)) for n in (1, 2, 53, 69)),
    ("zeros", "a group of zeros has a scale that is not 0, so that 0 / 0 is not NaN",
     {"numbers": "zeros"}),
    ("wide", "numbers from 1e-30 to 1e4", {"numbers": "wide"}),
    ("no-rope", "rows of 512 without a rotary key: its bytes are 0", {"width": 512}),
    ("float32", "rows in float32", {"dtype": "float32"}),
    ("tokens-0", "no tokens", {"tokens": 0}),
)  # fmt: skip
CONVERT: tuple[Line, ...] = (
    ("plain", "page of the block table times page size, plus the offset", {}),
    *((f"page-size-{n}", f"pages of {n} tokens", _pages(n)) for n in (1, 2, 53, 69)),
    ("none", "position -1 stays -1: does it become slot 0?", {"wrong": "none entries"}),
    ("beyond", "positions beyond the block table are -1", {"wrong": "beyond"}),
    ("page-none", "a page of -1 in the block table gives -1", {"wrong": "pages"}),
    ("request-none", "a row that belongs to no request gives -1", {"wrong": "requests"}),
    ("strided", "the block table is a view of a wider one: is its stride read?", {"strided": True}),
    ("rows-0", "no rows", {"rows": 0}),
)  # fmt: skip
SCORES: tuple[Line, ...] = (
    ("plain", "sum over heads of weight * ReLU(q . k)", {"negative": False}),
    ("negative-weights", "weights below 0: the ReLU stands before the sum", {}),
    ("heads-64", "64 index heads", {"heads": 64}),
    ("heads-1", "one index head", {"heads": 1}),
    ("keys-1", "one key", {"s_kv": 1}),
    ("keys-1000", "a thousand keys", {"s_kv": 1000}),
    ("float32", "queries and keys in float32", {"dtype": "float32"}),
)
TOPK: tuple[Line, ...] = (
    ("plain", "the highest scores, the highest first", {}),
    ("ties", "among equal scores the lower position comes first", {"scores": "ties"}),
    ("zeros", "all scores are equal: the first k positions", {"scores": "zeros"}),
    ("signed-zeros", "0.0 and -0.0 are equal, so positions decide", {"scores": "signed zeros"}),
    ("nan", "NaN is never selected: does it rank as the greatest number?", {"scores": "nan"}),
    ("all-nan", "only NaN: a list of -1", {"scores": "all nan"}),
    ("minus-inf", "-inf is never selected: the list ends in -1", {"scores": "minus inf"}),
    ("lengths", "keys behind a row's length are never selected", {"visible": "ragged"}),
    ("lengths-ties", "lengths and ties", {"visible": "ragged", "scores": "ties"}),
    ("keys-few", "fewer keys than k: the list ends in -1", {"s_kv": 10}),
    ("keys-4096", "2,048 of 4,096 keys with ties", {"s_kv": 4096, "k": 2048, "scores": "ties"}),
    ("k-1", "k is 1", {"k": 1}),
)  # fmt: skip
SAMPLER: tuple[Line, ...] = (
    ("chosen", "drafts that were chosen: kept with probability p(x)", {}),
    ("sampled", "drafts that were sampled: kept with probability p(x) / q(x)", {"sampled": True}),
    ("all-kept", "all drafts stand, and a bonus token comes after them",
     {"sampled": True, "uniform": 1e-300}),
    ("hard", "drafts stand only where p(x) >= q(x); else the residual max(p - q, 0) is drawn from",
     {"sampled": True, "uniform": 1.0, "lens": (4, 4, 4, 4)}),
    ("no-drafts", "plain sampling: one row a request", {"lens": (1, 1, 1)}),
    ("vocab-1", "one token", {"vocab": 1}),
    ("vocab-5000", "a vocabulary of several blocks", {"vocab": 5000, "sampled": True}),
    ("p-wrong", "NaN, inf and negative numbers in p count as 0", {"wrong": "p"}),
    ("q-wrong", "a q that is no law rejects its draft and p is drawn from",
     {"wrong": "q", "sampled": True}),
    ("equal", "q is p but for rounding: a rejected draft leaves nothing, so p is drawn from",
     {"wrong": "equal", "sampled": True, "uniform": 1.0}),
    ("ties", "among equal quotients the lower token wins", {"wrong": "ties"}),
    ("ids", "a draft outside the vocabulary is none", {"wrong": "ids", "uniform": 1e-300}),
    ("padding", "rows behind the last request, and requests without rows",
     {"lens": (0, 2, 0, 0), "padding": 9}),
    ("requests-0", "no request", {"lens": ()}),
)  # fmt: skip
TABLES: dict[str, tuple[type[Case], tuple[Line, ...]]] = {
    "merge": (MergeCase, MERGE),
    "cache_write": (CacheWriteCase, WRITE),
    "convert": (ConvertCase, CONVERT),
    "index_scores": (IndexScoresCase, SCORES),
    "topk": (TopkCase, TOPK),
    "sampler": (SamplerCase, SAMPLER),
}


def part_cases(kind: str) -> tuple[Case, ...]:
    """All cases of an optional part."""
    made, lines = TABLES[kind]
    if kind == "cache_write":
        rules = [r for r in SCALE_RULES if r != "fp32"]
        about = 'scales follow the rule "{}", and a group of zeros dequantises to 0'
        more = ({"scale_rule": r, "numbers": "zeros", "dtype": "float32"} for r in rules)
        lines += tuple((f"rule-{r}", about.format(r), f) for r, f in zip(rules, more, strict=True))
    return tuple(
        made(kind=kind, name=name, about=about, seed=seed, **fields)
        for seed, (name, about, fields) in enumerate(lines)
    )

"""Cases: plain data, an expectation that shares nothing with the rungs, and a fair tolerance."""

import json
import math
import re
import unittest
from functools import partial
from typing import Any

import pytest
import torch
from tests.testing.faults import bare, kernel, merge, only_out
from tests.testing.faults import topk as select

from mla_ref.backends import CACHE_FORMATS, TorchBackend
from mla_ref.cache import unpack_fp8_rows
from mla_ref.indexer import select_topk
from mla_ref.numerics.float8 import SCALE_RULES, read_scale
from mla_ref.testing import (
    KINDS,
    Adapter,
    Limits,
    Mismatch,
    as_adapter,
    case_from_json,
    cases,
    find_case,
    load_target,
)
from mla_ref.testing.attention_table import HEADS, PAGE_SIZES, ROWS, WIDTHS
from mla_ref.testing.definition import E4M3, attend, gather, numbers_of, with_sink
from mla_ref.testing.export import script
from mla_ref.testing.lists import COUNTS, PATTERNS
from mla_ref.testing.storage import POISONS

ALL = [case for kind in KINDS for case in cases(kind)]


@pytest.mark.thorough
@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_torch_backend_passes(case) -> None:
    case.check(TorchBackend())


@pytest.mark.parametrize("case", cases("decode")[:4], ids=str)
def test_a_function_is_checked_from_pytest_as_the_readme_shows(case) -> None:
    case.check(kernel)


def test_cases_are_plain_data_with_names_that_are_theirs_alone() -> None:
    assert len({str(case) for case in ALL}) == len(ALL)
    for case in ALL:
        assert case_from_json(json.loads(json.dumps(case.to_json()))) == case
        assert find_case(str(case)) is case
        assert hash(case) is not None
        assert " " not in case.name and "\n" not in case.about and case.about


def test_the_program_of_a_case_opens_with_one_sentence() -> None:
    for case in ALL:
        first = script(case, "torch").splitlines()[0]
        assert first.startswith(f'"""{case}: {case.about}')
        assert re.search(r'[^.?][.?]"""$', first), first


@pytest.mark.parametrize("name", ["decode/nothing", "nothing", "prefill/plain", ""])
def test_a_case_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match="case must be the name of one"):
        find_case(name)
    with pytest.raises(ValueError, match="kind must be one of"):
        cases("prefill")


def test_the_table_covers_what_it_promises() -> None:
    def used(name: str) -> set[Any]:
        return {getattr(case, name) for case in cases("decode")}

    for name, all_of in {
        "heads": HEADS,
        "topk": WIDTHS,
        "page_size": PAGE_SIZES,
        "rows": ROWS,
        "pattern": PATTERNS,
        "counts": COUNTS,
        "poison": POISONS,
        "scale_rule": SCALE_RULES,
        "cache_format": CACHE_FORMATS,
        "gaps": ("none", "pages", "q"),
        "sink": ("none", "normal", "extreme"),
        "calling": ("plain", "buffers", "float32 out", "twice", "permuted"),
        "q_dtype": ("bfloat16", "float32"),
    }.items():
        assert set(all_of) <= used(name), name
    # A kernel that puts 576^-0.5 in place of what it is given fails everywhere.
    assert all(abs(scale - 576**-0.5) > 0.01 for scale in used("softmax_scale"))
    assert sum(case.nbytes() > 2**31 for case in cases("decode")) == 2


def test_the_same_case_is_built_twice_with_the_same_bits() -> None:
    for name in ("decode/plain-fp8", "decode/sink", "merge/empty-parts", "topk/ties"):
        first, second = find_case(name).build(), find_case(name).build()
        assert first.keys() == second.keys()
        for a, b in zip(first.values(), second.values(), strict=True):
            assert a is b is None or a == b if not torch.is_tensor(a) else _same(a, b)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def test_the_definition_reads_bytes_as_the_format_says() -> None:
    everything = torch.arange(256, dtype=torch.uint8)
    right = everything.view(torch.float8_e4m3fn).double()
    assert torch.equal(E4M3.isnan(), right.isnan())
    assert torch.equal(E4M3.nan_to_num(), right.nan_to_num())
    arguments = find_case("decode/scales-wide-fp8").build()
    rows = arguments["kv_cache"].flatten(0, 1)
    assert torch.equal(numbers_of(rows), unpack_fp8_rows(rows).double())
    scales = rows[:, 512:528].clone().view(torch.float32)
    assert float(scales.min()) == 2.0**-126
    assert 300 < float(scales.max()) < 2000
    assert not torch.equal(scales, read_scale(scales, "truncated"))


def test_the_definition_by_hand() -> None:
    """Logits 0 and ln 2, values 0 and 3: 2; with the second listed twice 2.4."""
    cache = torch.zeros(1, 2, 576)
    cache[0, 1, 0], cache[0, 1, -1] = 3.0, math.log(2.0)
    q = torch.zeros(1, 1, 576)
    q[..., -1] = 1.0
    for entries, value, total in (([0, 1], 2.0, 3.0), ([1, 0, 1], 2.4, 5.0), ([0, 7, -1], 0.0, 1)):
        call = {"q": q, "kv_cache": cache, "indices": torch.tensor([entries]), "counts": None}
        result = attend(call | {"softmax_scale": 1.0}, gather(call))
        assert float(result.out[0, 0, 0]) == pytest.approx(value, abs=1e-7)
        assert float(result.lse) == pytest.approx(math.log(total), abs=1e-7)
        half = with_sink(result, result.lse[0])
        assert float(half.out[0, 0, 0]) == pytest.approx(value / 2, abs=1e-7)


def test_the_expectation_of_every_case_is_finite_where_it_should_be() -> None:
    """NaN lies around, and none of it is in a result; what is empty is 0 and -inf."""
    hostile = [
        c for c in cases("decode") if c.poison != "none" or "empty" in c.name or c.sink != "none"
    ]
    assert len(hostile) > 20
    for case in hostile:
        out, lse = case.expect()
        assert out.isfinite().all(), case
        assert not lse.isnan().any() and not (lse == math.inf).any(), case
        if case.rows and case.pattern != "all rows empty":
            assert (out != 0).any(), case


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_poison_lies_in_every_slot_that_no_list_names(pattern: str, cache_format: str) -> None:
    from mla_ref.testing.attention_case import AttentionCase

    made = AttentionCase(
        kind="decode", name="x", about="x", pattern=pattern, poison="nan", cache_format=cache_format
    )
    arguments = made.build()
    rows = numbers_of(arguments["kv_cache"].flatten(0, 1))
    listed = arguments["indices"].flatten().long()
    listed = listed[(listed >= 0) & (listed < made.capacity)].unique()
    poisoned = rows.isnan().any(dim=1)
    assert not poisoned[listed].any()
    assert int(poisoned.sum()) == made.capacity - len(listed)
    if pattern != "first and last slot":
        assert poisoned[0] and poisoned[-1]


@pytest.mark.parametrize("suffix", ["", "-fp8"])
def test_poison_in_one_slot_only(suffix: str) -> None:
    for name, slot in (("none-nan-in-slot-0", 0), ("none-nan-in-last-slot", -1)):
        rows = numbers_of(find_case(f"decode/{name}{suffix}").build()["kv_cache"].flatten(0, 1))
        assert rows[slot].isnan().all()
        assert int(rows.isnan().any(dim=1).sum()) == 1
    rows = numbers_of(find_case(f"decode/poison-inf{suffix}").build()["kv_cache"].flatten(0, 1))
    assert rows[0].isinf().all() and rows[-1].isinf().all()
    assert not rows.isnan().any()


def test_gaps_are_gaps() -> None:
    pages = find_case("decode/gaps-between-pages-fp8").build()["kv_cache"]
    assert pages.stride(0) == (pages.shape[1] + 1) * 656
    q = find_case("decode/gaps-between-queries").build()["q"]
    assert not q.is_contiguous() and q.stride(1) > q.stride(0)


def _off_by(part: str, amount: float, index: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    out, lse = kernel(*args, **kwargs)
    ({"out": out, "lse": lse}[part])[index] += amount
    return out, lse


@pytest.mark.parametrize(
    ("name", "maths"),
    [
        ("decode/plain", "float32"),
        ("decode/none-strewn-fp8", "bfloat16"),
        ("decode/float32", "float32"),
    ],
)
def test_one_number_a_little_too_far_off_is_found(name: str, maths: str) -> None:
    case = find_case(name)
    out, lse = case.tolerance(maths)
    row, index = (3, 5), (3, 5, 77)
    case.check(Adapter(decode=kernel, maths=maths))
    step = float(2.5 * out[row])
    with pytest.raises(Mismatch, match=r"out\[3, 5, 77\] .* 1 beyond the limit") as caught:
        case.check(Adapter(decode=partial(_off_by, "out", step, index), maths=maths))
    (finding,) = caught.value.findings
    assert finding.index == index and finding.limit == pytest.approx(float(out[row]))
    step = float(2.5 * lse[row])
    with pytest.raises(Mismatch, match=r"lse\[3, 5\] .* 1 beyond the limit"):
        case.check(Adapter(decode=partial(_off_by, "lse", step, row), maths=maths))
    with pytest.raises(Mismatch, match=r"out\[3, 5, 77\] is nan .* 1 times NaN on one side"):
        case.check(Adapter(decode=partial(_off_by, "out", math.nan, index), maths=maths))


def test_the_tolerance_is_a_few_ulp() -> None:
    """Numbers near 1 in bfloat16 have an ulp of 2^-7; an LSE near 5 keeps four digits at least."""
    out, lse = find_case("decode/plain").tolerance()
    largest = find_case("decode/plain").expect().out.abs().amax(dim=-1)
    assert (out < 2.2 * largest * 2**-7).all()
    assert (lse < 5e-4).all()


def test_declared_conventions_are_converted() -> None:
    for name in ("decode/row-empty", "decode/plain-fp8", "merge/empty-parts", "merge/all-empty"):
        case = find_case(name)
        right = kernel if case.kind == "decode" else merge
        case.check(Adapter(**{case.kind: right}))

    def foreign(*args: Any, **kwargs: Any) -> Any:
        out, lse = kernel(*args, **kwargs)
        return out, (lse / math.log(2.0)).masked_fill(lse == -math.inf, math.inf)

    def foreign_merge(outs: torch.Tensor, lses: torch.Tensor) -> Any:
        out, lse = merge(outs, lses.masked_fill(lses == math.inf, -math.inf) * math.log(2.0))
        return out, (lse / math.log(2.0)).masked_fill(lse == -math.inf, math.inf)

    adapter = Adapter(decode=foreign, merge=foreign_merge, lse_base="2", empty_lse="+inf")
    for name in ("decode/row-empty", "decode/sink", "merge/empty-parts", "merge/two"):
        find_case(name).check(adapter)


def test_a_kernel_that_returns_a_set_may_say_so() -> None:
    case = find_case("topk/lengths-ties")
    shuffled = partial(select, fault="shuffled")
    case.check(Adapter(topk=shuffled, topk_order="any"))
    with pytest.raises(Mismatch):
        case.check(Adapter(topk=shuffled))
    wrong = partial(select, fault="higher position")
    with pytest.raises(Mismatch, match="ties go to the higher position"):
        find_case("topk/ties").check(Adapter(topk=wrong, topk_order="any"))


def test_a_case_is_moved_into_limits_or_skipped() -> None:
    limits = Limits(heads=(64, 128), page_sizes=(32,), cache_formats=("fp8",), topk_multiple=128)
    moved = find_case("decode/none-strewn-fp8").within(limits)
    assert (moved.heads, moved.page_size, moved.topk) == (64, 32, 128)
    assert str(moved) == "decode/none-strewn-fp8"
    assert find_case("decode/plain-fp8").within(Limits()) is find_case("decode/plain-fp8")
    for name, words in (
        ("decode/heads-9", "heads 9 is outside the limits: 64, 128"),
        ("decode/page-size-61", "page_size 61"),
        ("decode/plain", "cache_format bf16"),
        ("decode/topk-100", "topk 100 is no multiple of 128"),
    ):
        with pytest.raises(unittest.SkipTest, match=words):
            find_case(name).within(limits)
    with pytest.raises(unittest.SkipTest, match="q_dtype float32"):
        find_case("decode/float32").within(Limits(q_dtypes=("bfloat16",)))
    with pytest.raises(unittest.SkipTest, match="gaps"):
        find_case("decode/gaps-between-pages").within(Limits(strided=False))
    with pytest.raises(unittest.SkipTest, match="page_size 53"):
        find_case("cache_write/page-size-53").within(limits)
    find_case("decode/none-strewn-fp8").check(Adapter(decode=kernel, limits=limits))


def test_parameters_that_a_function_lacks_are_skipped() -> None:
    for name, words in (
        ("decode/counts-ragged", "no parameter counts"),
        ("decode/sink", "no parameter sink"),
        ("decode/out-and-lse-given", "no parameter out, lse"),
        ("decode/out-float32", "no parameter out_dtype"),
    ):
        with pytest.raises(unittest.SkipTest, match=words):
            find_case(name).check(bare)
    find_case("decode/none-strewn").check(bare)


def test_what_is_no_result_is_said() -> None:
    with pytest.raises(Mismatch, match=r"must return the pair \(out, lse\), got a bfloat16 tensor"):
        find_case("decode/plain").check(only_out)
    with pytest.raises(Mismatch, match="must return a tensor of integer numbers"):
        find_case("topk/plain").check(lambda scores, visible_lens, k: scores)


def test_what_is_under_test_is_found() -> None:
    assert as_adapter(kernel).kinds == ("decode",)
    assert as_adapter(merge, "merge").kinds == ("merge",)
    without_sampler = tuple(kind for kind in KINDS if kind != "sampler")
    assert as_adapter(TorchBackend).kinds == load_target("torch").kinds == without_sampler
    assert load_target("tests.testing.faults:kernel", "extend").kinds == ("extend",)

    class Mine:
        lse_base = "2"

        def extend(self, *args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs)

    assert as_adapter(Mine()).kinds == ("extend",)
    assert as_adapter(Mine()).lse_base == "2"
    with pytest.raises(unittest.SkipTest, match="there is no decode"):
        find_case("decode/plain").check(Mine())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adapter(), "one of decode"),
        (lambda: Adapter(decode=kernel, lse_base="10"), "lse_base must be one of e, 2"),
        (lambda: Adapter(decode=kernel, empty_lse="nan"), "empty_lse"),
        (lambda: Adapter(decode=kernel, maths="fp8"), "maths"),
        (lambda: Adapter(decode=kernel, topk_order="none"), "topk_order"),
        (lambda: Limits(heads=()), "heads"),
        (lambda: Limits(topk_multiple=0), "topk_multiple"),
        (lambda: as_adapter(3), "must be a function, a backend or an adapter"),
        (lambda: as_adapter(kernel, "prefill"), "kind must be one of"),
        (lambda: load_target("no_such_module_here:f"), "no_such_module_here:f cannot be imported"),
        (lambda: load_target("tests.testing.faults:nothing"), "cannot be imported"),
        (lambda: load_target("no-backend"), "no-backend"),
        (lambda: load_target("my_kernel"), "my_kernel"),
    ],
)
def test_input_that_does_not_fit_is_named(make, words: str, plain_calls: None) -> None:
    with pytest.raises((ValueError, TypeError, ImportError), match=words):
        make()


def test_B037_a_list_that_repeats_a_key_is_refused() -> None:
    """TensorRT-LLM#17550: by its sorted scores alone [0, 0] looks like [0, 1] where both tie."""

    def repeats_the_first(scores, visible_lens, k):
        right = select_topk(scores, visible_lens, k)
        if k > 1:
            right[:, 1] = torch.where(right[:, 1] >= 0, right[:, 0], right[:, 1])
        return right

    differ = 0
    for case in cases("topk"):
        case.check(select_topk)
        given = case.build()
        if torch.equal(repeats_the_first(**given), select_topk(**given)):
            case.check(repeats_the_first)
            continue
        differ += 1
        with pytest.raises(Mismatch):
            case.check(repeats_the_first)
    assert differ

"""The Triton attention in the interpreter: the conformance cases, and what they do not reach."""

import dataclasses
import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack, assert_same_bits, raw

from mla_kernels.triton_kernels.backend import TritonBackend
from mla_kernels.triton_kernels.configs import TABLE, choose, launches
from mla_kernels.triton_kernels.split_plan import plan_splits
from mla_ref.attention import sparse_extend
from mla_ref.backends import AttnSpec, Backend, Plan, TorchBackend, find_backend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import AttentionResult
from mla_ref.testing import cases

CPU = torch.device("cpu")
SCALE = 192**-0.5
SM120_SHARED = 101_376


class TwoSplits(TritonBackend):
    """Short lists too are cut, and the buffers come full of NaN."""

    def plan(self, spec, *, max_rows, max_requests, device, kinds=("decode", "extend")):
        sizes = {"max_rows": max_rows, "max_requests": max_requests, "device": device}
        return cut(super().plan(spec, **sizes, kinds=kinds), 2)


def cut(plan, splits):
    shape = (splits, plan.max_rows, plan.spec.num_heads)
    partials = AttentionResult(torch.full((*shape, 512), math.nan), torch.full(shape, math.nan))
    return dataclasses.replace(plan, num_splits=splits, partials=partials)


def small(case):
    return case.topk <= 65 and case.heads <= 16 and case.rows <= 4 and not case.pages


# One kernel serves both kinds: here it meets FP8 rows as decode and other rows as extend.
QUICK = [c for c in cases("decode") if c.cache_format == "fp8" and small(c)]
QUICK += [c for c in cases("extend") if c.cache_format == "bf16" and small(c)]
# The others by turns: half of them as decode, the other half as extend. `mla-ref check` runs all.
REST = [
    case
    for turn, kind in enumerate(("decode", "extend"))
    for number, case in enumerate(cases(kind))
    if case not in QUICK and number % 2 == turn
]
SPLIT = ("none-strewn", "row-empty-sink", "counts-nan-behind", "out-and-lse-given")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_conformance(case):
    case.check(TritonBackend())


@pytest.mark.parametrize("case", [c for c in cases("decode") if c.name in SPLIT], ids=str)
def test_conformance_in_two_splits(case):
    case.check(TwoSplits())


@pytest.mark.parametrize("case", cases("merge"), ids=str)
def test_conformance_of_the_merge(case):
    case.check(TritonBackend())


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_conformance_of_the_rest(case):
    case.check(TritonBackend())


def problem(rows=2, heads=2, k=34, page_size=8, cache_format="fp8", dtype=torch.bfloat16, size=1.0):
    """Queries, a cache and lists with -1 strewn in."""
    q = torch.randn(rows, heads, 576).to(dtype)
    pages = -(-k // page_size) + 2
    numbers = torch.randn(pages * page_size, 576) * size
    cache = pack_fp8_rows(numbers) if cache_format == "fp8" else numbers.to(dtype)
    lists = torch.stack([torch.randperm(len(cache))[:k] for _ in range(rows)])
    lists[torch.rand(rows, k) < 0.2] = -1
    return q, cache.unflatten(0, (pages, page_size)), lists.int()


def plan_for(q, cache, lists, rows=None, splits=None):
    spec = AttnSpec(
        num_heads=q.shape[1],
        topk=max(lists.shape[1], 1),
        page_size=cache.shape[1],
        cache_format="fp8" if cache.dtype == torch.uint8 else "bf16",
        q_dtype=q.dtype,
    )
    plan = TritonBackend().plan(spec, max_rows=rows or max(len(q), 1), max_requests=2, device=CPU)
    return plan if splits is None else cut(plan, splits)


def both(q, cache, lists, *args, splits=2, **kwargs):
    """Decode in a few splits, and extend."""
    given = {"softmax_scale": SCALE} | kwargs
    plan = plan_for(q, cache, lists, splits=splits)
    return plan.decode(q, cache, lists, *args, **given), plan.extend(
        q, cache, lists, *args, **given
    )


def oracle(q, cache, lists, *args, **kwargs):
    """Rung 9 in float64 on the rows as stored."""
    rows = unpack_fp8_rows(cache) if cache.dtype == torch.uint8 else cache
    given = {"softmax_scale": SCALE} | kwargs
    return sparse_extend(q.double(), rows.double(), lists, *args, **given)


def assert_close(found, expected, out=1e-2, lse=1e-4):
    """Errors relative to a row's largest number, and of the LSE relative to its size."""
    assert found.out.isfinite().all()
    top = expected.out.abs().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    assert ((found.out.double() - expected.out) / top).abs().max() <= out
    empty = expected.lse == -math.inf
    assert torch.equal(found.lse == -math.inf, empty)
    error = (found.lse.double() - expected.lse)[~empty].abs()
    assert (error <= lse * expected.lse[~empty].abs().clamp(min=1.0)).all()


def rescaled(cache, sizes):
    """The same E4M3 bytes under scales of these sizes: one for each slot and group."""
    cache = cache.clone()
    scales = cache[..., 512:528].view(torch.float32)
    scales.copy_(sizes.expand_as(scales).float())
    return cache


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e8, 1e30, 0.0])
def test_scales_of_any_size(size):
    q, cache, lists = problem()
    cache = rescaled(cache, torch.tensor(size))
    q = q / max(size * 400, 1.0)
    expected = oracle(q, cache, lists)
    for found in both(q, cache, lists):
        assert_close(found, expected)


def test_scales_of_all_sizes_in_one_list():
    q, cache, lists = problem(k=64)
    exponents = torch.randint(-30, 30, (*cache.shape[:2], 4))
    q = q * 1e-33
    cache = rescaled(cache, 10.0 ** exponents.double())
    expected = oracle(q, cache, lists)
    for found in both(q, cache, lists):
        assert_close(found, expected)


def test_a_token_of_little_weight_and_great_scale_decides_the_output():
    """Its weight alone, e^-40, is nothing in float16; weight times scale is e^20 times the rest."""
    q, cache, lists = problem(rows=1, heads=1, k=40)
    cache[..., :512] &= 0x80
    cache[..., :384:7] |= 0x40
    cache[..., 512:528] = rescaled(cache, torch.tensor(1.0))[..., 512:528]
    great = cache[0, 0].view(torch.float32)[128:132]
    great.fill_(1e26)
    rotary = cache[..., 528:].view(torch.bfloat16)
    rotary.zero_()
    rotary[0, 0, 0] = -40.0 / SCALE
    q[..., :512], q[..., 512:] = 0.0, 1.0
    lists[:] = torch.arange(40)
    expected = oracle(q, cache, lists)
    assert expected.out.abs().max() > 1e7
    for found in both(q, cache, lists):
        assert_close(found, expected)


@pytest.mark.parametrize("size", [1e-30, 1e6, 1e30])
def test_queries_beyond_the_range_of_float16(size):
    q, cache, lists = problem()
    q[..., 512:] = 0.0
    cache = rescaled(cache, torch.tensor(1.0))
    q, scale = q * size, SCALE / size / 100
    expected = oracle(q, cache, lists, softmax_scale=scale)
    for found in both(q, cache, lists, softmax_scale=scale):
        assert_close(found, expected)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_of_the_queries(cache_format, dtype):
    q, cache, lists = problem(k=33, cache_format=cache_format, dtype=dtype)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    for found in both(q, cache, lists):
        assert found.out.dtype == dtype
        assert_close(found, oracle(q, cache, lists), out=limit, lse=1e-5)


@pytest.mark.parametrize("heads", [1, 9, 17, 128])
def test_B085_heads_are_padded_inside(heads):
    q, cache, lists = problem(rows=1, heads=heads, k=20)
    guarded = torch.full((1, heads + 2, 576), math.nan, dtype=q.dtype)
    guarded[:, 1:-1] = q
    out = torch.full((1, heads + 2, 512), 7.0, dtype=q.dtype)
    plan = plan_for(q, cache, lists, splits=1)
    view = out[:, 1:-1]
    found = plan.decode(guarded[:, 1:-1], cache, lists, softmax_scale=SCALE, out=view)
    assert_close(found, oracle(q, cache, lists))
    assert (out[:, [0, -1]] == 7.0).all()


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_B072_B074_any_number_of_splits(splits):
    q, cache, lists = problem(heads=1)
    lists[1] = -1
    plan = plan_for(q, cache, lists, splits=splits)
    found = [plan.decode(q, cache, lists, softmax_scale=SCALE) for _ in range(2)]
    assert_same_bits(*found)
    assert_close(found[0], oracle(q, cache, lists))
    assert (found[0].out[1] == 0).all() and not found[0].out[1].signbit().any()


def test_B058_slots_are_checked_before_they_are_narrowed():
    q, cache, lists = problem(rows=2, k=20)
    wide = lists.long()
    wide[:, ::3] += 2**40
    wide[:, 1::3] -= 2**33
    cleaned = torch.where((wide >= 0) & (wide < 2**31), wide, -1)
    for found, expected in zip(both(q, cache, wide), both(q, cache, cleaned), strict=True):
        assert_same_bits(found, expected)


def test_a_cache_without_pages():
    q, cache, lists = problem(rows=2, k=5)
    for found in both(q, cache[:0], lists):
        assert (found.out == 0).all() and (found.lse == -math.inf).all()


@pytest.mark.parametrize("gap", [4, 656])
def test_pages_at_any_stride_that_scales_can_be_read_at(gap):
    q, cache, lists = problem(k=20)
    pages, page_size, row = cache.shape
    buffer = torch.full((pages, page_size * row + gap), 0x7F, dtype=torch.uint8)
    buffer[:, : page_size * row] = cache.flatten(1)
    apart = buffer.as_strided(cache.shape, (buffer.stride(0), row, 1))
    for found, expected in zip(both(q, apart, lists), both(q, cache, lists), strict=True):
        assert_same_bits(found, expected)


def test_rows_that_scales_cannot_be_read_at_are_refused():
    q, cache, lists = problem(rows=2, k=5)
    odd = torch.zeros(cache.numel() + 2, dtype=torch.uint8)[2:].view(cache.shape)
    with pytest.raises(ValueError, match="kv_cache must hold FP8 rows at multiples of 4 bytes"):
        both(q, odd, lists)


@pytest.mark.parametrize("kinds", [("float16", "bfloat16"), ("bfloat16", "float32")])
def test_B086_a_cache_of_other_numbers_than_the_plan_was_made_for_is_refused(kinds):
    """What fits SM120 was compiled for both alike."""
    of_q, of_cache = (getattr(torch, kind) for kind in kinds)
    q, cache, lists = problem(cache_format="bf16", dtype=of_q)
    with pytest.raises(
        ValueError, match=f"the plan's q_dtype torch.{kinds[0]}, got torch.{kinds[1]}"
    ):
        both(q, cache.to(of_cache), lists)


@pytest.mark.parametrize("heads", [2, 20])
def test_B088_counts_may_have_a_step_and_lists_no_gaps(heads):
    q, cache, lists = problem(heads=heads)
    counts = torch.tensor([[5, 99], [3, 99]])[:, 0]  # a step forgotten reads 99
    stepped, dense = (both(q, cache, lists, x) for x in (counts, counts.contiguous()))
    for found, expected in zip(stepped, dense, strict=True):
        assert_same_bits(found, expected)
    gaps = lists.repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(ValueError, match="indices must be contiguous in its last dimension"):
        both(q, cache, gaps)


def test_a_row_has_the_same_bits_alone_and_in_any_order():
    q, cache, lists = problem(rows=4)
    counts = torch.tensor([34, 3, 0, 33])
    plan = plan_for(q, cache, lists, splits=2)
    for run in (plan.decode, plan.extend):
        whole = run(q, cache, lists, counts, softmax_scale=SCALE)
        for rows in ([3, 2, 0, 1], [3]):
            part = run(q[rows], cache, lists[rows], counts[rows], softmax_scale=SCALE)
            assert_same_bits(part, AttentionResult(*(x[rows] for x in whole)))


def test_nothing_is_read_back_and_nothing_grows():
    q, cache, lists = problem(rows=2, k=20)
    plan = plan_for(q, cache, lists)
    before = plan.nbytes
    with NothingReadBack():
        plan.decode(q, cache, lists, softmax_scale=SCALE)
        plan.extend(q, cache, lists, softmax_scale=SCALE, sink=torch.zeros(2))
    assert plan.nbytes == before


def test_extend_alone_and_one_split_hold_no_buffers():
    spec = AttnSpec(num_heads=8, topk=2048)
    some = {"max_requests": 4, "device": CPU}
    assert TritonBackend().plan(spec, max_rows=4096, kinds=("extend",), **some).nbytes == 0
    assert TritonBackend().plan(spec, max_rows=4096, **some).nbytes == 0
    few = TritonBackend().plan(spec, max_rows=4, **some)
    assert few.num_splits == 4 and few.nbytes == 4 * 4 * 8 * (512 + 1) * 4


@pytest.mark.parametrize(
    "changed",
    [
        {"q": torch.zeros(9, 4, 576, dtype=torch.bfloat16)},
        {"q": torch.zeros(3, 5, 576, dtype=torch.bfloat16)},
        {"q": torch.zeros(3, 4, 576)},
        {"kv_cache": torch.zeros(2, 8, 576, dtype=torch.bfloat16)},
        {"kv_cache": torch.zeros(2, 7, 656, dtype=torch.uint8)},
        {"indices": torch.zeros(3, 99, dtype=torch.int32)},
        {"indices": torch.zeros(2, 70, dtype=torch.int32)},
        {"counts": torch.zeros(4, dtype=torch.int32)},
        {"softmax_scale": math.nan},
        {"sink": torch.zeros(3)},
        {"out": torch.zeros(3, 4, 512)},
        {"lse": torch.zeros(3, 5)},
        {"out_dtype": torch.float16},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_it_refuses_what_the_torch_backend_refuses(changed):
    q, cache, lists = problem(rows=3, heads=4, k=70)
    arguments = {"q": q, "kv_cache": cache, "indices": lists, "softmax_scale": SCALE} | changed
    spec = AttnSpec(num_heads=4, topk=70, page_size=8)
    sizes = {"max_rows": 3, "max_requests": 3, "device": CPU}
    plans = [b.plan(spec, **sizes) for b in (TritonBackend(), TorchBackend())]
    for kind in ("decode", "extend"):
        refuses_alike(*(getattr(plan, kind) for plan in plans), arguments)


def test_a_kind_that_was_not_planned_for():
    q, cache, lists = problem(heads=4)
    spec = AttnSpec(num_heads=4, topk=70, page_size=8)
    plan = TritonBackend().plan(spec, max_rows=3, max_requests=1, device=CPU, kinds=("extend",))
    with pytest.raises(ValueError, match="this plan is for extend, it cannot run decode"):
        plan.decode(q, cache, lists, softmax_scale=SCALE)


def test_it_is_found_by_name_and_says_what_it_does_not_serve(monkeypatch):
    backend = find_backend("triton")
    assert isinstance(backend, Backend) and backend.name == "triton" and "merge" in backend.parts
    spec = AttnSpec(num_heads=8)
    assert backend.supports(spec, CPU) is None
    assert isinstance(backend.plan(spec, max_rows=1, max_requests=1, device=CPU), Plan)
    for changed, words in (
        ({"q_dtype": torch.float64}, "q_dtype must be"),
        ({"kv_lora_rank": 256}, "512 \\+ 64"),
    ):
        wrong = dataclasses.replace(spec, **changed)
        with pytest.raises(ValueError, match=words):
            raw(backend.plan)(wrong, max_rows=1, max_requests=1, device=CPU)
    module = "mla_kernels.triton_kernels.backend.interpreter_active"
    monkeypatch.setattr(module, lambda: False)
    assert "TRITON_INTERPRET=1" in backend.supports(spec, CPU)


def test_every_configuration_fits_an_sm120_and_every_spec_has_one():
    for line in TABLE:
        if not line.wide:
            assert line.config.shared_bytes(line.cache_format) < SM120_SHARED
    for heads in (1, 8, 9, 16, 17, 128):
        for cache_format in ("bf16", "fp8"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                spec = AttnSpec(num_heads=heads, cache_format=cache_format, q_dtype=dtype)
                for rows in (0, 1, 8, 9, 4096):
                    assert choose(spec, rows).heads >= min(heads, 8)


def test_launches_name_every_argument_of_their_kernel():
    found = launches()
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert set(one.fn.arg_names) == {*one.signature, *one.constexprs}, one.name
        assert set(one.aligned) <= set(one.signature)


def test_splits_fill_a_gpu_once_and_depend_on_the_plan_alone():
    h200 = 3 * 132
    assert [plan_splits(rows, 64, h200) for rows in (4, 16, 64, 256)] == [32, 22, 6, 1]
    assert plan_splits(0, 0, 1) == plan_splits(1, 1, h200) == 1
    for programs in range(1, 80):
        for tiles in (1, 2, 31, 64):
            splits = plan_splits(programs, tiles, h200)
            longest = -(-tiles // splits)
            assert splits * longest >= tiles and (splits - 1) * longest < tiles


@pytest.mark.parametrize("heads", [8, 20])
def test_B060_queries_that_lie_2_31_numbers_apart(heads):
    """Address space alone: what nobody touches of the 4.3 GB takes no memory."""
    near, cache, lists = problem(rows=2, heads=heads, k=32)
    apart = torch.empty(2**31 + 8 + near[0].numel(), dtype=near.dtype)
    q = apart.as_strided(near.shape, (2**31 + 8, *near.stride()[1:]))
    q.copy_(near)
    found, expected = (
        plan_for(x, cache, lists).extend(x, cache, lists, softmax_scale=SCALE) for x in (q, near)
    )
    assert_same_bits(found, expected)

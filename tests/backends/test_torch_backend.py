"""The torch backend keeps the contract of a backend: plans, buffers, dtypes, refusals, bits."""

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import torch
from tests.support import NothingReadBack, assert_agrees, assert_same_bits, raw
from torch import Tensor

from mla_ref.attention import sparse_decode, sparse_extend
from mla_ref.backends import KINDS, PARTS, AttnSpec, Backend, Plan, TorchBackend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows, write_fp8_rows
from mla_ref.indexer import index_scores, positions_to_slots, select_topk
from mla_ref.numerics import AttentionResult, compare, merge_many, oracle_attention

CPU = torch.device("cpu")
PAGES, PAGE, ROWS, K = 3, 8, 5, 13
SMALL = AttnSpec(
    num_heads=3,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    topk=16,
    page_size=PAGE,
    cache_format="bf16",
    q_dtype=torch.float32,
)
SERVED = dataclasses.replace(SMALL, kv_lora_rank=512, qk_rope_head_dim=64, cache_format="fp8")
ROUTES = ("decode", "extend")
SPECS = [
    pytest.param(dataclasses.replace(SMALL, q_dtype=torch.float64), id="float64"),
    pytest.param(SMALL, id="float32"),
    pytest.param(dataclasses.replace(SMALL, q_dtype=torch.bfloat16), id="bfloat16"),
    pytest.param(SERVED, id="fp8-float32"),
    pytest.param(dataclasses.replace(SERVED, q_dtype=torch.bfloat16), id="fp8-bfloat16"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def plan_for(
    spec: AttnSpec, max_rows: int = ROWS, kinds: tuple[str, ...] = KINDS, **kwargs: Any
) -> Plan:
    return TorchBackend(**kwargs).plan(
        spec, max_rows=max_rows, max_requests=2, device=CPU, kinds=kinds
    )


def problem(spec: AttnSpec, rows: int = ROWS, k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache and lists with -1 strewn in; row 2 has no valid entry."""
    plain = torch.float32 if spec.cache_format == "fp8" else spec.q_dtype
    q = torch.randn(rows, spec.num_heads, spec.row_dim, dtype=torch.float64).to(spec.q_dtype)
    numbers = torch.randn(PAGES * spec.page_size, spec.row_dim, dtype=torch.float64).to(plain)
    cache = pack_fp8_rows(numbers) if spec.cache_format == "fp8" else numbers
    capacity = len(cache)
    lists = torch.stack([torch.randint(0, capacity, (k,)) for _ in range(rows)])
    lists[torch.rand(rows, k) < 0.2] = -1
    lists[2:3] = -1
    return q, cache.view(PAGES, spec.page_size, -1), lists.int()


def oracle(spec: AttnSpec, q: Tensor, cache: Tensor, lists: Tensor, scale: float):
    rows = unpack_fp8_rows(cache) if cache.dtype == torch.uint8 else cache
    rows, results = rows.flatten(0, 1).double(), []
    for one, entries in zip(q.double(), lists.tolist(), strict=True):
        keys = rows[[slot for slot in entries if slot >= 0]][:, None]
        seen = torch.ones(1, len(keys), dtype=torch.bool)
        values = keys[..., : spec.kv_lora_rank]
        results.append(oracle_attention(one[None], keys, values, seen, softmax_scale=scale))
    return AttentionResult(*(torch.cat(parts) for parts in zip(*results, strict=True)))


def call(plan: Plan, route: str, *args: Any, **kwargs: Any) -> AttentionResult:
    return getattr(plan, route)(*args, **({"softmax_scale": 0.2} | kwargs))


def test_it_is_a_backend_with_a_plan_and_the_parts_below_it() -> None:
    backend = TorchBackend()
    assert isinstance(backend, Backend) and backend.name == "torch"
    assert isinstance(plan_for(SMALL), Plan)
    assert dict(backend.parts) == {
        "merge": merge_many,
        "cache_write": write_fp8_rows,
        "convert": positions_to_slots,
        "index_scores": index_scores,
        "topk": select_topk,
    }
    # Its sampler is `speculative.rejection_sample`, which stands floors above.
    assert set(backend.parts) == set(PARTS) - {"sampler"}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("scale", [0.2, 0.01])
def test_equals_the_oracle(spec: AttnSpec, route: str, scale: float) -> None:
    q, cache, lists = problem(spec)
    got = call(plan_for(spec), route, q, cache, lists, softmax_scale=scale)
    assert got.out.dtype == spec.q_dtype
    expected = oracle(spec, q, cache, lists, scale)
    # The statistics are float32 at least, whatever q is.
    limit = TOLERANCE[spec.q_dtype]
    assert_agrees(got, expected, rel_l2=limit, lse_abs=min(1e-5, 10 * limit))


@pytest.mark.parametrize("spec", SPECS)
def test_decode_equals_extend(spec: AttnSpec) -> None:
    arguments = problem(spec)
    plan = plan_for(dataclasses.replace(spec, topk=2048), max_rows=6)
    assert plan.num_splits == 3
    counts = torch.tensor([0, 1, 13, 12, 7])
    sink = torch.tensor([0.3, -1.0, 2.0])
    decoded, extended = (call(plan, r, *arguments, counts, sink=sink) for r in ROUTES)
    assert_agrees(decoded, extended, rel_l2=TOLERANCE[spec.q_dtype], lse_abs=1e-5)


def test_the_splits_come_from_capacities_alone() -> None:
    """Of 2,048 entries and 16 units; a plan for fewer rows cuts their lists finer."""
    wide = dataclasses.replace(SMALL, topk=2048)
    assert [plan_for(wide, rows).num_splits for rows in (1, 4, 5, 16, 100)] == [16, 4, 4, 1, 1]
    assert plan_for(wide, 4, multiprocessors=188).num_splits == 32
    assert plan_for(SMALL, 1).num_splits == 1


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("max_rows", [0, 1, 7])
def test_nbytes_are_the_bytes_of_the_buffers(spec: AttnSpec, max_rows: int) -> None:
    spec = dataclasses.replace(spec, topk=2048)
    plan = plan_for(spec, max_rows)
    size = 8 if spec.q_dtype == torch.float64 else 4
    numbers = plan.num_splits * max_rows * spec.num_heads * (spec.kv_lora_rank + 1)
    assert plan.nbytes == numbers * size
    assert plan.nbytes == sum(x.untyped_storage().nbytes() for x in plan.partials)


@pytest.mark.parametrize("spec", SPECS)
def test_a_plan_for_one_kind_holds_what_that_kind_needs_and_gives_the_same_bits(
    spec: AttnSpec,
) -> None:
    spec, arguments = dataclasses.replace(spec, topk=2048), problem(spec)
    both = plan_for(spec)
    for kind, nbytes in (("decode", both.nbytes), ("extend", 0)):
        alone = plan_for(spec, kinds=(kind,))
        assert alone.nbytes == nbytes
        assert nbytes == sum(x.untyped_storage().nbytes() for x in alone.partials)
        assert_same_bits(call(alone, kind, *arguments), call(both, kind, *arguments))
    assert plan_for(spec, kinds=("extend", "decode")).nbytes == both.nbytes


@pytest.mark.parametrize(("kind", "other"), [ROUTES, ROUTES[::-1]])
def test_a_kind_that_was_not_planned_is_refused_by_name(kind: str, other: str) -> None:
    plan = plan_for(SMALL, kinds=(kind,))
    with pytest.raises(ValueError, match=f"this plan is for {kind}, it cannot run {other}"):
        call(plan, other, *problem(SMALL))


def test_B013_a_plan_never_grows() -> None:
    q, cache, lists = problem(SMALL)
    plan = plan_for(SMALL)
    before = [x.data_ptr() for x in plan.partials], plan.nbytes
    for rows in (1, 5, 3, 0):
        call(plan, "decode", q[:rows], cache, lists[:rows])
    with pytest.raises(ValueError, match="5 rows, but the plan is for 4 at most"):
        raw(plan_for(SMALL, 4).decode)(q, cache, lists, softmax_scale=0.2)
    assert ([x.data_ptr() for x in plan.partials], plan.nbytes) == before


# --- results go where, and in what


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_results_go_into_the_buffers_of_the_caller(spec: AttnSpec, route: str) -> None:
    arguments, plan = problem(spec), plan_for(spec)
    plain = call(plan, route, *arguments)
    out, lse = torch.full_like(plain.out, math.nan), torch.full_like(plain.lse, math.nan)
    for buffers in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        got = call(plan, route, *arguments, **buffers)
        assert_same_bits(got, plain)
        for name, buffer in buffers.items():
            assert getattr(got, name).data_ptr() == buffer.data_ptr()
            buffer.fill_(math.nan)


@pytest.mark.parametrize("route", ROUTES)
def test_strided_buffers_are_filled_and_what_lies_between_is_not(route: str) -> None:
    arguments, plan = problem(SMALL), plan_for(SMALL)
    around = torch.full((ROWS, 2 * SMALL.num_heads, SMALL.kv_lora_rank), 7.0)
    got = call(plan, route, *arguments, out=around[:, ::2])
    assert_same_bits(got, call(plan, route, *arguments))
    assert around[:, 1::2].eq(7).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_float32_output_is_not_rounded_to_the_dtype_of_q(spec: AttnSpec, route: str) -> None:
    q, cache, lists = problem(spec)
    got = call(plan_for(spec), route, q, cache, lists, out_dtype=torch.float32)
    assert got.out.dtype == torch.float32
    assert_agrees(got, oracle(spec, q, cache, lists, 0.2), rel_l2=1e-6, lse_abs=1e-5)
    rounded = call(plan_for(spec), route, q, cache, lists)
    assert torch.equal(got.out.to(spec.q_dtype).float(), rounded.out.float())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_B119_the_lse_always_comes_too(spec: AttnSpec, route: str) -> None:
    """Whoever merges over ranks needs it; without the sink, and -inf where nothing was seen."""
    q, cache, lists = problem(spec)
    sink = torch.tensor([0.3, -1.0, 2.0])
    wide = torch.float64 if spec.q_dtype == torch.float64 else torch.float32
    out = torch.empty(ROWS, 3, spec.kv_lora_rank, dtype=spec.q_dtype)
    plain = call(plan_for(spec), route, q, cache, lists)
    for more in ({}, {"out": out}, {"sink": sink}, {"counts": torch.full((ROWS,), K)}):
        lse = call(plan_for(spec), route, q, cache, lists, **more).lse
        assert lse.dtype == wide and lse.shape == (ROWS, 3)
        assert torch.equal(lse, plain.lse)
        assert lse[2].eq(-math.inf).all()


# --- bits


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_B074_the_same_call_gives_the_same_bits(spec: AttnSpec, route: str) -> None:
    arguments, plan = problem(spec), plan_for(spec)
    first = AttentionResult(*(x.clone() for x in call(plan, route, *arguments)))
    for _ in range(3):
        assert_same_bits(call(plan, route, *arguments), first)
    assert_same_bits(call(plan_for(spec), route, *arguments), first)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_permuting_rows_permutes_the_result_bit_for_bit(spec: AttnSpec, route: str) -> None:
    q, cache, lists = problem(spec, rows=20)
    plan = plan_for(spec, 20)
    plain, order = call(plan, route, q, cache, lists), torch.randperm(20)
    got = call(plan, route, q[order], cache, lists[order])
    assert_same_bits(got, AttentionResult(plain.out[order], plain.lse[order]))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_B072_what_lay_in_the_buffers_of_the_plan_does_not_matter(
    spec: AttnSpec, poison: float
) -> None:
    """Of 16 splits of 13 entries three are empty, and each must still be written."""
    arguments = problem(spec)
    plan = plan_for(dataclasses.replace(spec, topk=2048), multiprocessors=80, max_rows=ROWS)
    assert plan.num_splits == 16
    clean = AttentionResult(*(x.clone() for x in call(plan, "decode", *arguments)))
    for rows in (ROWS, 2):
        for buffer in plan.partials:
            buffer.fill_(poison)
        got = call(plan, "decode", *(x[:rows] if i != 1 else x for i, x in enumerate(arguments)))
        assert_same_bits(got, AttentionResult(clean.out[:rows], clean.lse[:rows]))
        # Rows that are not in the call are not touched.
        assert not plan.partials.out[:, rows:].isfinite().any()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_run_reads_nothing_back(spec: AttnSpec, route: str) -> None:
    arguments, plan = problem(spec), plan_for(spec)
    counts, sink = torch.full((ROWS,), 9), torch.zeros(3)
    out = torch.empty(ROWS, 3, spec.kv_lora_rank, dtype=spec.q_dtype)
    lse = torch.empty(ROWS, 3, dtype=plan.partials.lse.dtype)
    with NothingReadBack():
        raw(call)(plan, route, *arguments, counts, sink=sink, out=out, lse=lse)


# --- what a plan takes


@pytest.mark.parametrize("route", ROUTES)
def test_B044_a_list_wider_than_planned_is_refused_and_a_narrower_one_read_whole(
    route: str,
) -> None:
    q, cache, _ = problem(SMALL)
    plan = plan_for(SMALL)
    for width in (0, 1, 15, 16):
        lists = torch.randint(0, PAGES * PAGE, (ROWS, width))
        got = call(plan, route, q, cache, lists)
        assert_agrees(got, oracle(SMALL, q, cache, lists, 0.2), rel_l2=1e-6, lse_abs=1e-5)
    lists = torch.randint(0, PAGES * PAGE, (ROWS, 17))
    with pytest.raises(ValueError, match="indices has 17 columns, but the plan is for topk 16"):
        call(plan, route, q, cache, lists)


@pytest.mark.parametrize("route", ROUTES)
def test_what_does_not_fit_the_plan_names_both_numbers(route: str) -> None:
    q, cache, lists = problem(SMALL)
    good = {"q": q, "kv_cache": cache, "indices": lists, "softmax_scale": 0.2}
    out, lse = torch.empty(ROWS, 3, 16), torch.empty(ROWS, 3)
    plan = raw(getattr(plan_for(SMALL), route))
    plan(**good, out=out, lse=lse)
    for changed, message in (
        ({"q": torch.cat([q, q]), "indices": torch.cat([lists, lists])}, "q has 10 rows.* 5 at"),
        ({"q": q[:, :2]}, r"q must have size 3 .*heads of the plan.* \[5, 2, 24\]"),
        ({"q": q[..., :20]}, r"q must have size 24 .*row of the plan.* \[5, 3, 20\]"),
        ({"q": q.double()}, "q is torch.float64, but the plan is for q_dtype torch.float32"),
        ({"q": q.bfloat16()}, "q is torch.bfloat16, but the plan is for q_dtype torch.float32"),
        ({"q": q.long()}, "q must hold floating-point"),
        ({"q": q[0]}, "q must have the shape"),
        ({"kv_cache": cache[:, :7]}, r"kv_cache must have size 8 .*page_size of the plan.*7, 24"),
        ({"kv_cache": cache[..., :20]}, "kv_cache must have size 24"),
        ({"kv_cache": cache.double()}, "kv_cache is float64, but the plan is for q_dtype .*32"),
        ({"kv_cache": torch.zeros(3, 8, 656, dtype=torch.uint8)}, "cache_format 'bf16', got .*656"),
        ({"kv_cache": None}, "kv_cache must be a tensor"),
        ({"indices": lists[:4]}, "indices must have size 5"),
        ({"indices": lists.float()}, "indices must hold int32"),
        ({"indices": None}, "indices must be a tensor"),
        ({"counts": torch.zeros(4, dtype=torch.int32)}, "counts must have size 5"),
        ({"counts": torch.zeros(5)}, "counts must hold int32"),
        ({"sink": torch.zeros(2)}, "sink"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
        ({"softmax_scale": None}, "softmax_scale"),
        ({"out": out[:4]}, r"out must have the shape \[5, 3, 16\] .*\[4, 3, 16\]"),
        ({"out": out[:, :, :1]}, r"out must have the shape \[5, 3, 16\]"),
        ({"out": out.double()}, "out must be a torch.float32 tensor"),
        ({"out": out, "out_dtype": torch.bfloat16}, "out_dtype must be torch.float32"),
        ({"lse": lse[:1]}, r"lse must have the shape \[5, 3\] .*\[1, 3\]"),
        ({"lse": lse.bfloat16()}, "lse must be a torch.float32 tensor"),
        ({"lse": 0.0}, "lse must be a torch.float32 tensor"),
        ({"out_dtype": torch.float64}, "out_dtype must be torch.float32, as q, or float32"),
        ({"out_dtype": "float32"}, "out_dtype must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plan(**(good | changed))
    fp8 = raw(getattr(plan_for(SERVED), route))
    with pytest.raises(ValueError, match="cache_format 'fp8', got a float32"):
        fp8(torch.zeros(5, 3, 576), torch.zeros(3, 8, 576), lists, softmax_scale=0.2)


def test_B073_a_bfloat16_lse_is_refused() -> None:
    lse = torch.empty(ROWS, 3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="lse must be a torch.float32"):
        raw(plan_for(SMALL).decode)(*problem(SMALL), softmax_scale=0.2, lse=lse)


def test_a_plan_names_bad_input() -> None:
    backend = TorchBackend()
    good: dict[str, Any] = {"spec": SMALL, "max_rows": 1, "max_requests": 1, "device": CPU}
    for name, wrong in (
        ("max_rows", -1),
        ("max_rows", None),
        ("max_requests", 1.5),
        ("spec", None),
        ("kinds", "decode"),
        ("kinds", ["decode"]),
        ("kinds", ()),
        ("kinds", ("decode", "prefill")),
        ("kinds", (1,)),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            raw(backend.plan)(**(good | {name: wrong}))
    with pytest.raises(ValueError, match="multiprocessors"):
        TorchBackend(multiprocessors=0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *product(("num_heads", "kv_lora_rank", "topk", "page_size"), (0, -1, 1.0, None, True)),
        ("qk_rope_head_dim", -1),
        ("cache_format", "fp4"),
        ("cache_format", None),
        ("q_dtype", "bfloat16"),
        ("q_dtype", None),
    ],
)
def test_a_spec_names_what_cannot_be(name: str, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        raw(AttnSpec)(**({"num_heads": 3} | {name: wrong}))


GRID = list(
    product(
        (1, 24),  # heads
        ((512, 64), (512, 0), (16, 8)),
        (1, 384),  # topk
        (32,),  # page size
        ("bf16", "fp8"),
        (torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn),
    )
)


@pytest.mark.usefixtures("plain_calls")
def test_B021_supports_agrees_with_what_runs() -> None:
    """Every spec of a grid runs on both routes, or the plan is refused with the reason."""
    backend, refused, ran = TorchBackend(), 0, 0
    for heads, (d_c, d_r), topk, page_size, cache_format, q_dtype in GRID:
        spec = AttnSpec(heads, d_c, d_r, topk, page_size, cache_format, q_dtype)
        reason = backend.supports(spec, CPU)
        if reason is None:
            plan = plan_for(spec, 2)
            q, cache, lists = problem(spec, rows=2, k=min(topk, 3))
            for route in ROUTES:
                got = call(plan, route, q, cache, lists)
                found = compare(got.out, oracle(spec, q, cache, lists, 0.2).out)
                assert found.agrees(rel_l2=TOLERANCE[q_dtype]), (spec, found)
            ran += 1
        else:
            dims = str(d_c) in reason and str(d_r) in reason
            assert dims or str(q_dtype) in reason
            with pytest.raises(ValueError, match="does not serve") as caught:
                plan_for(spec, 2)
            assert reason in str(caught.value)
            refused += 1
    # 2 dtypes of 5; of the fp8 specs 1 pair of dimensions of 3.
    assert (ran, refused) == (4 * (3 * 2 + 1 * 2), 4 * (30 - 8))


def test_plans_and_functions_are_the_same_maths() -> None:
    q, cache, lists = problem(SMALL)
    plan = plan_for(SMALL)
    kwargs = {"softmax_scale": 0.2, "kv_lora_rank": 16}
    decoded = sparse_decode(q, cache, lists, num_splits=plan.num_splits, **kwargs)
    assert_same_bits(call(plan, "decode", q, cache, lists), decoded)
    assert_same_bits(
        call(plan, "extend", q, cache, lists), sparse_extend(q, cache, lists, **kwargs)
    )

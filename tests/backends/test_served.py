"""Profiles of the served backends: what each computes, against the float64 oracle on what it reads.

The emulations keep the contract; how far they are from exact attention is their profile's rounding
and no more.
"""

import dataclasses
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.backends.served_batches import (
    BATCHES,
    CPU,
    ROUTES,
    SCALE,
    assert_within,
    batch,
    expected_of,
    limits,
    oracle,
    queries_as_read,
    rounded,
    rows_as_read,
)
from tests.support import NothingReadBack, assert_agrees, assert_same_bits, bits, raw

from mla_ref.backends import AttnSpec, Backend, Plan, find_backend
from mla_ref.backends.served import (
    PROFILES,
    Arithmetic,
    PeerTolerance,
    ServedBackend,
    arithmetic_error,
    lse_as_returned,
    round_queries,
    served_backend,
)
from mla_ref.numerics import AttentionResult, merge_many, to_natural_lse
from mla_ref.numerics.float8 import group_scale
from mla_ref.testing import Adapter, Limits, find_case

NAMES = tuple(PROFILES)
FORMATS = [(name, f) for name, profile in PROFILES.items() for f in profile.cache_formats]
FP8 = [name for name, cache_format in FORMATS if cache_format == "fp8"]


def format_of(name: str) -> str:
    return "fp8" if name in FP8 else "bf16"


# --- the shared test: every batch, both routes, as vLLM's own over its backends


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", BATCHES)
def test_within_the_peers_own_tolerance(name: str, shape: str) -> None:
    """Queries as given, rows as this profile reads them."""
    given, profile = batch(shape, format_of(name)), PROFILES[name]
    a = profile.arithmetic
    expected = expected_of(shape, format_of(name), a.scale_reader, a.rows)
    for route in ROUTES:
        got = given.run(served_backend(name), route)
        assert got.out.dtype == torch.bfloat16 and got.lse.dtype == torch.float32
        assert profile.tolerance.violations(got, expected) == ()


@pytest.mark.parametrize(("name", "cache_format"), FORMATS)
@pytest.mark.parametrize(
    ("shape", "data"),
    [("mixed_small", "randn"), ("spec_decode_small", "rand"), ("large_q_pure_prefill", "randn")],
)
def test_within_the_bound_of_its_rounding(
    name: str, cache_format: str, shape: str, data: str
) -> None:
    given, profile = batch(shape, cache_format, data=data), PROFILES[name]
    bound = limits(profile, given)
    for route in ROUTES:
        got = given.run(served_backend(name), route, out_dtype=torch.float32)
        assert_within(got, *bound)
    assert_within(given.run(served_backend(name), "decode"), *rounded(*bound))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("b12x", "weights", "e4m3"),
        ("b12x", "queries", "as given"),
        ("b12x", "scale_reader", "truncated"),
        ("flashmla-sm90", "rows", "float32"),
        ("flashmla-sm90", "scale_reader", "truncated"),
        ("flashmla-sm100", "scale_reader", "stored"),
    ],
)
def test_the_bound_sees_one_rounding_more_or_less(name: str, field: str, value: str) -> None:
    given, profile = batch("spec_decode_small", "fp8", data="randn"), PROFILES[name]
    expected, out, lse = limits(profile, given)
    other = replace(profile, arithmetic=replace(profile.arithmetic, **{field: value}))
    got = given.run(ServedBackend(other), "decode", out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="over the limit"):
        assert_within(got, expected, out, lse)


@pytest.mark.parametrize("name", ["b12x", "flashinfer-sm120"])
def test_rounded_queries_move_a_score_by_a_sixteenth_at_most(name: str) -> None:
    """A log-sum-exp moves by no more than its largest score does."""
    given = batch("spec_decode_small", "fp8", data="randn")
    rows, q = rows_as_read("stored", "float32", given.rows), given.q.double()
    step = 2.0 ** torch.ceil(torch.log2(q[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448))
    lost = q[..., :512].abs() / 16 + (step * 2.0**-10).repeat_interleave(128, dim=-1)
    moved = SCALE * (lost @ rows[:, :512].abs().T)
    most = moved.masked_fill(~given.visible[:, None], 0.0).amax(dim=-1)
    got = given.run(served_backend(name), "decode").lse
    error = (got - oracle(q, rows, given.visible).lse).abs()
    assert bool((error <= most + 1e-5).all()) and float(error.max()) > 1e-3


@pytest.mark.parametrize("name", ["b12x", "flashinfer-sm120"])
def test_queries_are_rounded_as_ml_dtypes_rounds_them(name: str) -> None:
    given, profile = batch("mixed_small", "fp8", data="randn"), PROFILES[name]
    got = round_queries(given.q, profile.arithmetic)
    assert torch.equal(got.double(), queries_as_read(profile, given.q))
    assert torch.equal(got[..., 512:], given.q[..., 512:].float()), "the rotary part stays"


# --- scales


def test_B049_each_writer_by_its_published_numbers() -> None:
    amax = torch.tensor([0.0, 0.0546875, 0.0547, 1.0, 100.0, 448.0, 449.0])
    expected = {
        "flashmla-sm100": [2**-13, 2**-13, 2**-12, 2**-8, 0.25, 1.0, 2.0],
        "flashmla-sm90": [2**-13, 2**-13, 2**-12, 2**-8, 0.25, 1.0, 2.0],
        "b12x": [1.0, *(amax[1:] / 448).tolist()],
        "flashinfer-sm120": [float(torch.tensor(1e-4) / 448), *(amax[1:] / 448).tolist()],
    }
    assert set(expected) == set(FP8)
    for name, scales in expected.items():
        assert group_scale(amax, PROFILES[name].scale_rule).tolist() == scales, name


@pytest.mark.parametrize("scale_rule", ["pow2", "pow2-floor"])
def test_B049_readers_agree_bit_for_bit_on_powers_of_two(scale_rule: str) -> None:
    given = batch("spec_decode_small", "fp8", data="randn", scale_rule=scale_rule)
    for route in ROUTES:
        sm90, sm100 = (given.run(served_backend(f"flashmla-{x}"), route) for x in ("sm90", "sm100"))
        assert_same_bits(sm90, sm100)


@pytest.mark.parametrize("scale_rule", ["fp32", "fp32-one", "fp32-floor"])
def test_B049_a_truncating_reader_is_wrong_on_other_scales(scale_rule: str) -> None:
    """It is right about another cache: the one whose scales are cut to their exponent."""
    given = batch("spec_decode_small", "fp8", scale_rule=scale_rule)
    stored, truncated = (
        given.run(served_backend(f"flashmla-{x}"), "decode") for x in ("sm90", "sm100")
    )
    ratio = truncated.out.float() / stored.out.float()
    # Each value by a factor in (1/2, 1], and the weights follow the scores.
    assert float(ratio.min()) > 0.45 and float(ratio.max()) < 0.99
    assert PROFILES["flashmla-sm90"].tolerance.violations(truncated, stored) != ()

    cache = given.kv_cache.clone()
    scales = cache[..., 512:528].contiguous().view(torch.int32) & 0x7F800000
    live = cache[..., 512].ne(255)
    cache[..., 512:528] = torch.where(
        live[..., None], scales.view(torch.uint8), cache[..., 512:528]
    )
    by_hand = replace(given, kv_cache=cache).run(served_backend("flashmla-sm90"), "decode")
    assert_same_bits(truncated, by_hand)


def test_B156_rows_of_another_width_are_refused() -> None:
    given = batch("mixed_small", "fp8")
    flat = given.kv_cache[..., :576].contiguous()
    for name in FP8:
        with pytest.raises(ValueError, match="kv_cache must have size 656"):
            raw(replace(given, kv_cache=flat).run)(served_backend(name), "decode")
    wrong = replace(batch("mixed_small", "bf16"), q=given.q.to(torch.float16))
    with pytest.raises(ValueError, match=r"kv_cache must hold torch.float16, as q, got a bfloat16"):
        raw(wrong.run)(served_backend("fa3-sparse"), "extend")


# --- LSE, empty rows, sink


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ROUTES)
def test_B067_a_row_without_an_entry(name: str, route: str) -> None:
    """Whatever the kernel writes for it, ours is (0, -inf), the identity of a merge."""
    full = batch("mixed_small", format_of(name), data="randn")
    lists = full.indices.clone()
    lists[3] = -1
    given, backend = replace(full, indices=lists), served_backend(name)
    for sink in (None, torch.linspace(-3, 3, 8)):
        got = given.run(backend, route, sink=sink)
        assert got.lse[3].eq(-math.inf).all() and bits(got.out[3]).eq(0).all()
        whole = full.run(backend, route, sink=sink)
        others = [row for row in range(len(lists)) if row != 3]
        assert_same_bits(*(AttentionResult(r.out[others], r.lse[others]) for r in (got, whole)))
    merged = merge_many(torch.stack([whole.out, got.out]), torch.stack([whole.lse, got.lse]))
    assert torch.equal(merged.lse[3], whole.lse[3]) and torch.equal(merged.out[3], whole.out[3])
    foreign = lse_as_returned(backend.profile, got.lse)[3]
    assert foreign.eq(math.inf if name.startswith("flashmla") else -math.inf).all()


@pytest.mark.parametrize("name", NAMES)
def test_B141_the_base_of_the_lse_is_one_conversion(name: str) -> None:
    profile = PROFILES[name]
    lse = torch.tensor([[0.0, -3.5, 12.25, -math.inf]])
    foreign = lse_as_returned(profile, lse)
    if profile.lse_base == "2":
        assert torch.equal(foreign[0, :3], lse[0, :3] / math.log(2.0))
    back = to_natural_lse(foreign, base=profile.lse_base, empty=profile.empty_lse)
    torch.testing.assert_close(back, lse, rtol=2.0**-22, atol=0)
    natural, binary = (lse_as_returned(replace(profile, lse_base=b), lse[:, 1:3]) for b in "e2")
    torch.testing.assert_close(binary / natural, torch.full((1, 2), 1.442695), rtol=1e-6, atol=0)


def test_B111_the_lse_of_flashinfer_read_as_natural() -> None:
    """3,072 and 64 equal scores: the suffix has weight 64/3136, and 0.0037 by the wrong base."""
    lse = torch.log(torch.tensor([[3072.0], [64.0]]))
    foreign = lse_as_returned(PROFILES["flashinfer-sm120"], lse)
    assert torch.softmax(lse[:, 0], 0)[1].item() == pytest.approx(0.0204082, abs=1e-7)
    assert torch.softmax(foreign[:, 0], 0)[1].item() == pytest.approx(0.0037399, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ROUTES)
def test_the_sink_takes_weight_once_and_is_not_in_the_lse(name: str, route: str) -> None:
    given, profile = batch("spec_decode_small", format_of(name), data="randn"), PROFILES[name]
    sink = torch.tensor([0.0, 5.0, -5.0, 9.0, math.inf, -math.inf, 1e5, -1e5])
    got, plain = (given.run(served_backend(name), route, sink=s) for s in (sink, None))
    assert torch.equal(got.lse, plain.lse)
    expected, out, lse = limits(profile, given)
    factor = torch.sigmoid(expected.lse - sink.double())[..., None]
    wanted = AttentionResult(expected.out * factor, expected.lse)
    rounding = 2.0**-8 * wanted.out.abs()
    assert_within(got, wanted, (out + 2 * lse[..., None]) * factor + rounding + 1e-30, lse)


def test_a_sink_inside_the_lse_cannot_be_taken_out_again() -> None:
    profile = PROFILES["flashinfer-sm120"]
    lse, sink = torch.tensor([[2.0, 2.0, -math.inf]]), torch.tensor([1.0, 1e5, 0.5])
    base2 = lse_as_returned(profile, lse, sink)[0]
    log2_e = math.log2(math.e)
    assert base2[0].item() == pytest.approx(math.log2(2 ** (2 * log2_e) + 2**log2_e), rel=1e-6)
    assert base2[2].item() == pytest.approx(0.5 * log2_e, rel=1e-6), "an empty row gives its sink"
    # exp(2) beside exp(1e5) is gone: the same bits as without any key.
    nothing = lse_as_returned(profile, torch.full((1, 3), -math.inf), sink)[0]
    assert base2[1] == nothing[1]
    for name in set(NAMES) - {profile.name}:
        assert torch.equal(*(lse_as_returned(PROFILES[name], lse, s) for s in (sink, None)))


# --- heads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [1, 4, 8, 9, 64, 128])
def test_B085_padded_heads_never_leak(name: str, heads: int) -> None:
    given, profile = batch("small_decode", format_of(name), heads=heads), PROFILES[name]
    clean, garbage = (
        given.run(served_backend(name, pad_value=value), "decode") for value in (0.0, math.nan)
    )
    assert clean.out.shape == (2, heads, 512) and clean.lse.shape == (2, heads)
    assert_same_bits(clean, garbage)
    assert_within(clean, *rounded(*limits(profile, given)))


@pytest.mark.parametrize(
    ("name", "cache_format", "padded"),
    [
        ("b12x", "fp8", (8, 8, 8, 16, 64, 128)),
        ("flashinfer-sm120", "fp8", (1, 4, 8, 9, 64, 128)),
        ("flashmla-sm90", "fp8", (64, 64, 64, 64, 64, 128)),
        ("flashmla-sm90", "bf16", (64, 64, 64, 64, 64, 128)),
        ("flashmla-sm100", "fp8", (64, 64, 64, 64, 64, 128)),
        ("flashmla-sm100", "bf16", (128,) * 6),
        ("vllm-triton-sparse", "bf16", (1, 4, 8, 9, 64, 128)),
        ("fa3-sparse", "bf16", (1, 4, 8, 9, 64, 128)),
    ],
)
def test_how_many_heads_the_kernel_runs_with(name, cache_format, padded) -> None:
    profile = PROFILES[name]
    assert tuple(profile.padded_heads(h, cache_format) for h in (1, 4, 8, 9, 64, 128)) == padded
    spec = AttnSpec(num_heads=9, topk=64, cache_format=cache_format)
    plan = served_backend(name).plan(spec, max_rows=3, max_requests=1, device=CPU)
    assert plan.num_heads == plan.partials.out.shape[2] == padded[3]


# --- a backend by the contract


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_backend_under_a_name_that_says_what_it_is(name: str) -> None:
    backend = served_backend(name)
    assert isinstance(backend, Backend) and backend.name == f"emulated-{name}"
    assert find_backend(backend.name) == backend and dict(backend.parts) == {}
    assert isinstance(batch("small_decode", format_of(name)).plan(backend), Plan)
    with pytest.raises(ValueError, match="name must be one of b12x, .*, fa3-sparse, got 'torch'"):
        served_backend("torch")


def test_B021_the_refusal_names_every_field_and_what_it_takes() -> None:
    spec = AttnSpec(num_heads=24, topk=384, page_size=32)
    assert served_backend("flashmla-sm90").supports(spec, CPU) == (
        "the spec has page_size 32, where it takes 64"
    )
    odd = AttnSpec(num_heads=130, topk=100, page_size=32, q_dtype=torch.float16)
    with pytest.raises(ValueError, match="does not serve") as caught:
        served_backend("b12x").plan(odd, max_rows=1, max_requests=1, device=CPU)
    assert str(caught.value) == (
        "emulated-b12x does not serve this spec: the spec has num_heads 130, where it takes at "
        "most 128; page_size 32, where it takes 64; topk 100, where it takes multiples of 64; "
        "q_dtype torch.float16, where it takes torch.bfloat16"
    )
    bf16 = AttnSpec(num_heads=8, cache_format="bf16")
    assert served_backend("b12x").supports(bf16, CPU) == (
        "the spec has cache_format bf16, where it takes fp8"
    )


def test_B154_supports_agrees_with_what_plans() -> None:
    made = refused = 0
    for name, heads, topk, page, cache_format in product(
        NAMES,
        (24, 129),
        (64, 80, 81),
        (32, 64),
        ("bf16", "fp8"),
    ):
        backend = served_backend(name)
        spec = AttnSpec(heads, 512, 64, topk, page, cache_format)
        reason = backend.supports(spec, CPU)
        try:
            backend.plan(spec, max_rows=1, max_requests=1, device=CPU)
            made += 1
            assert reason is None
        except ValueError as error:
            refused += 1
            assert reason is not None and reason in str(error)
    # Heads times widths, at page 64: b12x 1 * 1, FlashInfer 1 * 3, FlashMLA 1 * 1 in two formats
    # on two GPUs, FA3 2 * 3; Triton 2 * 2 at both page sizes.
    assert made == 1 + 3 + 2 * 2 + 6 + 2 * 4
    assert made + refused == 6 * 2 * 3 * 2 * 2


def test_the_plan_of_b12x_holds_what_its_scratch_does() -> None:
    """64 verifier rows of 8 heads, 32 splits of 64 entries, 512 bfloat16 numbers: 16 MiB."""
    plan = served_backend("b12x").plan(
        AttnSpec(num_heads=8), max_rows=64, max_requests=16, device=CPU
    )
    assert plan.num_splits == 32
    assert plan.partials.out.nbytes == 16 * 2**20
    assert plan.nbytes == 16 * 2**20 + 64 * 8 * 32 * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_for_one_kind_holds_what_that_kind_needs(name: str) -> None:
    given, backend = batch("small_decode", format_of(name)), served_backend(name)
    both = given.plan(backend)
    for kind, other, nbytes in (("decode", "extend", both.nbytes), ("extend", "decode", 0)):
        plan = given.plan(backend, kinds=(kind,))
        assert plan.nbytes == nbytes
        results = [
            getattr(p, kind)(given.q, given.kv_cache, given.indices, softmax_scale=SCALE)
            for p in (plan, both)
        ]
        assert_same_bits(*results)
        with pytest.raises(ValueError, match=f"this plan is for {kind}, it cannot run {other}"):
            getattr(plan, other)(given.q, given.kv_cache, given.indices, softmax_scale=SCALE)
    with pytest.raises(ValueError, match="kinds must be one of decode, extend, got 'both'"):
        given.plan(backend, kinds=("both",))


@pytest.mark.parametrize(("topk", "splits"), [(64, 1), (128, 2), (320, 3), (2048, 4)])
def test_splits_are_whole_tiles(topk: int, splits: int) -> None:
    plan = served_backend("flashmla-sm90").plan(
        AttnSpec(num_heads=8, topk=topk), max_rows=1, max_requests=1, device=CPU
    )
    assert plan.num_splits == splits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_read_back_and_rows_do_not_see_each_other(name: str, route: str) -> None:
    given, backend = batch("mixed_small", format_of(name), data="randn"), served_backend(name)
    counts, sink = torch.arange(12, dtype=torch.int32) * 9, torch.zeros(8)
    plan = given.plan(backend)
    order = torch.randperm(12)

    def call(rows):
        return getattr(plan, route)(
            given.q[rows], given.kv_cache, given.indices[rows], counts[rows],
            softmax_scale=SCALE, sink=sink,
        )  # fmt: skip

    with NothingReadBack():
        first = call(torch.arange(12))
    assert_same_bits(call(order), AttentionResult(first.out[order], first.lse[order]))
    assert first.lse[0].eq(-math.inf).all() and first.lse[1:].isfinite().all()
    with pytest.raises(ValueError, match="13 rows, but the plan is for 12 at most"):
        raw(call)(torch.zeros(13, dtype=torch.long))


@pytest.mark.parametrize("name", NAMES)
def test_a_list_that_ends_inside_a_tile(name: str) -> None:
    """37 entries are the same as 37 and many -1; an FP8 scale is that of the entries there are."""
    given, backend = batch("large_decode", format_of(name), data="randn"), served_backend(name)
    short = replace(given, indices=given.indices[:, :37])
    padded = replace(given, indices=torch.where(torch.arange(128) < 37, given.indices, -1))
    for route in ROUTES:
        a, b = (x.run(backend, route, out_dtype=torch.float32) for x in (short, padded))
        assert_agrees(a, b, rel_l2=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ROUTES)
def test_nothing_to_attend_to(name: str, route: str) -> None:
    given, backend = batch("mixed_small", format_of(name)), served_backend(name)
    for changes in (
        {"indices": given.indices[:, :0]},
        {"kv_cache": given.kv_cache[:0]},
        {"q": given.q[:0], "indices": given.indices[:0]},
    ):
        got = replace(given, **changes).run(backend, route)
        assert got.out.eq(0).all() and got.lse.eq(-math.inf).all()
        assert len(got.out) == len(got.lse) == len(changes.get("q", given.q))


CASES = (
    "plain", "none-alternating", "none-nan-in-slot-0", "row-empty-nan", "slots-outside",
    "slots-repeated", "counts-nan-behind", "gaps-between-pages", "sink-extreme", "scores-large",
    "out-and-lse-given", "bits-permuted",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_without_its_rounding_it_passes_the_conformance_cases(name: str) -> None:
    """So padding, splits, sink and LSE are right, and what is left is the profile's arithmetic."""
    profile = replace(PROFILES[name], arithmetic=Arithmetic())
    serves = Limits(
        page_sizes=profile.page_sizes,
        cache_formats=profile.cache_formats,
        q_dtypes=("bfloat16",),
        topk_multiple=profile.topk_multiple,
    )
    adapter = Adapter(backend=ServedBackend(profile, pad_value=math.nan), limits=serves)
    end = "-fp8" if name in FP8 else ""
    for case in CASES:
        find_case(f"decode/{case}{end}").check(adapter)
    find_case(f"extend/counts-and-none{end}").check(adapter)


# --- errors as data


def test_the_error_of_each_rounding() -> None:
    given = batch("large_decode", "fp8", data="randn")
    arguments = (given.q, given.kv_cache, given.indices)
    steps = {
        name: {
            s.rounding: s.out.rel_l2
            for s in arithmetic_error(PROFILES[name], *arguments, softmax_scale=SCALE)
        }
        for name in FP8
    }
    assert list(steps["b12x"]) == [
        "float32 sums", "queries: e4m3", "weights: e4m3+residual", "partials: bfloat16", "output",
    ]  # fmt: skip
    assert list(steps["flashmla-sm100"]) == [
        "float32 sums", "scale_reader: truncated", "rows: bfloat16", "weights: q dtype", "output",
    ]  # fmt: skip
    assert all(found["float32 sums"] < 1e-6 for found in steps.values())
    assert 1e-2 < steps["b12x"]["queries: e4m3"] < 4e-2
    assert 1e-3 < steps["flashmla-sm90"]["rows: bfloat16"] < 4e-3
    assert steps["flashmla-sm100"]["scale_reader: truncated"] > 0.1
    # What the second pass of the weights is for.
    one, two = (
        replace(PROFILES["b12x"], arithmetic=Arithmetic(weights=weights))
        for weights in ("e4m3", "e4m3+residual")
    )
    coarse, fine = (
        arithmetic_error(p, *arguments, softmax_scale=SCALE)[1].out.rel_l2 for p in (one, two)
    )
    assert 1e-2 < coarse < 5e-2 and coarse > 10 * fine
    line = str(arithmetic_error(PROFILES["flashmla-sm90"], *arguments, softmax_scale=SCALE)[1])
    assert line.startswith("rows: bfloat16") and "out " in line and "lse " in line


def test_profiles_are_data_and_name_their_sources() -> None:
    for name, profile in PROFILES.items():
        assert profile.name == name and profile.sources and profile.stands_for
        assert all("/" in source for source in profile.sources)
        assert (profile.scale_rule is None) == ("fp8" not in profile.cache_formats)
        with pytest.raises(dataclasses.FrozenInstanceError):
            profile.lse_base = "2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_reader": "floor"}, "scale_reader must be one of stored, truncated"),
        ({"weights": "fp8"}, "weights must be one of float32, q dtype, e4m3, e4m3.residual"),
        ({"rows": "bfloat16", "weights": "e4m3"}, "rows must be 'float32', got 'bfloat16'"),
        ({"queries": "e5m2"}, "queries must be one of"),
        ({"partials": "float16"}, "partials must be one of"),
    ],
)
def test_an_arithmetic_that_no_kernel_has(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Arithmetic(**changes)


def test_a_tolerance_says_what_is_outside() -> None:
    either = PeerTolerance("x", 0.1, 0.1, either=True, lse_abs=0.5)
    both = replace(either, either=False, similarity=0.999)
    wanted = AttentionResult(torch.tensor([[1.0, 100.0]]), torch.tensor([-math.inf]))
    near = AttentionResult(torch.tensor([[1.15, 100.0]]), torch.tensor([-math.inf]))
    assert either.violations(wanted, wanted) == both.violations(near, wanted) == ()
    assert "out: 1 of 2 numbers outside" in either.violations(near, wanted)[0]
    half = AttentionResult(wanted.out / 2, torch.tensor([0.0]))
    found = both.violations(half, wanted)
    assert len(found) == 3 and "similarity 0.8" in found[2] and "inf at 1 positions" in found[1]

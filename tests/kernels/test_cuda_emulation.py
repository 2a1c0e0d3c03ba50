"""The CUDA kernels emulated on the CPU: the conformance cases, and faults that must show."""

import re

import pytest
import torch

from mla_kernels.cuda_kernels import attention, launch
from mla_kernels.cuda_kernels.arguments import Call
from mla_kernels.cuda_kernels.backend import CupyBackend
from mla_kernels.cuda_kernels.cache_write import write_fp8_rows
from mla_kernels.cuda_kernels.emulation import host
from mla_ref.attention import sparse_extend
from mla_ref.backends import AttnSpec
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.cache import write_fp8_rows as twin_write
from mla_ref.numerics.float8 import SCALE_RULES
from mla_ref.testing import cases, find_case
from mla_ref.testing.adapter import as_adapter

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(host.emulation_gap() is not None, reason=str(host.emulation_gap())),
]

CPU = torch.device("cpu")
SCALE = 576**-0.5
# Cases that take longer than a second or so lane by lane: long lists, many rows and heads, and a
# cache of several gigabytes.
LONG = ("topk-1000", "topk-1024", "topk-2048", "topk-512", "wide-", "rows-33", "far", "heads-64",
        "heads-128", "heads-40")  # fmt: skip


def marked(kind):
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if long(str(case)) else [])
        for case in cases(kind)
    ]


def long(name):
    return any(part in name for part in LONG)


@pytest.mark.parametrize("case", marked("decode"))
def test_conformance_of_decode(case):
    case.check(as_adapter(CupyBackend()), device="cpu")


# Few rows of few heads are not planned for it. One case of four: all of them take minutes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in cases("decode") if "fp8" in str(case) and not long(str(case))][::4],
    ids=str,
)
def test_conformance_of_the_kernel_for_64_heads(monkeypatch, case):
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: "wide64")
    case.check(as_adapter(CupyBackend()), device="cpu")


# It is there to be read, so no plan chooses it. One case of three.
@pytest.mark.parametrize(
    "case",
    [case for case in cases("decode") if "fp8" in str(case) and not long(str(case))][::3],
    ids=str,
)
def test_conformance_of_the_readable_kernel_with_tensor_cores(monkeypatch, case):
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: "mma")
    case.check(as_adapter(CupyBackend()), device="cpu")


@pytest.mark.parametrize("topk", range(16, 128, 16))
def test_the_kernel_for_64_heads_takes_any_number_of_tiles(monkeypatch, topk):
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: "wide64")
    q, cache, _ = problem(64)
    generator = torch.Generator().manual_seed(topk)
    indices = torch.randint(1, 6 * 16, (2, topk), generator=generator, dtype=torch.int32)
    plan = CupyBackend().plan(
        AttnSpec(64, topk=topk, page_size=16), max_rows=2, max_requests=2, device=CPU
    )
    found = plan.extend(q, cache, indices, softmax_scale=SCALE)
    wanted = sparse_extend(q.double(), cache, indices, None, softmax_scale=SCALE, kv_lora_rank=512)
    assert (found.out.double() - wanted.out).norm() / wanted.out.norm() < 4e-3


# A few of the cases; a name that is there no longer is an error.
EXTEND = ("plain", "plain-fp8", "row-empty-fp8", "row-empty-sink-fp8", "sink-fp8")


@pytest.mark.parametrize(
    "case",
    [*(find_case(f"extend/{name}") for name in EXTEND), *cases("merge"), *cases("cache_write")],
    ids=str,
)
def test_conformance(case):
    case.check(as_adapter(CupyBackend()), device="cpu")


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_row_with_infinity_or_nan_is_written_as_the_twin_writes_it(rule, value):
    """Under a finite scale the group's other numbers would be cut at 448 of it, unseen."""
    rows = torch.randn(3, 576, generator=torch.Generator().manual_seed(5))
    rows[0, 5], rows[1, 200], rows[2, 383] = value, -value, value
    made, wanted = torch.zeros(2, 1, 4, 656, dtype=torch.uint8)
    write_fp8_rows(made, rows, torch.arange(3), scale_rule=rule)
    twin_write(wanted, rows, torch.arange(3), scale_rule=rule)
    found, numbers = unpack_fp8_rows(made[0, :3]), unpack_fp8_rows(wanted[0, :3])
    assert found.isnan().sum() == 3 * 128
    # Which of its two signs a NaN has is nobody's promise.
    assert torch.equal(found.nan_to_num(-999.0), numbers.nan_to_num(-999.0))
    scales, expected = (x[0, :3, 512:528].clone().view(torch.float32) for x in (made, wanted))
    assert torch.equal(scales.nan_to_num(-999.0), expected.nan_to_num(-999.0))
    assert (scales.abs() == value).sum() == 3 if value == value else scales.isnan().sum() == 3


def problem(heads, *, late=False):
    """Two rows, one with -1 in front; slot 0 holds NaN and nobody lists it.

    `late`: the last entries name keys so long that what the softmax subtracts rises in the last
    tile, and the outputs so far are rescaled behind the last barrier of the loop.
    """
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, heads, 576, generator=generator).bfloat16()
    cache = pack_fp8_rows(torch.randn(6 * 16, 576, generator=generator)).view(6, 16, 656)
    cache.view(-1, 656)[0] = 0xFF
    indices = torch.randint(1, 6 * 16, (2, 70), generator=generator, dtype=torch.int32)
    indices[0, 3:9] = -1
    indices[1, :40] = -1
    if late:
        cache.view(-1, 656)[-3:, 512:528].view(torch.float32).mul_(40)
        indices[:, :-3].clamp_(max=6 * 16 - 4)
        indices[:, -3:] = 6 * 16 - torch.arange(1, 4)
    return q, cache, indices


def attend(heads, *, late=False):
    q, cache, indices = problem(heads, late=late)
    spec = AttnSpec(heads, topk=70, page_size=16)
    plan = CupyBackend().plan(spec, max_rows=2, max_requests=2, device=CPU)
    return plan.extend(q, cache, indices, softmax_scale=SCALE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("kind", "heads"), [("mma", 12), ("narrow", 8), ("wide", 32), ("wide64", 70)]
)
def test_no_result_depends_on_the_order_in_which_threads_run(monkeypatch, kind, heads, late):
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: kind)
    q, cache, indices = problem(heads, late=late)
    wanted = sparse_extend(q.double(), cache, indices, None, softmax_scale=SCALE, kv_lora_rank=512)
    found = []
    # Even seeds let copies land at the wait, odd ones at once; 0 and 1 let threads take turns, in 2
    # and 3 a warp runs as far as it can.
    for seed in range(4):
        monkeypatch.setattr(
            launch, "emulate", lambda *args, seed=seed: host.launch(*args, seed=seed)
        )
        found.append(attend(heads, late=late))
    for result in found:
        assert torch.equal(result.out, found[0].out) and torch.equal(result.lse, found[0].lse)
    error = (found[0].out.double() - wanted.out).norm() / wanted.out.norm()
    assert error < 4e-3
    assert ((found[0].lse - wanted.lse).abs() < 1e-5 + 1e-6 * wanted.lse.abs()).all()


# A weight times a scale must fit float16, and a scale may be any float32 number.
@pytest.mark.parametrize("size", [1e-30, 1e20])
@pytest.mark.parametrize("kind", attention.FAST)
def test_scales_of_any_size_keep_their_precision(monkeypatch, kind, size):
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: kind)
    q, cache, indices = problem(8)
    cache.view(-1, 656)[1:, 512:528].view(torch.float32).mul_(size)
    q[..., :512] /= size
    spec = AttnSpec(8, topk=70, page_size=16)
    plan = CupyBackend().plan(spec, max_rows=2, max_requests=2, device=CPU)
    found = plan.extend(q, cache, indices, softmax_scale=SCALE, out_dtype=torch.float32)
    wanted = sparse_extend(q.double(), cache, indices, None, softmax_scale=SCALE, kv_lora_rank=512)
    assert (found.out.double() / size - wanted.out / size).norm() / (
        wanted.out / size
    ).norm() < 1e-3
    assert (found.lse - wanted.lse).abs().max() < 1e-4


def shows(monkeypatch, kind, broken):
    """Whether a run of a kernel whose source is broken differs from the whole one's."""
    monkeypatch.setattr(attention, "fast_kind", lambda rows, heads: kind)
    heads = attention.BLOCK_HEADS[kind]
    problems = [{"late": False}, {"late": True}]
    wanted = [attend(heads, **given).out for given in problems]
    monkeypatch.setattr(host, "host_source", lambda file: broken)
    for given, right in zip(problems, wanted, strict=True):
        for seed in range(6):
            monkeypatch.setattr(
                launch, "emulate", lambda *args, seed=seed: host.launch(*args, seed=seed)
            )
            try:
                if not torch.equal(attend(heads, **given).out, right):
                    return True
            except RuntimeError as error:
                assert "cannot build the kernels" not in str(error), error
                return True
    return False


@pytest.mark.parametrize("kind", ["narrow", "wide", "wide64"])
def test_a_missing_wait_is_seen(monkeypatch, kind):
    source = host.host_source(attention.FAST[kind].file)
    assert "wait_for_phase(" in source
    assert shows(monkeypatch, kind, source.replace("wait_for_phase(", "if (false) wait_for_phase("))


# A vote keeps its argument and loses its barrier.
BARRIER = re.compile(r"(__syncthreads\(\);)|(__syncthreads_or)\(")


def barriers(kind):
    return list(BARRIER.finditer(host.host_source(attention.FAST[kind].file)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"), [(kind, n) for kind in attention.FAST for n in range(len(barriers(kind)))]
)
def test_each_barrier_of_a_block_is_missed_when_it_is_gone(monkeypatch, kind, number):
    source = host.host_source(attention.FAST[kind].file)
    found = barriers(kind)[number]
    left = ";" if found[1] else "("
    assert shows(monkeypatch, kind, source[: found.start()] + left + source[found.end() :])


def test_what_sm120_does_not_have_is_refused():
    with pytest.raises(RuntimeError, match="asks for 101377 bytes of shared memory"):
        host.launch("decode.cu", "decode", (1, 1), 128, 101_377, Call())

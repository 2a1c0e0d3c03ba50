"""The cache-write kernel: the twin's bytes, in the named slots and nowhere else."""

import dataclasses
import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
import triton
import triton.language as tl
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack, bits

from mla_kernels.triton_kernels import cache_write
from mla_kernels.triton_kernels.cache_write import write_fp8_rows
from mla_kernels.triton_kernels.rounding import from_e4m3, to_bfloat16_bits, to_e4m3
from mla_ref.cache import write_fp8_rows as twin
from mla_ref.numerics import float8
from mla_ref.testing import cases
from mla_ref.testing.storage import too_large

UNTOUCHED = 0xA5


# Six tokens: the interpreter takes 20 ms for each.
SMALL = [dataclasses.replace(case, tokens=min(case.tokens, 6)) for case in cases("cache_write")]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_conformance(case):
    case.check(write_fp8_rows)


def hostile_rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes from 1e-12 to 1e4, a row and a group of zeros, subnormal and huge numbers."""
    rows = torch.randn(9, 576) * torch.logspace(-12, 4, 9)[:, None]
    rows[3] = 0
    rows[4, 128:256] = -0.0
    rows[5, :128] = 1e-40
    rows[6, 256:384] = 6e4
    if dtype == torch.bfloat16:  # the interpreter reads a subnormal bfloat16 as 0
        rows[5, :128] = 1e-37
    return rows.to(dtype)


def written(write, rows, slots, **options):
    cache = torch.full((2, 17, 656), UNTOUCHED, dtype=torch.uint8)
    write(cache, rows, slots, **options)
    return cache


@pytest.mark.parametrize("rule", float8.SCALE_RULES)
def test_bytes_are_the_twins_under_each_rule(rule):
    rows, slots = hostile_rows(), torch.randperm(34)[:9]
    made = written(write_fp8_rows, rows, slots, scale_rule=rule)
    assert torch.equal(made, written(twin, rows, slots, scale_rule=rule))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_bytes_are_the_twins_from_each_dtype(dtype):
    rows, slots = hostile_rows(dtype), torch.randperm(34)[:9].to(torch.int32)
    assert torch.equal(written(write_fp8_rows, rows, slots), written(twin, rows, slots))


@triton.jit
def round_kernel(x, e4m3, bfloat16, back, N: tl.constexpr):
    i = tl.arange(0, N)
    number = tl.load(x + i)
    byte = to_e4m3(number)
    tl.store(e4m3 + i, byte)
    tl.store(bfloat16 + i, to_bfloat16_bits(number).to(tl.int32))
    tl.store(back + i, from_e4m3(byte))


def test_B047_rounding_is_torchs_at_every_border():
    """Each E4M3 number, the middle to the next, and their neighbours; beyond 448 saturates."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    near = torch.cat([every, middles, torch.tensor([464.0, 465.0, 1e3, 3e38, 1e-45])])
    up, down = torch.full_like(near, math.inf), torch.full_like(near, 0.0)
    near = torch.cat([near, near.nextafter(up), near.nextafter(down)])
    x = torch.zeros(2048)
    x[: 2 * len(near)] = torch.cat([near, -near])
    x[-2:] = torch.tensor([math.inf, -math.inf])
    e4m3, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)
    bfloat16 = torch.empty(2048, dtype=torch.int32)
    round_kernel[(1,)](x, e4m3, bfloat16, back, 2048)
    assert torch.equal(e4m3, float8.to_e4m3(x))
    assert torch.equal(bits(back), bits(float8.from_e4m3(e4m3)))
    assert torch.equal(bfloat16.to(torch.int16), x.bfloat16().view(torch.int16))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, in the interpreter
def test_nan_and_infinity_stay_visible():
    """A NaN makes the scale and the whole group NaN, in every rule; other groups do not see it."""
    rows = torch.randn(3, 576)
    rows[0, 5], rows[1, 200], rows[2, 575] = math.nan, math.inf, math.nan
    for rule in float8.SCALE_RULES:
        made = written(write_fp8_rows, rows, torch.arange(3), scale_rule=rule)[0, :3]
        scales = made[:, 512:528].contiguous().view(torch.float32)
        assert scales.isnan().tolist() == [[True, False, False, False], [False] * 4, [False] * 4]
        assert scales.isinf().tolist() == [[False] * 4, [False, True, False, False], [False] * 4]
        is_nan = (made[:, :512] & 0x7F) == 0x7F
        assert is_nan[0, :128].all() and is_nan[1, 200] and int(is_nan.sum()) == 129
        assert made[:, 528:].contiguous().view(torch.bfloat16).isnan().sum() == 1
        # The twin has them in the same places; which of its bits a NaN has is nobody's promise.
        theirs = written(twin, rows, torch.arange(3), scale_rule=rule)[0, :3]
        expected = theirs[:, 512:528].clone().view(torch.float32)
        assert torch.equal(scales.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        assert torch.equal(is_nan, (theirs[:, :512] & 0x7F) == 0x7F)
        assert torch.equal(made[:, :512][~is_nan], theirs[:, :512][~is_nan])


def test_B058_only_named_slots_are_written():
    """-1, the capacity, 2^40 + 17 (which 32 bits make 17) and below -1 write nothing."""
    rows = torch.randn(6, 576)
    slots = torch.tensor([-1, 33, 34, 2**40 + 17, -2, 0])
    guarded = torch.full((4, 17, 656), UNTOUCHED, dtype=torch.uint8)
    write_fp8_rows(guarded[1:3], rows, slots, validate=False)
    expected = torch.full_like(guarded, UNTOUCHED)
    twin(expected[1:3], rows[[1, 5]], torch.tensor([33, 0]))
    assert torch.equal(guarded, expected)


def test_B056_nothing_to_write_leaves_slot_0_alone():
    rows = torch.full((2, 576), math.nan)
    made = written(write_fp8_rows, rows, torch.tensor([-1, -1]), validate=False)
    assert (made == UNTOUCHED).all()


def test_any_strides_of_cache_and_rows():
    """A page stride that is no multiple of 4, gaps between rows, rows and slots with steps."""
    rows = torch.randn(5, 1200)[:, ::2][:, :576]
    slots = torch.tensor([3, 9, 30, 9, 12, 9, 20, 9, 8, 9])[::2]
    memory = torch.full((2, 17 * 660 + 3), UNTOUCHED, dtype=torch.uint8)
    cache = memory[:, 3:].unflatten(1, (17, 660))[:, :, :656]
    write_fp8_rows(cache, rows, slots)
    assert torch.equal(cache, written(twin, rows, slots))
    assert (memory == UNTOUCHED).sum() >= 2 * (3 + 17 * 4)
    assert (memory[:, :3] == UNTOUCHED).all()


def test_B059_a_slot_beyond_2_to_the_31_bytes():
    pages = 2**31 // (64 * 656) + 2
    if reason := too_large(pages * 64 * 656, torch.device("cpu")):
        pytest.skip(reason)
    cache = torch.empty(pages, 64, 656, dtype=torch.uint8)
    slot, rows = pages * 64 - 1, torch.randn(1, 576)
    write_fp8_rows(cache, rows, torch.tensor([slot]))
    expected = torch.empty(1, 1, 656, dtype=torch.uint8)
    twin(expected, rows, torch.tensor([0]))
    assert torch.equal(cache[-1, -1], expected[0, 0])


def test_nothing_is_read_back_to_the_host():
    cache = torch.zeros(2, 17, 656, dtype=torch.uint8)
    with NothingReadBack():
        write_fp8_rows(cache, torch.randn(2, 576), torch.tensor([-1, 4]), validate=False)


def test_no_tokens_and_no_pages():
    some, empty = (torch.zeros(pages, 4, 656, dtype=torch.uint8) for pages in (2, 0))
    write_fp8_rows(some, torch.zeros(0, 576), torch.zeros(0).long())
    write_fp8_rows(empty, torch.zeros(1, 576), torch.tensor([0]), validate=False)


GOOD = {
    "cache": torch.zeros(2, 4, 656, dtype=torch.uint8),
    "kv_rows": torch.zeros(2, 576),
    "slots": torch.tensor([0, 1]),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache": torch.zeros(2, 4, 656)},
        {"cache": torch.zeros(2, 4, 584, dtype=torch.uint8)},
        {"cache": torch.zeros(8, 656, dtype=torch.uint8)},
        {"kv_rows": torch.zeros(2, 575)},
        {"kv_rows": torch.zeros(2, 576, dtype=torch.int32)},
        {"kv_rows": torch.zeros(3, 576)},
        {"slots": torch.tensor([0.0, 1.0])},
        {"slots": torch.tensor([0, 8])},
        {"slots": torch.tensor([1, 1])},
        {"slots": [0, 1]},
        {"scale_rule": "fp16"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_what_the_twin_refuses(wrong):
    refuses_alike(write_fp8_rows, twin, GOOD | wrong)


def test_signatures_name_every_parameter():
    for made in cache_write.signatures():
        assert {*made.signature, *made.constexprs} == set(made.fn.arg_names), made.name

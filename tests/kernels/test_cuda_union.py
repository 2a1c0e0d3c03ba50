"""Attention over the union of a request's lists, emulated on the CPU, against the reference."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch
from tests.support import raw

from mla_kernels.cuda_kernels import launch
from mla_kernels.cuda_kernels.arguments import Call, UnionCall
from mla_kernels.cuda_kernels.backend import CupyBackend, UnionPlan
from mla_kernels.cuda_kernels.emulation import host
from mla_kernels.cuda_kernels.source import read_source
from mla_kernels.cuda_kernels.union import MOST_TOPK, UNION, RequestRows, plan_union_splits
from mla_ref.attention import sparse_extend
from mla_ref.backends import AttnSpec
from mla_ref.cache import pack_fp8_rows
from mla_ref.numerics import AttentionResult

CPU = torch.device("cpu")
SCALE = 576**-0.5
SLOTS, PAGE = 320, 16

emulated = [
    pytest.mark.thorough,
    pytest.mark.skipif(host.emulation_gap() is not None, reason=str(host.emulation_gap())),
]


def problem(rows, heads=8, topk=70, common=0.9, slots=SLOTS, seed=0):
    """Queries, a cache, and lists that groups of four rows have partly in common."""
    generator = torch.Generator().manual_seed(seed)
    cache = pack_fp8_rows(torch.randn(slots, 576, generator=generator)).view(-1, PAGE, 656)
    q = torch.randn(rows, heads, 576, generator=generator).bfloat16()
    shared = round(common * topk)
    lists = []
    for first in range(0, rows, 4):
        order = torch.randperm(slots, generator=generator)
        for row in range(min(4, rows - first)):
            own = order[shared + row * (topk - shared) :][: topk - shared]
            both = torch.cat([order[:shared], own])
            lists.append(both[torch.randperm(topk, generator=generator)])
    return q, cache, torch.stack(lists).int()


def by_union(q, cache, indices, counts=None, *, rows=4, starts=None, sink=None, splits=1):
    spec = AttnSpec(q.shape[1], topk=indices.shape[1], page_size=cache.shape[1])
    plan = CupyBackend().plan_union(
        spec, max_rows=len(q), max_requests=len(q), device=CPU, request_rows=rows, starts=starts
    )
    partials = AttentionResult(
        torch.full((splits, *q.shape[:2], 512), torch.nan),
        torch.full((splits, *q.shape[:2]), torch.nan),
    )
    plan = UnionPlan(spec, plan.max_rows, splits, partials, ("decode",), plan.requests)
    return plan.decode(
        q, cache, indices, counts, softmax_scale=SCALE, sink=sink, out_dtype=torch.float32
    )


def agree(result, q, cache, indices, counts=None, sink=None):
    wanted = sparse_extend(
        q.double(), cache, indices, counts, softmax_scale=SCALE, kv_lora_rank=512, sink=sink
    )
    assert torch.equal(result.out.isnan(), wanted.out.isnan())
    assert torch.equal(result.lse.isnan(), wanted.lse.isnan())
    assert torch.equal(result.lse.isinf(), wanted.lse.isinf())
    fine = ~wanted.out.isnan()
    assert (result.out.double() - wanted.out)[fine].norm() <= 1e-3 * wanted.out[fine].norm()
    finite = wanted.lse.isfinite()
    assert (result.lse - wanted.lse)[finite].abs().max() < 1e-5


class TestEmulated:
    pytestmark = emulated

    @pytest.mark.parametrize("common", [0.0, 0.9, 1.0])
    @pytest.mark.parametrize("splits", [1, 3])
    def test_any_overlap_agrees_with_the_reference(self, common, splits):
        given = problem(8, common=common)
        agree(by_union(*given, splits=splits), *given)

    @pytest.mark.parametrize(
        ("rows", "heads", "total"),
        [(1, 32, 2), (2, 16, 3), (3, 3, 5), (4, 12, 4), (5, 8, 6), (8, 8, 8)],
    )
    def test_rows_of_a_request_and_heads_are_padded(self, rows, heads, total):
        given = problem(total, heads, topk=37)
        agree(by_union(*given, rows=rows), *given)

    def test_requests_of_different_lengths_counts_and_a_sink(self):
        q, cache, indices = problem(7, topk=53)
        counts = torch.tensor([53, 0, 10, 52, 1, 33, 40], dtype=torch.int32)
        indices[2, 10:] = 2**31 - 1
        starts = torch.tensor([0, 1, 1, 5, 7], dtype=torch.int32)
        sink = torch.randn(8, generator=torch.Generator().manual_seed(1))
        found = by_union(q, cache, indices, counts, starts=starts, sink=sink, splits=2)
        agree(found, q, cache, indices, counts, sink)

    def test_holes_an_empty_row_and_slots_beyond_the_cache_take_no_weight(self):
        q, cache, indices = problem(4)
        cache.view(-1, 656)[0] = 0xFF
        indices[indices == 0] = -1
        indices[1, 3:9], indices[2], indices[3, :40] = -1, -1, SLOTS
        agree(by_union(q, cache, indices), q, cache, indices)

    @pytest.mark.parametrize("times", [1, 5, 40])
    def test_a_slot_listed_again_counts_again_in_that_row_alone(self, times):
        q, cache, indices = problem(4)
        indices[0, :times] = 17
        indices[1, 1:3] = 17
        agree(by_union(q, cache, indices, splits=2), q, cache, indices)

    @pytest.mark.parametrize(
        ("first", "values"),
        [
            (100, torch.tensor([0x7F], dtype=torch.uint8)),
            (512, torch.tensor([torch.nan]).view(torch.uint8)),
            (516, torch.tensor([torch.inf]).view(torch.uint8)),
            (530, torch.tensor([torch.nan]).bfloat16().view(torch.uint8)),
        ],
        ids=["latent", "scale", "infinite-scale", "rotary"],
    )
    def test_what_is_not_finite_stays_with_the_row_that_lists_it(self, first, values):
        q, cache, indices = problem(4)
        indices[indices == 9] = -1
        clean = by_union(q, cache, indices)
        cache.view(-1, 656)[9, first : first + len(values)] = values
        indices[1, 5] = 9
        found = by_union(q, cache, indices)
        assert not found.out[1].isfinite().any(dim=-1).all()
        for row in (0, 2, 3):
            error = (found.out[row] - clean.out[row]).norm() / clean.out[row].norm()
            assert error < 1e-3

    @pytest.mark.parametrize("size", [1e-30, 1e-6, 1e20])
    def test_scales_of_any_size_keep_their_precision(self, size):
        q, cache, indices = problem(4)
        scales = cache.view(-1, 656)[:, 512:528].view(torch.float32)
        scales *= size
        # Queries take the size back, so that scores stay as they are, but for the rotary part.
        agree(by_union(q / max(size, 1), cache, indices), q / max(size, 1), cache, indices)

    def test_more_slots_than_fit_a_table_and_lists_of_several_pieces(self):
        # 4,100 different slots for tables of 2,048, and pieces of 1,024 entries, two warps a row.
        given = problem(4, heads=1, topk=2050, common=0.7, slots=4640)
        agree(by_union(*given, splits=1), *given)

    def test_lists_that_do_not_lie_at_multiples_of_16_bytes(self):
        q, cache, indices = problem(4)
        wide = torch.zeros(4, 73, dtype=torch.int32)
        wide[:, 1:71] = indices
        agree(by_union(q, cache, wide[:, 1:71]), q, cache, indices)

    def test_the_order_of_lists_rows_and_threads_changes_no_bit(self, monkeypatch):
        q, cache, indices = problem(8, common=0.6)
        indices[1, :4], indices[6, 7] = -1, indices[6, 8]
        generator = torch.Generator().manual_seed(5)
        rows = torch.tensor([6, 4, 7, 5, 2, 0, 3, 1])
        orders = torch.stack([torch.randperm(70, generator=generator) for _ in range(8)])
        found = []
        for seed in range(4):
            monkeypatch.setattr(
                launch, "emulate", lambda *args, seed=seed: host.launch(*args, seed=seed)
            )
            found.append(by_union(q, cache, indices, splits=2))
        other = by_union(q[rows], cache, indices[rows].gather(1, orders), splits=2)
        for result in found:
            assert torch.equal(result.out, found[0].out) and torch.equal(result.lse, found[0].lse)
        assert torch.equal(other.out, found[0].out[rows])
        assert torch.equal(other.lse, found[0].lse[rows])

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (
                "wait_for_phase(shared_address(&shared.arrived",
                "wait_for_none(shared_address(&shared.arrived",
            ),
            ("      __syncthreads();\n      weigh", "      weigh"),
            ("  __syncthreads();  // the output lies over rows", "//"),
        ],
        ids=["no-wait", "no-barrier-before-the-softmax", "no-barrier-at-the-end"],
    )
    def test_a_missing_wait_and_a_missing_barrier_are_seen(self, monkeypatch, old, new):
        source = host.host_source("decode_union.cu")
        assert old in source
        broken = source.replace(old, new) + "\n"
        broken = broken.replace("struct Place {", "void wait_for_none(u32, u32) {}\nstruct Place {")
        monkeypatch.setattr(host, "host_source", lambda file: broken)
        given = problem(4)
        wrong = 0
        for seed in range(4):
            monkeypatch.setattr(
                launch, "emulate", lambda *args, seed=seed: host.launch(*args, seed=seed)
            )
            try:
                agree(by_union(*given), *given)
            except (AssertionError, RuntimeError) as error:
                assert "cannot build the kernels" not in str(error), error
                wrong += 1
        assert wrong

    def test_a_query_of_another_dtype_is_computed_row_by_row(self):
        q, cache, indices = problem(4, topk=20)
        spec = AttnSpec(8, topk=20, page_size=PAGE)
        plan = CupyBackend().plan_union(
            spec, max_rows=4, max_requests=1, device=CPU, request_rows=4
        )
        narrow = torch.zeros(4, 8, 577).bfloat16()[..., 1:]
        narrow.copy_(q)
        found = plan.decode(narrow, cache, indices, softmax_scale=SCALE, out_dtype=torch.float32)
        agree(found, q, cache, indices)


@pytest.mark.parametrize(
    ("requests", "parts", "splits"), [(1, 1, 48), (4, 1, 33), (16, 1, 8), (64, 1, 2), (300, 1, 1)]
)
def test_there_are_as_many_ranges_as_fill_the_gpu_once(requests, parts, splits):
    assert plan_union_splits(requests, parts, 2048, multiprocessors=132) == splits


def test_a_block_has_32_columns_however_many_rows_a_request_has():
    found = [(RequestRows(rows).row_shift, RequestRows(rows).parts(16)) for rows in range(1, 9)]
    assert found == [(0, 1), (1, 1), (2, 2), (2, 2), (2, 4), (2, 4), (2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("rows", "starts", "error", "words"),
    [
        (0, None, ValueError, "request_rows"),
        (9, None, ValueError, "request_rows must be 1 to 8, got 9"),
        (4, torch.tensor([0, 4]), TypeError, "starts must be contiguous int32"),
        (4, torch.zeros(0, dtype=torch.int32), ValueError, "starts must begin with the first"),
    ],
)
def test_requests_that_the_kernel_cannot_take_are_refused(rows, starts, error, words):
    with pytest.raises(error, match=words):
        raw(RequestRows)(rows, starts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_format": "bf16"}, "for FP8 rows and bfloat16 queries"),
        ({"q_dtype": torch.float32}, "for FP8 rows and bfloat16 queries"),
        ({"topk": MOST_TOPK + 1}, "for topk up to 32768"),
        ({"kv_lora_rank": 256}, "rows of 512"),
    ],
)
def test_a_spec_that_the_kernel_does_not_serve_is_refused(change, words, monkeypatch):
    monkeypatch.setattr("mla_kernels.cuda_kernels.backend.emulation_gap", lambda: None)
    with pytest.raises(ValueError, match=words):
        CupyBackend().plan_union(
            AttnSpec(**({"num_heads": 8} | change)),
            max_rows=4,
            max_requests=1,
            device=CPU,
            request_rows=4,
        )


def test_starts_on_another_device_are_refused(monkeypatch):
    monkeypatch.setattr(CupyBackend, "_require", lambda *args: None)
    more = {"max_rows": 4, "max_requests": 1, "device": CPU, "request_rows": 4}
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="one device"):
        CupyBackend().plan_union(AttnSpec(8), **more, starts=starts)


def test_the_struct_that_python_fills_is_the_struct_that_the_kernel_reads():
    body = read_source(UNION.file).split("struct UnionCall {")[1].split("};")[0]
    body = re.sub(r"//.*", "", body)
    kinds = {"Call": Call, "const int*": ctypes.c_void_p, "int": ctypes.c_int, "u32": ctypes.c_uint}
    found = [
        (name.strip(), kinds[kind])
        for kind, names in re.findall(r"(Call|const int\*|int|u32) ([\w, ]+);", body)
        for name in names.split(",")
    ]
    assert found == list(UnionCall._fields_)


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_sm12x_where_it_spills_is_not_offered_the_union(monkeypatch, capability):
    gpu = SimpleNamespace(capability=capability, num_sms=188)
    monkeypatch.setattr("mla_kernels.cuda_kernels.backend.gpu_of", lambda device: gpu)
    monkeypatch.setattr(CupyBackend, "_require", lambda *args: None)
    more = {"max_rows": 4, "max_requests": 1, "device": torch.device("cuda"), "request_rows": 4}
    with pytest.raises(ValueError, match="the union kernel spills on sm_12"):
        CupyBackend().plan_union(AttnSpec(8), **more)

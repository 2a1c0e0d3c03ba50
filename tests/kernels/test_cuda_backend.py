"""What the backend "cupy" says and refuses on a machine without a GPU, and how work is cut."""

import ctypes

import pytest
import torch
from tests.support import raw

from mla_kernels.cuda_kernels import attention, launch
from mla_kernels.cuda_kernels.arguments import Call
from mla_kernels.cuda_kernels.attention import is_fast, plan_splits, require_readable
from mla_kernels.cuda_kernels.backend import CupyBackend
from mla_kernels.cuda_kernels.cache_write import write_fp8_rows
from mla_kernels.cuda_kernels.merge import merge_many
from mla_ref.backends import AttnSpec, find_backend
from mla_ref.bench.roofline_receipts import BUILT

CPU = torch.device("cpu")
CACHE = torch.zeros(2, 64, 656, dtype=torch.uint8)
INDICES = torch.zeros(3, 16, dtype=torch.int32)
BEYOND_64_GIB = torch.empty(2**36 // (64 * 656) + 1, 64, 656, dtype=torch.uint8, device="meta")


def test_the_backend_is_found_by_its_name_without_cupy():
    assert find_backend("cupy") == CupyBackend()
    assert set(CupyBackend().parts) == {"merge", "cache_write"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank 256 and qk_rope_head_dim 64"),
        ({"qk_rope_head_dim": 0}, "kv_lora_rank 512 and qk_rope_head_dim 0"),
        ({"q_dtype": torch.float64}, "bfloat16, float16 or float32, got torch.float64"),
    ],
)
def test_the_reason_why_a_spec_is_not_served(fields, reason):
    spec = AttnSpec(num_heads=8, **fields)
    assert reason in CupyBackend().supports(spec, CPU)
    with pytest.raises(ValueError, match="the cupy backend does not serve this spec"):
        CupyBackend().plan(spec, max_rows=1, max_requests=1, device=CPU)


def test_on_a_cpu_the_kernels_are_emulated_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = CupyBackend().supports(AttnSpec(num_heads=8), CPU)
    assert "needs a C++20 compiler" in reason and "apt-get install g++" in reason
    assert "not on meta" in CupyBackend().supports(AttnSpec(num_heads=8), torch.device("meta"))


def test_without_cupy_the_reason_names_it(monkeypatch):
    missing = ModuleNotFoundError("No module named 'cupy'", name="cupy")
    monkeypatch.setattr(
        "mla_kernels.cuda_kernels.backend.guarded_import", lambda name: (None, missing)
    )
    reason = CupyBackend().supports(AttnSpec(num_heads=8), torch.device("cuda"))
    assert reason == (
        "CuPy is needed to compile the kernels and does not import: No module named 'cupy'"
    )


@pytest.mark.parametrize(
    ("rows", "heads", "splits"),
    [
        (4, 8, 16),
        (16, 8, 8),
        (64, 8, 2),
        (256, 8, 1),
        (4, 64, 16),
        (16, 64, 8),
        (64, 64, 2),
        (4, 128, 8),
        (16, 128, 4),
        (64, 128, 1),
    ],
)
def test_the_splits_that_were_fastest_on_an_h200_are_planned(rows, heads, splits):
    assert plan_splits(rows, heads, 2048, multiprocessors=132) == splits


def test_B072_a_split_is_never_narrower_than_a_block_can_fill():
    assert plan_splits(1, 8, topk=64, multiprocessors=132) == 1
    assert plan_splits(1, 8, topk=256, multiprocessors=132) == 2


def test_queries_that_the_tensor_core_kernels_cannot_load_go_to_the_simple_one():
    q = torch.zeros(3, 8, 640, dtype=torch.bfloat16)[..., :576]
    assert is_fast(q, CACHE)
    assert not is_fast(q.float(), CACHE)
    assert not is_fast(q, torch.zeros(2, 64, 576, dtype=torch.bfloat16))
    assert not is_fast(torch.zeros(3, 8, 577, dtype=torch.bfloat16)[..., 1:], CACHE)
    assert not is_fast(torch.zeros(576, 8, 3, dtype=torch.bfloat16).permute(2, 1, 0), CACHE)


@pytest.mark.parametrize(
    ("rows", "heads", "kind"),
    [
        (256, 8, "narrow"),
        (256, 24, "narrow"),
        (256, 25, "wide"),
        (256, 32, "wide"),
        (256, 33, "wide64"),
        (4, 64, "wide"),
        (16, 64, "wide64"),
        (4, 128, "wide"),
        (8, 128, "wide64"),
    ],
)
def test_heads_and_rows_of_a_plan_choose_the_kernel(rows, heads, kind):
    assert attention.fast_kind(rows, heads) == kind


@pytest.mark.parametrize(
    ("cache", "indices", "error", "words"),
    [
        (CACHE.double(), INDICES, ValueError, "kv_cache must hold bytes"),
        (CACHE, INDICES.long(), TypeError, "indices must be int32"),
        (CACHE, INDICES.T, ValueError, "indices must have lists without gaps"),
        (torch.zeros(2, 64, 657, dtype=torch.uint8)[..., 1:], INDICES, ValueError, "16 bytes"),
        (torch.zeros(2, 656, 64, dtype=torch.uint8).mT, INDICES, ValueError, "rows without gaps"),
        (BEYOND_64_GIB, INDICES, ValueError, "kv_cache must end within 68719476736 bytes"),
    ],
)
def test_B088_a_tensor_that_a_kernel_would_misread_is_refused(cache, indices, error, words):
    with pytest.raises(error, match=words):
        require_readable(cache, indices, None, None)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_rows": torch.zeros(2, 500)}, ValueError, "kv_rows must be"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "one a row of kv_rows"),
        ({"slots": torch.zeros(2, dtype=torch.int16)}, TypeError, "int32 or int64"),
        ({"slots": torch.tensor([0, 128])}, ValueError, "slots holds 128"),
        ({"slots": torch.tensor([5, 5])}, ValueError, "must not list a slot twice"),
        ({"cache": CACHE[..., :576]}, ValueError, "bytes of a row"),
        ({"scale_rule": "fp64"}, ValueError, "scale_rule"),
    ],
)
def test_the_writer_refuses_what_it_cannot_write(change, error, words):
    given = {"cache": CACHE, "kv_rows": torch.zeros(2, 576), "slots": torch.tensor([0, 1])}
    with pytest.raises(error, match=words):
        raw(write_fp8_rows)(**(given | change))


def test_parts_are_merged_from_any_address_and_none_is_an_empty_result(monkeypatch):
    def at_16_bytes(parts, result, sink, kernel):
        assert parts.out.data_ptr() % 16 == 0 and parts.out.is_contiguous()
        result.out.copy_(parts.out[0])
        result.lse.copy_(parts.lse[0])

    monkeypatch.setattr("mla_kernels.cuda_kernels.merge.launch_merge", at_16_bytes)
    outs, lses = torch.zeros(1 + 2 * 3 * 512)[1:].view(2, 3, 512), torch.ones(2, 3)
    assert outs.data_ptr() % 16
    assert (merge_many(outs, lses).lse == 1).all()
    none = merge_many(outs[:0], lses[:0])
    assert none.out.shape == (3, 512) and (none.out == 0).all() and (none.lse == -torch.inf).all()


def test_the_roofline_model_s_design_is_how_the_kernels_are_cut():
    """At many rows: there the model takes the share of the rate, and its one number, from."""
    multiprocessors = 132
    for heads in range(1, 129):
        block, most = next((b, s) for upto, b, s in BUILT["cupy"] if heads <= upto)
        assert block == attention.BLOCK_HEADS[attention.fast_kind(256, heads)]
        assert plan_splits(1, 1, 2**16, multiprocessors) == most


def test_an_empty_grid_starts_nothing():
    launch.Kernel("decode.cu", "decode", threads=128).launch(CPU, (0, 1), Call())


def test_a_launch_structure_has_the_driver_s_layout():
    assert ctypes.sizeof(launch._Attribute) == 72
    assert launch._Config.stream.offset == 32
    assert ctypes.sizeof(launch._Config) == 56

"""Adapters of other libraries, on fakes of their public APIs: what they are called with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import (
    CPU,
    FakeOperators,
    importer,
    on_sm90,
    on_sm120,
    right_result,
    small_workload,
)
from torch import Tensor

from mla_ref.bench.kernel_check import KernelCheck
from mla_ref.bench.kernel_parts import measure_parts
from mla_ref.bench.kernel_timer import HostTimer
from mla_ref.bench.kernel_workload import SOFTMAX_SCALE
from mla_ref.bench.peers import B12x, FlashInferSM120, FlashMLA, TorchSDPA, Way
from mla_ref.bench.peers.parts import DeepGemmScores, VllmMerge
from mla_ref.bench.timing import NoTime, Timing
from mla_ref.indexer import index_scores
from mla_ref.numerics import merge_many
from mla_ref.testing import as_adapter, load_target


def assert_right(way: Way, work: Any, *, lse: bool) -> None:
    verdicts = KernelCheck(work).by_precision_rule(read=way.read)(way.run())
    assert all(v.passed for v in verdicts), "; ".join(map(str, verdicts))
    assert len(verdicts) == 1 + lse


# ---- FlashMLA


def test_flash_mla_is_called_both_ways_with_padded_heads(tmp_path: Any) -> None:
    work, library = small_workload(rows=8), tmp_path / "_flashmla_C.abi3.so"
    library.touch()
    operators = FakeOperators(work)
    peer = FlashMLA(library, load=lambda path: operators, capability=on_sm90)
    assert peer.missing(work) is None
    by_row, by_request = peer.ways(work)
    assert (by_row.how, by_request.how) == ("b = 8, s_q = 1", "b = 2, s_q = 4")
    for way, shape in ((by_row, (8, 1, 64, 576)), (by_request, (2, 4, 64, 576))):
        assert_right(way, work, lse=True)
        q, cache, indices = operators.arguments[-1][:3]
        assert q.shape == shape and bool((q[:, :, 2:] == 0).all())
        assert cache.shape == (8, 64, 1, 656) and indices.shape == (*shape[:2], 64)


def test_the_operator_gets_its_13_arguments_and_its_metadata_from_the_second_call_on(
    tmp_path: Any,
) -> None:
    work, library = small_workload(), tmp_path / "_flashmla_C.abi3.so"
    library.touch()
    operators = FakeOperators(work)
    way = FlashMLA(library, load=lambda path: operators, capability=on_sm90).ways(work)[0]
    way.run()
    way.run()
    first, second = operators.arguments
    assert len(first) == len(second) == 13
    assert first[3:] == (None,) * 7 + (512, SOFTMAX_SCALE, None)
    assert [int(x) for x in second[5:7]] == [1, 2]


def test_the_package_is_called_by_its_own_function() -> None:
    work, seen = small_workload(), []

    def with_kvcache(q: Tensor, cache: Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((rest, named))
        given = FakeOperators(work).sparse_decode_fwd(q, cache, named["indices"])
        return given[:2]

    package = SimpleNamespace(
        flash_mla_with_kvcache=with_kvcache, get_mla_metadata=lambda: ("metadata", None)
    )
    peer = FlashMLA(None, importer(flash_mla=package), capability=on_sm90)
    assert peer.missing(work) is None
    assert_right(peer.ways(work)[0], work, lse=True)
    rest, named = seen[0]
    assert rest == (None, None, 512, "metadata")
    assert (named["softmax_scale"], named["is_fp8_kvcache"]) == (SOFTMAX_SCALE, True)


def test_an_odd_number_of_rows_is_one_request_a_row() -> None:
    work = small_workload("disjoint", rows=3)
    package = SimpleNamespace(get_mla_metadata=lambda: (None, None))
    peer = FlashMLA(None, importer(flash_mla=package), capability=on_sm90)
    assert [way.how for way in peer.ways(work)] == ["b = 3, s_q = 1"]


@pytest.mark.parametrize(
    "peer, words",
    [
        (FlashMLA(capability=on_sm120), "is built for sm_90, sm_100, sm_103, this is sm_120"),
        (FlashMLA(None, importer(), capability=on_sm90), "flash_mla is not installed; vllm"),
        (B12x(importer(), on_sm90), "is built for sm_120, sm_121, this is sm_90"),
        (B12x(importer(), on_sm120), "b12x.attention.sparse_mla is not installed"),
        (FlashInferSM120(importer(), on_sm120), "flashinfer.mla is not installed"),
        (FlashInferSM120(importer()), "needs a GPU"),
        (TorchSDPA(10), "its gathered rows take 0.0 GB, more than"),
    ],
)
def test_what_is_missing_is_said_in_a_line(peer: Any, words: str) -> None:
    reason = peer.missing(small_workload())
    assert words in reason and "\n" not in reason


def test_a_library_that_is_not_there_is_named_without_its_folder(tmp_path: Any) -> None:
    peer = FlashMLA(tmp_path / "no.so", capability=on_sm90)
    assert peer.missing(small_workload()) == "there is no file no.so"


# ---- the others


def test_b12x_is_planned_bound_and_run() -> None:
    work, seen = small_workload(heads=3), {}
    spec = SimpleNamespace(shape=(16,), dtype=torch.uint8)

    def bind(plan: Any, **named: Any) -> Any:
        seen.update(named)
        return plan, named

    def run(binding: Any) -> Tensor:
        out = right_result(work).out
        return torch.nn.functional.pad(out, (0, 0, 0, binding[1]["q"].shape[1] - 3))

    module = SimpleNamespace(
        Caps=lambda **caps: seen.update(caps=caps) or caps,
        plan=lambda caps: SimpleNamespace(scratch_specs=lambda: (spec,)),
        bind=bind,
        run=run,
    )
    peer = B12x(importer(b12x__attention__sparse_mla=module), on_sm120)
    assert peer.missing(work) is None
    (way,) = peer.ways(work)
    assert_right(way, work, lse=False)
    assert seen["q"].shape == (4, 8, 576)
    assert seen["selected_lengths"].tolist() == seen["cache_lengths"].tolist() == [64] * 4
    assert [t.shape for t in seen["scratch"]] == [(16,)]
    caps = seen["caps"]
    assert (caps["num_q_heads"], caps["max_q_rows"], caps["max_width"]) == (8, 4, 64)
    assert (caps["softmax_scale"], caps["kv_dtype"]) == (SOFTMAX_SCALE, torch.uint8)
    assert "never run here" in peer.note


def test_b12x_takes_lists_in_multiples_of_64() -> None:
    reason = B12x(importer(), on_sm120).missing(small_workload(topk=32))
    assert reason == "takes lists whose width is a multiple of 64"


def test_flashinfer_is_called_as_vllm_calls_it() -> None:
    work, seen = small_workload(), {}

    def decode(**named: Any) -> Tensor:
        seen.update(named)
        named["out"].copy_(right_result(work).out[:, None])
        return named["out"]

    module = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=decode)
    peer = FlashInferSM120(importer(flashinfer__mla=module), on_sm120)
    assert peer.missing(work) is None
    (way,) = peer.ways(work)
    assert_right(way, work, lse=False)
    assert seen["query"].shape == (4, 1, 2, 576) and seen["kv_cache"].shape == (8, 1, 64, 656)
    assert seen["block_tables"].shape == (4, 1, 64) and seen["seq_lens"] is None
    assert (seen["bmm1_scale"], seen["bmm2_scale"]) == (SOFTMAX_SCALE, 1.0)
    assert (seen["sparse_mla_top_k"], seen["kv_scale_format"]) == (64, "arbitrary_fp32")
    assert "never run here" in peer.note


def test_sdpa_is_right_on_gathered_rows() -> None:
    work = small_workload()
    (way,) = TorchSDPA().ways(work)
    verdicts = KernelCheck(work).by_precision_rule("bfloat16", way.read)(way.run())
    assert [v.passed for v in verdicts] == [True]


# ---- single parts


def test_parts_stand_beside_their_peers() -> None:
    def merge(
        out: Tensor, a: Tensor, la: Tensor, b: Tensor, lb: Tensor, output_lse: Tensor
    ) -> None:
        result = merge_many(torch.stack([a, b]), torch.stack([la.T, lb.T]))
        out.copy_(result.out)
        output_lse.copy_(result.lse.T)

    def logits(q: Tensor, kv: Any, weights: Tensor, *bounds: Tensor, clean_logits: bool) -> Tensor:
        assert q.dtype == kv[0].dtype == torch.float8_e4m3fn
        return index_scores(q.float(), kv[0].float() * kv[1][:, None], weights)

    vllm = importer(
        vllm__v1__attention__ops__merge_attn_states=SimpleNamespace(merge_attn_states=merge)
    )
    gemm = importer(deep_gemm=SimpleNamespace(fp8_mqa_logits=logits))
    lines = list(
        measure_parts(
            load_target("torch"),
            HostTimer(0, 1),
            CPU,
            rows=3,
            heads=2,
            keys=200,
            merge_peer=VllmMerge(vllm, on_sm90),
            scores_peer=DeepGemmScores(gemm, on_sm90),
        )
    )
    assert [line.name for line in lines] == [
        "torch",
        "vLLM merge",
        "torch",
        "DeepGEMM index scores",
    ]
    assert all(isinstance(line.outcome, Timing) for line in lines), "; ".join(map(str, lines))


def test_parts_without_peers_are_lines_with_reasons_and_a_wrong_part_gets_no_time() -> None:
    class Wrong:
        name, parts = "wrong", {"merge": lambda outs, lses, validate: (outs[0], lses[0])}

        def supports(self, spec: Any, device: Any) -> None:
            return None

        def plan(self, *args: Any, **kwargs: Any) -> None:
            return None

    found = measure_parts(
        as_adapter(Wrong()), HostTimer(0, 1), CPU, rows=3, heads=2, keys=100,
        merge_peer=VllmMerge(importer(), on_sm90), scores_peer=DeepGemmScores(importer()),
    )  # fmt: skip
    merge, vllm, scores, gemm = found
    assert isinstance(merge.outcome, NoTime) and merge.outcome.wrong and merge.name == "wrong"
    assert "is not installed" in str(vllm) and "needs a GPU" in str(gemm)
    assert isinstance(scores.outcome, Timing) and scores.name == "torch"


def test_a_deep_gemm_without_the_function_says_so() -> None:
    peer = DeepGemmScores(importer(deep_gemm=SimpleNamespace()), on_sm90)
    assert peer.missing(CPU) == "this deep_gemm has no fp8_mqa_logits"

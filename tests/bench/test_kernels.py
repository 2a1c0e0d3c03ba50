"""The table of kernels: a wrong one gets no time, ratios by hand, peers by fakes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.bench.kernel_fakes import (
    CEILINGS,
    CPU,
    FakeClock,
    FakeOperators,
    importer,
    on_sm90,
    right_result,
    small_workload,
)

from mla_ref.backends import TorchBackend
from mla_ref.backends.served.table import FLASHMLA_SM90
from mla_ref.bench import KernelPoint, KernelWorkload, NoTime, Timing, measure_kernels
from mla_ref.bench.gpu_timer import GpuTimer
from mla_ref.bench.kernel_check import KernelCheck
from mla_ref.bench.kernels import at_one_split
from mla_ref.bench.peers import B12x, FlashInferSM120, FlashMLA, TorchSDPA
from mla_ref.numerics import AttentionResult
from mla_ref.testing import Adapter, as_adapter


def measure(adapter: Adapter, work: KernelWorkload, peers: Any = (), *us: float) -> KernelPoint:
    timer = GpuTimer(FakeClock(*(u / 1e6 for u in us)), rounds=1, replays=1)
    (point,) = measure_kernels(adapter, iter([work]), timer, CEILINGS, peers)
    return point


def off_by(error: float, row: int) -> Any:
    """A decode that is wrong in one row."""

    def decode(q: Any, kv_cache: Any, indices: Any, *, softmax_scale: float) -> Any:
        work = replace(small_workload(), q=q, kv_cache=kv_cache, indices=indices)
        result = right_result(work)
        result.out[row] += error
        return result

    return decode


def test_own_kernels_and_a_peer_with_rates_and_ratios_by_hand() -> None:
    work = small_workload()
    peer = FlashMLA(None, importer(), capability=on_sm90)
    point = measure(as_adapter(TorchBackend(1)), work, [TorchSDPA(), peer], 10, 40, 30)
    decode, extend, sdpa, missing = point.lines
    assert [line.name for line in point.lines] == ["decode", "extend", "torch SDPA", "FlashMLA"]
    assert (decode.seconds, extend.seconds, sdpa.seconds) == (10e-6, 40e-6, 30e-6)
    assert (point.ratio(extend), point.ratio(sdpa)) == (pytest.approx(4), pytest.approx(3))
    assert isinstance(missing.outcome, NoTime) and "flash_mla is not installed" in str(
        missing.outcome
    )
    data = point.to_json()["lines"][0]
    assert data["gathered_bytes_s"] == pytest.approx(4 * 64 * 656 / 10e-6)
    assert data["flops_s"] == pytest.approx(1_114_112 / 10e-6)
    assert data["share_of_floor"] == pytest.approx(work.unique_bytes / 1e12 / 10e-6)
    json.dumps(point.to_json(), allow_nan=False)


class ByUnion(TorchBackend):
    """The torch backend with a way for the rows of a request, as the CUDA backend has."""

    def plan_union(
        self, spec: Any, *, max_rows: int, max_requests: int, device: Any, request_rows: int
    ) -> Any:
        assert (max_rows, max_requests, request_rows) == (4, 1, 4)
        return self.plan(spec, max_rows=max_rows, max_requests=max_requests, device=device)


def test_a_way_for_the_rows_of_a_request_is_timed_on_the_verifier_workload_alone() -> None:
    point = measure(as_adapter(ByUnion(1)), small_workload(), [], 10, 5, 40)
    assert [line.name for line in point.lines] == ["decode", "decode by union", "extend"]
    assert [line.seconds for line in point.lines] == [10e-6, 5e-6, 40e-6]
    point = measure(as_adapter(ByUnion(1)), small_workload("disjoint"), [], 10, 40)
    assert [line.name for line in point.lines] == ["decode", "extend"]


def test_a_union_that_is_not_offered_here_is_a_line_with_the_reason() -> None:
    class Refuses(TorchBackend):
        def plan_union(self, *args: Any, **more: Any) -> None:
            raise ValueError("the union kernel spills on sm_120")

    point = measure(as_adapter(Refuses()), small_workload())
    union = next(line for line in point.lines if line.name == "decode by union")
    assert isinstance(union.outcome, NoTime) and "spills on sm_120" in union.outcome.why
    assert all(line.seconds for line in point.lines if line is not union)


def test_a_backend_with_a_wrong_result_gets_no_time() -> None:
    point = measure(Adapter(decode=off_by(0.1, 3)), small_workload())
    (line,) = point.lines
    assert line.seconds is None and line.wrong
    assert "out[3, 0" in str(line.outcome) and point.ratio(line) is None


def test_an_output_of_nan_gets_no_time() -> None:
    point = measure(Adapter(decode=off_by(torch.nan, 0)), small_workload())
    assert point.lines[0].wrong and "NaN on one side only" in str(point.lines[0].outcome)


def test_only_a_sample_of_many_rows_is_judged_and_the_first_and_last_are_in_it() -> None:
    work = small_workload("disjoint", rows=9)
    check = KernelCheck(work, 4)
    assert check.rows.tolist() == [0, 3, 5, 8]
    result = right_result(work)
    right = check.by_precision_rule()
    assert all(v.passed for v in right(result))
    result.out[4] = torch.nan  # not in the sample
    assert all(v.passed for v in right(result))
    result.lse[8] += 0.01
    assert [v.passed for v in right(result)] == [True, False]


def test_entries_of_minus_one_name_nothing_in_the_check_too() -> None:
    work = small_workload()
    work.indices[1, ::2] = -1
    work.indices[2] = -1
    verdicts = KernelCheck(work).by_precision_rule()(right_result(work))
    assert all(v.passed for v in verdicts)


def test_the_sample_reads_the_rows_that_the_lists_name() -> None:
    work = small_workload()
    right = KernelCheck(work).by_precision_rule()
    other = replace(work, indices=work.indices.roll(1, dims=0))
    assert not all(v.passed for v in right(right_result(other)))


def test_decode_in_one_split_is_a_line_where_the_plan_has_more() -> None:
    backend = TorchBackend(16)
    point = measure(as_adapter(backend), small_workload(topk=256), (), 5, 20, 15)
    assert [(n.name, n.seconds) for n in point.lines] == [
        ("decode", 5e-6),
        ("decode in 1 split", 20e-6),
        ("extend", 15e-6),
    ]
    plan = backend.plan(small_workload().shape.spec, max_rows=4, max_requests=1, device=CPU)
    one = at_one_split(replace(plan, num_splits=1))
    assert one is None and at_one_split(object()) is None


def test_a_backend_that_does_not_serve_the_shape_says_why() -> None:
    class Refusing(TorchBackend):
        def supports(self, spec: Any, device: Any) -> str:
            return "too few heads"

    point = measure(as_adapter(Refusing()), small_workload())
    assert [str(getattr(line.outcome, "why", "")) for line in point.lines] == ["too few heads"] * 2


def test_an_lse_of_base_2_is_converted_before_it_is_judged() -> None:
    def decode(q: Any, kv_cache: Any, indices: Any, *, softmax_scale: float) -> Any:
        work = replace(small_workload(), q=q, kv_cache=kv_cache, indices=indices)
        out, lse = right_result(work)
        return AttentionResult(out, lse / 0.6931471805599453)

    assert isinstance(
        measure(Adapter(decode=decode, lse_base="2"), small_workload()).lines[0].outcome, Timing
    )
    assert measure(Adapter(decode=decode), small_workload()).lines[0].wrong


def test_of_a_peers_ways_the_fastest_counts_and_the_others_are_kept(tmp_path: Any) -> None:
    work, library = small_workload(), tmp_path / "_flashmla_C.abi3.so"
    library.touch()
    peer = FlashMLA(library, load=lambda path: FakeOperators(work), capability=on_sm90)
    adapter = Adapter(decode=off_by(0.0, 0))
    point = measure(adapter, work, [peer], 10, 25, 20)
    line = point.lines[1]
    assert (line.name, line.how, line.seconds) == ("FlashMLA", "b = 1, s_q = 4", 20e-6)
    assert dict(line.tried) == {"b = 4, s_q = 1": 25e-6, "b = 1, s_q = 4": 20e-6}
    assert point.ratio(line) == pytest.approx(2)


def test_a_wrong_peer_gets_no_time_and_is_judged_by_its_own_tolerance(tmp_path: Any) -> None:
    work, library = small_workload(), tmp_path / "_flashmla_C.abi3.so"
    library.touch()
    peer = FlashMLA(library, load=lambda path: FakeOperators(work, error=0.05), capability=on_sm90)
    line = measure(Adapter(decode=off_by(0.0, 0)), work, [peer]).lines[1]
    assert line.wrong and "similarity" in str(line.outcome)
    good = KernelCheck(work).by_tolerance(FLASHMLA_SM90.tolerance)(right_result(work))
    assert [v.passed for v in good] == [True, True]
    assert "FlashMLA, tests of sparse decode" in str(good[0])


def test_a_peer_whose_set_up_fails_is_a_line(tmp_path: Any) -> None:
    def broken(path: str) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    library = tmp_path / "_flashmla_C.abi3.so"
    library.touch()
    peer = FlashMLA(library, load=broken, capability=on_sm90)
    line = measure(Adapter(decode=off_by(0.0, 0)), small_workload(), [peer]).lines[1]
    assert not line.wrong
    assert "OSError: libcudart.so.13: cannot open shared object file" in str(line.outcome)


def test_on_a_cpu_no_peer_of_a_gpu_is_tried() -> None:
    peers = [FlashMLA(), B12x(), FlashInferSM120()]
    point = measure(Adapter(decode=off_by(0.0, 0)), small_workload(), peers)
    assert all("needs a GPU" in str(line.outcome) for line in point.lines[1:])

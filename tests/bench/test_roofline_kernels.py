"""The roofline model: its parts by hand, its errors against measured times, and who may be sure."""

import pytest
import torch
from tests.support import raw

from mla_ref.bench.kernel_workload import DISJOINT, KernelShape, make_workload, random_cache
from mla_ref.bench.roofline_devices import DEVICES, H200, RTX_5090, RTX_PRO_6000, Device, Fact
from mla_ref.bench.roofline_kernels import (
    PROTOTYPE,
    Design,
    expected_unique_rows,
    predict,
    verifier_estimate,
)
from mla_ref.bench.roofline_measured import MEASURED


def device(**changed):
    """One byte and one FLOP a nanosecond, so that parts are numbers that one can say."""
    facts = {
        "copy_bytes_s": 1e9,
        "mma_flops_s": 1e9,
        "launch_s": 3e-6,
        "launch_more_s": 0.5e-6,
        "chain_s": 7e-6,
    } | changed
    return Device("made up", True, 100, **{name: Fact(x, "made up") for name, x in facts.items()})


def design(**changed):
    fields = {"heads_per_block": 64, "most_splits": 16, "tensor_share": 0.5} | changed
    fields["tensor_share"] = Fact(fields["tensor_share"], "made up")
    return Design("made up", **fields)


def test_the_parts_of_one_row_by_hand():
    found = predict(KernelShape(1, 2, topk=10), device(), design(most_splits=1), slots=1000)
    assert found.gathered_bytes == 10 * 656
    assert found.gather_s == pytest.approx(6560e-9)
    assert found.flops == 2 * (576 + 512) * 2 * 10
    assert found.arithmetic_s == pytest.approx(2 * 43520e-9)  # half the rate
    assert found.partial_bytes == 0
    assert found.launches_s == 3e-6
    assert found.expected_s == pytest.approx(3e-6 + 7e-6 + 87040e-9)
    assert found.floor_s == pytest.approx(43520e-9)  # the whole rate


def test_partial_results_are_written_and_read_and_need_a_second_launch():
    found = predict(KernelShape(5, 8), device(), design())
    assert found.splits == 16
    # 512 numbers and an LSE, float32, once each way.
    assert found.partial_bytes == 2 * 16 * 5 * 8 * 513 * 4
    assert found.launches_s == pytest.approx(3.5e-6)


@pytest.mark.parametrize(
    "rows, heads, splits", [(4, 8, 16), (16, 8, 8), (64, 8, 2), (256, 8, 1), (16, 128, 4)]
)
def test_splits_fill_the_device_once(rows, heads, splits):
    assert PROTOTYPE.splits(KernelShape(rows, heads), 132) == splits


def test_more_heads_than_a_block_holds_gather_the_rows_again():
    few, many = (predict(KernelShape(4, heads), H200).gathered_bytes for heads in (64, 65))
    assert many == 2 * few


def test_a_bfloat16_row_has_1152_bytes():
    assert predict(KernelShape(1, 8, 1, "bf16"), H200).gathered_bytes == 1152


def test_rows_of_a_request_name_fewer_different_slots():
    shape = KernelShape(4, 8)
    # 2,048 * (0.9 + 4 * 0.1)
    assert expected_unique_rows(shape, overlap=0.9, rows_per_request=4) == pytest.approx(2662.4)
    assert expected_unique_rows(shape, overlap=1.0, rows_per_request=4) == pytest.approx(2048)


def test_unique_rows_on_average_are_those_of_drawn_lists():
    shape = KernelShape(64, 1, topk=32)
    drawn = make_workload(DISJOINT, shape, random_cache(1024, "fp8", torch.device("cpu")))
    assert expected_unique_rows(shape, slots=1024) == pytest.approx(drawn.unique_rows, rel=0.02)


def test_overlap_lowers_floor_and_best_case_but_not_what_is_expected():
    apart, shared = predict(KernelShape(256, 8), H200), verifier_estimate(KernelShape(256, 8), H200)
    assert shared.floor_s < apart.floor_s
    assert shared.best_s <= apart.best_s
    assert shared.expected_s == apart.expected_s


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: f"{m.rows}x{m.heads}-{m.overlap}")
def test_the_model_is_within_a_quarter_of_the_measured_time(measured):
    """Most shapes within a tenth; the worst are few rows of many heads, which it flatters."""
    assert abs(measured.error) < 0.25
    assert measured.estimate.floor_s * 1e6 < measured.microseconds


def test_one_shape_only_calibrates_and_it_is_the_one_that_the_design_names():
    (one,) = [m for m in MEASURED if m.calibrates]
    assert f"{one.rows} rows and {one.heads} heads" in PROTOTYPE.tensor_share.source
    # The share that this one time gives: FLOPs over what remains of it after launch and chain.
    rest = one.microseconds * 1e-6 - H200.launch_s.value - H200.chain_s.value
    share = KernelShape(one.rows, one.heads).flops / H200.mma_flops_s.value / rest
    assert PROTOTYPE.tensor_share.value == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("card", [RTX_5090, RTX_PRO_6000], ids=lambda card: card.name)
def test_what_no_card_was_measured_for_is_a_prediction(card):
    assert predict(KernelShape(4, 8), card).is_prediction
    assert not predict(KernelShape(4, 8), H200).is_prediction
    rates = (card.copy_bytes_s, card.mma_flops_s, card.launch_s, card.chain_s)
    assert not any(fact.source.startswith("measured") for fact in rates)


def test_every_fact_has_a_source():
    for card in DEVICES:
        facts = [value for value in vars(card).values() if isinstance(value, Fact)]
        assert len(facts) == 5
        assert all(fact.source for fact in facts)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: device(chain_s=0.0), "made up: chain_s must be finite and greater than 0"),
        (lambda: design(tensor_share=1.5), "tensor_share must be at most 1, got 1.5"),
        (lambda: design(most_splits=0), "most_splits must be at least 1, got 0"),
        (lambda: predict(KernelShape(4, 8), H200, overlap=1.5), "overlap must be from 0 to 1"),
        (
            lambda: predict(KernelShape(6, 8), H200, rows_per_request=4),
            "rows_per_request must divide 6 rows, got 4",
        ),
        (
            lambda: raw(predict)(KernelShape(4, 8), H200, slots=2047),
            "slots must hold the 2048 of one request, got 2047",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

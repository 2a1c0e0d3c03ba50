"""The model held against a receipt: one time of a kernel calibrates it, the others test it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mla_ref.bench import Receipt, read_receipt
from mla_ref.bench.kernel_workload import KernelShape
from mla_ref.bench.roofline_devices import H200, RTX_5090, device_named
from mla_ref.bench.roofline_kernels import predict
from mla_ref.bench.roofline_receipts import BUILT, design_of, hold

FOLDER = Path(__file__).parents[2] / "kernels" / "receipts" / "nvidia-h200"
RECEIPTS = [read_receipt(path) for path in sorted(FOLDER.glob("*.json"))]


@pytest.fixture(params=RECEIPTS, ids=lambda receipt: receipt.backend)
def receipt(request: pytest.FixtureRequest) -> Receipt:
    """Each in the repository."""
    found = request.param
    assert isinstance(found, Receipt)
    return found


def test_one_time_of_each_number_of_heads_calibrates_and_comes_out(receipt: Receipt) -> None:
    held = list(hold(receipt, H200))
    assert len(held) == sum(x.own and x.contender == "decode" for x in receipt.lines)
    shared = [h.estimate for h in held if h.line.workload == "verifier"]
    # Four rows with 90 % in common name 1.3 lists between them.
    assert shared and all(e.unique_bytes < 0.4 * e.gathered_bytes for e in shared)
    own = [h for h in held if h.calibrates]
    assert sorted(h.line.heads for h in own) == [8, 64, 128]
    assert all(h.line.workload == "disjoint" and abs(h.error) < 1e-3 for h in own)


def test_the_other_times_are_near(receipt: Receipt) -> None:
    """Within what the page says of the model."""
    errors = [h.error for h in hold(receipt, H200) if not h.calibrates]
    assert max(map(abs, errors)) < 0.35 and max(map(abs, errors)) > 0.01


def test_a_receipt_twice_as_slow_gives_half_the_share_or_less(receipt: Receipt) -> None:
    lines = tuple(
        replace(x, median_us=2 * x.median_us) if x.median_us else x for x in receipt.lines
    )
    slow = design_of(replace(receipt, lines=lines), 64, H200).tensor_share.value
    assert 0.4 < slow / design_of(receipt, 64, H200).tensor_share.value < 0.5


def test_designs_of_another_receipt_foretell_and_calibrate_nothing(receipt: Receipt) -> None:
    designs = {heads: design_of(receipt, heads, H200) for heads in (8, 64, 128)}
    there = [replace(x, median_us=x.median_us and 3 * x.median_us) for x in receipt.lines]
    held = list(hold(replace(receipt, lines=tuple(there)), RTX_5090, designs))
    assert held and not any(h.calibrates for h in held)
    assert all(h.estimate.is_prediction for h in held)
    first = next(h for h in held if h.line.heads == 8)
    shape = KernelShape(first.line.rows, 8)
    expected = predict(shape, RTX_5090, designs[8]).expected_s
    assert first.error == pytest.approx(expected * 1e6 / (first.line.median_us or 0) - 1)


def test_a_device_is_known_by_its_driver_s_name() -> None:
    assert device_named("NVIDIA H200") is H200
    assert device_named("NVIDIA GeForce RTX 5090") is RTX_5090
    assert device_named("NVIDIA GeForce RTX 5090 D") is RTX_5090
    assert device_named("NVIDIA GeForce RTX 50") is None
    assert device_named("NVIDIA H200NVL") is None  # another card, whatever it is


def test_more_heads_than_a_block_takes_gather_again(receipt: Receipt) -> None:
    """128 heads are several blocks; the table holds them in order, the last one without limit."""
    design = design_of(receipt, 128, H200)
    assert predict(KernelShape(4, 128), H200, design).gathered_bytes == (
        4 * 2048 * 656 * (128 // design.heads_per_block)
    )
    for built in BUILT.values():
        mosts = [most for most, *_ in built]
        assert mosts == sorted(mosts) and mosts[-1] == 128


def test_what_it_cannot_hold_is_refused(receipt: Receipt) -> None:
    with pytest.raises(ValueError, match=r"receipt.backend must be one of triton, cupy"):
        design_of(replace(receipt, backend="torch"), 8, H200)
    with pytest.raises(ValueError, match="a time of decode with 9 heads"):
        design_of(receipt, 9, H200)

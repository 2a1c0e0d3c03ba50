"""The receipt that lesson 16 reads: one run on an H200, as it was, with part of its lines."""

from pathlib import Path

from mla_ref.bench.receipt import Receipt, read_receipt

_PATH = Path(__file__).with_name("receipt-2026-11-30.json")


def example_receipt() -> Receipt:
    """The Triton kernels of 2026-11-30 beside FlashMLA, at 8 and 64 heads.

    Lines of 128 heads and of contenders that did not run are left out, but for one of them. The
    kernels have changed since or will; a receipt says what was measured, and stays.
    """
    return read_receipt(_PATH)

"""Checks at a public edge: what they let through, and what their messages say."""

import math

import numpy as np
import pytest
import torch
from tests.support import raw

from mla_ref import checks


def test_describe() -> None:
    assert checks.describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == (
        "a bfloat16 tensor of shape [2, 3]"
    )
    assert checks.describe("x") == "'x' (str)"


def test_a_message_names_argument_shape_and_find() -> None:
    with pytest.raises(
        ValueError, match=r"q must have the shape \[s_q h_q d\], got a float32 .*\[2, 3\]"
    ):
        checks.require_tensor("q", torch.zeros(2, 3), "s_q h_q d")
    with pytest.raises(TypeError, match=r"q must be a tensor \[s_q\], got \[1\] \(list\)"):
        checks.require_tensor("q", [1], "s_q")
    with pytest.raises(TypeError, match="q must hold floating-point numbers, got a int64"):
        checks.require_float("q", torch.zeros(2, dtype=torch.int64), "s_q")
    with pytest.raises(TypeError, match="lens must hold int32 or int64 numbers, got a int8"):
        checks.require_integer("lens", torch.zeros(2, dtype=torch.int8), "b")
    with pytest.raises(
        ValueError, match=r"k must have size 4 in dimension 1 \(as q\), got .*\[2, 3\]"
    ):
        checks.require_size("k", torch.zeros(2, 3), 1, 4, "as q")


@pytest.mark.parametrize("value", [1, 0.125, 1e-30, 3e38, np.float64(0.5)])
def test_a_scale_that_float32_can_hold(value: float) -> None:
    assert raw(checks.require_scale)("scale", value) == value


@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, 1e-50, 1e300, 10**400, math.inf, -math.inf, math.nan]
)
def test_B054_a_scale_is_checked_in_float32(value: float) -> None:
    """1e-50 is positive as a double and 0 where a kernel reads it as a float."""
    with pytest.raises(ValueError, match="scale must be finite and greater than 0 in float32"):
        checks.require_scale("scale", value)


@pytest.mark.parametrize("value", [None, True, "1", [1.0], torch.tensor(1.0), 1j])
def test_a_scale_is_a_number(value: object) -> None:
    with pytest.raises(TypeError, match="scale must be a number"):
        checks.require_scale("scale", value)


def test_counts() -> None:
    assert checks.require_count("n", 0) == 0
    assert checks.require_count("n", 3, at_least=3) == 3
    for value, error in ((2, ValueError), (True, TypeError), (3.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match="n must be"):
            checks.require_count("n", value, at_least=3)


def test_choices() -> None:
    assert checks.require_choice("base", "e", ("e", "2")) == "e"
    for value in ("10", 2, None, ["e"]):
        with pytest.raises(ValueError, match="base must be one of e, 2, got"):
            checks.require_choice("base", value, ("e", "2"))


def test_a_text_is_utf8_and_a_byte_order_mark_is_no_part_of_it() -> None:
    assert checks.require_utf8("a.txt", b"") == ""
    text = "\u00e9\u2028\r\n\ufeffx"
    assert checks.require_utf8("a.txt", text.encode()) == text
    assert checks.require_utf8("a.txt", text.encode("utf-8-sig")) == text
    for data in (b"\xff\xfea\x00", b"a\xe9"):
        with pytest.raises(ValueError, match=r"^a\.txt is not UTF-8: "):
            checks.require_utf8("a.txt", data)


def test_one_device_and_one_dtype() -> None:
    a, b = torch.zeros(1), torch.zeros(1, device="meta")
    checks.require_same_device({"a": a, "b": a})
    with pytest.raises(ValueError, match=r"one device.*'a': 'cpu', 'b': 'meta'"):
        checks.require_same_device({"a": a, "b": b})
    checks.require_same_dtype({"a": a, "b": b})
    with pytest.raises(TypeError, match=r"one dtype.*'a': 'float32', 'b': 'float64'"):
        checks.require_same_dtype({"a": a, "b": b.double()})

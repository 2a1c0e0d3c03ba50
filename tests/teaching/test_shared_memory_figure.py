"""The figure of a block's shared memory: it shows the bytes it was given, and what is too large."""

import pytest

from mla_ref.teaching.figures import shared_memory_budget

pytestmark = pytest.mark.thorough

pytest.importorskip("matplotlib")


def test_bars_are_stacked_bytes_and_the_line_is_the_limit():
    figure = shared_memory_budget({"a": {"x": 30, "y": 20}, "b": {"y": 90}}, 80)
    (axes,) = figure.axes
    drawn = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert drawn == [(0, 30), (0, 0), (30, 20), (0, 90)]
    (limit,) = axes.lines
    assert set(limit.get_xdata()) == {80}


def test_only_what_crosses_the_line_is_called_too_large():
    figure = shared_memory_budget({"a": {"x": 80}, "b": {"x": 81}}, 80, limit_name="it")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == ["80", "81, too large", "it: 80 bytes"]


@pytest.mark.parametrize(
    "kernels, message",
    [
        ({}, "kernels must hold one kernel at least"),
        ({"a": {"x": -1}}, r"kernels\['a'\]\['x'\] must be at least 0, got -1"),
        ({"a": dict.fromkeys("vwxyz", 1)}, "kernels must have 4 uses at most"),
    ],
)
def test_bad_input_is_named(kernels, message):
    with pytest.raises(ValueError, match=message):
        shared_memory_budget(kernels)

"""Lesson 03: what its figures show, what its planted bug gets wrong."""

import itertools

import pytest
import torch

from mla_ref.cache import bytes_per_token, new_index_cache, pack_fp8_rows
from mla_ref.layers import PRESETS, preset
from mla_ref.teaching import figures, planted

# -- The planted bug -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_B171_the_forgotten_index_keys_are_all_that_is_missing(name, cache_format):
    config = preset(name)
    counted = planted.bytes_without_index_keys(config, cache_format)
    missing = bytes_per_token(config, cache_format) - counted
    index_layers = len(config.indexer.full_layers) if config.indexer else 0
    assert missing == 132 * index_layers


def test_B171_the_formula_gives_the_numbers_of_the_report():
    """sglang#11309, in its GB of 2**30 bytes; the pool has one page of 64 tokens to spare."""
    config = preset("v3.2")
    said = planted.bytes_without_index_keys(config)
    truth = bytes_per_token(config)
    assert (said, truth) == (40_016, 48_068)
    assert round((1_462_784 + 64) * said / 2**30, 2) == 54.52
    assert round((1_462_784 + 64) * truth / 2**30, 2) == 65.49
    assert round((975_424 + 64) * truth / 2**30, 2) == 43.67


def test_B171_the_formula_is_what_the_caches_take():
    row = pack_fp8_rows(torch.randn(64, 576)).nbytes // 64
    key = new_index_cache(num_pages=2, page_size=64).nbytes // 128
    assert (row, key) == (656, 132)
    assert bytes_per_token(preset("glm-5.2")) == 78 * row + 21 * key


# -- The figures -----------------------------------------------------------------------------------


def labels(figure):
    return [text for axes in figure.axes for text in axes.texts if len(text.get_text()) > 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "points",
    [
        {},
        {"one": 0.3},
        {"MHA": 1.0, "GQA, 8 KV heads": 16.0, "MQA": 128.0, "bf16": 241.8, "FP8": 424.6},
        {f"right of the ridge {i}": 250.0 * i for i in range(1, 6)},
        {f"left of it {i}": 2.0**i for i in range(6)},
    ],
    ids=len,
)
def test_roofline_labels_each_point_with_its_share_and_none_lies_on_another(points):
    pytest.importorskip("matplotlib")
    machines = {"a": (1000e12, 5e12), "b": (400e12, 1e12)}
    figure = figures.roofline(points, machines)
    figure.draw_without_rendering()
    shown = {text.get_text() for text in labels(figure)}
    for name, intensity in points.items():
        (label,) = [text for text in shown if text.startswith(f"{name}\n")]
        assert f"{intensity:,.3g} FLOP/B" in label
        assert ("100%" in label) == (intensity >= 200)
    boxes = [(text.get_text(), text.get_window_extent()) for text in labels(figure)]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{one!r} lies on {other!r}"
    for text, box in boxes:
        assert figure.bbox.padded(1).contains(box.x0, box.y0), text
        assert figure.bbox.padded(1).contains(box.x1, box.y1), text
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "ridge at 200" in legend[0] and "ridge at 400" in legend[1]


@pytest.mark.thorough
def test_token_bytes_magnifies_what_is_small_and_nothing_else():
    pytest.importorskip("matplotlib")
    large, small = {"keys": 900, "values": 100}, {"latent": 20, "index key": 5}
    figure = figures.token_bytes({"large": large, "small": small, "tiny": {"latent": 10}})
    totals = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert totals == [["1,000", "25", "10"], ["25", "10"]]
    assert "magnified 40 times" in figure.axes[1].get_title(loc="left")
    parts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert parts == ["keys", "values", "latent", "index key"]
    assert len(figures.token_bytes({"a": large, "b": large}).axes) == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: figures.roofline({}, {}), "machines must hold one machine"),
        (lambda: figures.roofline({"a": 0.0}, {"m": (1.0, 1.0)}), r"points\['a'\]"),
        (lambda: figures.roofline({}, {"m": (0.0, 1.0)}), "peak FLOP/s of m"),
        (lambda: figures.roofline({}, {"m": (1.0, -1.0)}), "peak bytes/s of m"),
        (lambda: figures.token_bytes({}), "forms must hold one form"),
        (lambda: figures.token_bytes({"a": {"x": 0}}), r"forms\['a'\] must have a byte"),
        (lambda: figures.token_bytes({"a": {"x": -1}}), r"forms\['a'\]\['x'\]"),
        (lambda: figures.token_bytes({"a": dict.fromkeys("uvwxyz", 1)}), "5 part names at most"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument(draw, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        draw()

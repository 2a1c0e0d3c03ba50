"""Figures: they show the numbers they were given, and say so when they cannot."""

import itertools
import math
import sys
from collections import Counter

import pytest
import torch

from mla_ref.backends import AttnSpec
from mla_ref.batching import Step, kernel_cost
from mla_ref.engine import Output
from mla_ref.layers import preset
from mla_ref.speculative import AcceptanceStats
from mla_ref.teaching import figures
from mla_ref.teaching.receipt_example import example_receipt
from mla_ref.teaching.warp_memory import key_addresses, value_addresses

pytestmark = pytest.mark.thorough

pytest.importorskip("matplotlib")


def texts(figure):
    return [t.get_text() for axes in figure.axes for t in [*axes.texts, axes.title]] + [
        axes.get_title(loc="left") for axes in figure.axes
    ]


def all_figures():
    return {
        "mask_alignment": figures.mask_alignment(2, 5),
        "masks": figures.masks({"a": torch.ones(3, 4, dtype=torch.bool)}),
        "running_softmax": figures.running_softmax(torch.randn(20), 6),
        "merge_tree": figures.merge_tree(torch.randn(5)),
        "error_by_row": figures.error_by_row({"a": torch.rand(9)}, [4, 5]),
        "error_histogram": figures.error_histogram(
            {"a": torch.rand(99), "b": 1e-6 * torch.rand(99), "c": torch.zeros(9)}, {"b": 1e-5}
        ),
        "roofline": figures.roofline({"a": 1.0, "b": 300.0}, {"m": (989e12, 4.8e12)}),
        "token_bytes": figures.token_bytes({"a": {"x": 90}, "b": {"x": 2, "y": 1}}),
        "block_tables": figures.block_tables(
            torch.tensor([[5, 2, 7], [0, 6, -1]]), torch.tensor([12, 7]), page_size=4, num_pages=8
        ),
        "page_map": figures.page_map(
            torch.randn(4, 6, 2), torch.tensor([[2, 0], [3, -1]]), torch.tensor([9, 6])
        ),
        "rope_layouts": figures.rope_layouts(),
        "forms_by_rows": figures.forms_by_rows(
            torch.tensor([1, 10, 100]),
            {"a": torch.tensor([9.0, 9.0, 9.0]), "b": torch.tensor([1.0, 9.5, 80.0])},
            {"a": torch.ones(3), "b": torch.ones(3)},
        ),
        "mla_flow": figures.mla_flow(preset("v3.2")),
        "latent_rank": figures.latent_rank(
            {"a": torch.rand(9)}, [2, 4], {"b": torch.tensor([0.5, 0.25])}
        ),
        "score_maps": figures.score_maps(
            torch.rand(9, 9), torch.rand(9, 9), torch.rand(2, 9, 9) > 0.5
        ),
        "selection_quality": figures.selection_quality(
            [
                {"text": "t", "choice": c, "topk": k, "recall": 0.5 + k / 99, "mass": k / 99}
                for c in ("ideal", "indexer", "window", "random")
                for k in (8, 16)
            ],
            "t",
            {"step": [0, 1], "loss": [2.0, 0.05]},
        ),
        "sparse_cliff": figures.sparse_cliff(
            {16: torch.rand(99), 32: torch.rand(99), 64: torch.rand(99)},
            [
                {"text": "t", "choice": c, "topk": k, "perplexity": 30.0 + 700 / k}
                for c in ("ideal", "indexer", "window", "random")
                for k in (8, 16)
            ],
            "t",
        ),
        "verifier_rows": figures.verifier_rows(
            Step.build(
                [6, 9, 4],
                [4, 3, 1],
                torch.arange(9).reshape(3, 3),
                4,
                num_reqs_padded=4,
                num_tokens_padded=9,
            )
        ),
        "blocks_on_multiprocessors": figures.blocks_on_multiprocessors(
            [kernel_cost(kind, [5000] * 4, AttnSpec(8)) for kind in ("extend", "decode")]
        ),
        "draft_steps": figures.draft_steps(
            range(5),
            [Output("0", (1,), (), 0, 5, None), Output("0", (2, 3), (2, 9, 9), 1, 0, None)],
            "token {}".format,
            count=1,
        ),
        "acceptance": figures.acceptance(
            {"a": AcceptanceStats(Counter({(3, 1): 2})), "b": AcceptanceStats(Counter({(2, 2): 1}))}
        ),
        "dealt_positions": figures.dealt_positions(37, world=4, interleaves=(1, 16)),
        "rank_staircases": figures.rank_staircases([17, 18, 19, 20], world=4),
        "fragment_map": figures.fragment_map((5, 30)),
        "bank_turns": figures.bank_turns(
            {"a": key_addresses(640), "b": value_addresses(), "c": 0 * key_addresses()}
        ),
        "timed_samples": figures.timed_samples({"a": [1e-3, 2e-3, 9e-3], "b": [4e-6]}),
        "receipt_times": figures.receipt_times(
            [line for line in example_receipt().lines if line.workload == "disjoint"]
        ),
        "copy_timeline": figures.copy_timeline(7, (1, 2, 3, 4), copy=2.5, compute=1.0),
        "operand_tiles": figures.operand_tiles(),
        "shared_memory_budget": figures.shared_memory_budget({"a": {"x": 30_000, "y": 2_000}}),
        "list_splits": figures.list_splits(torch.tensor([7, 3, -1, 12, -1]), [1, 2, 5]),
        "byte_maps": figures.byte_maps(),
        "scale_errors": figures.scale_errors(torch.rand(9, 4) + 1, {"a": torch.rand(9, 4)}),
        "error_by_position": figures.error_by_position({"a": torch.rand(9)}, torch.arange(1, 10)),
    }


def test_every_figure_is_of_the_page_s_width_and_shows_itself_as_svg():
    made = all_figures()
    assert set(made) == set(figures.__all__)
    for figure in made.values():
        assert figure.get_figwidth() == pytest.approx(7.2)
        svg = figure._repr_svg_()
        assert svg.startswith("<?xml")
        assert "<path" in svg


def test_the_same_data_give_the_same_bytes():
    scores = torch.randn(20)
    first, second = (figures.running_softmax(scores, 6)._repr_svg_() for _ in range(2))
    assert first == second


@pytest.fixture(scope="module")
def drawn():
    """Each figure once, not all of them for each."""
    torch.manual_seed(0)
    return all_figures()


@pytest.mark.parametrize("name", figures.__all__)
def test_no_two_labels_overlap(name, drawn):
    figure = drawn[name]
    figure.draw_without_rendering()
    labels = [text for axes in figure.axes for text in axes.texts if len(text.get_text()) > 1]
    boxes = [(t.get_text(), t.get_window_extent()) for t in labels]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{one!r} lies on {other!r}"
    for text, box in boxes:
        inside = figure.bbox.padded(1)
        assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1), text


@pytest.mark.parametrize("s_q, s_kv", [(1, 1), (1, 5), (2, 5), (4, 6), (5, 5)])
def test_mask_alignment_crosses_where_the_two_masks_differ(s_q, s_kv):
    crosses = texts(figures.mask_alignment(s_q, s_kv)).count("×")
    differing = sum(
        (key <= row) != (key <= s_kv - s_q + row) for row in range(s_q) for key in range(s_kv)
    )
    assert crosses == differing


def test_masks_crosses_what_differs_from_the_expected():
    expected = torch.ones(3, 4, dtype=torch.bool).tril(1)
    wrong = expected.clone()
    wrong[0, 3] = True
    assert texts(figures.masks({"a": wrong, "b": expected}, expected=expected)).count("×") == 1


def test_error_histogram_counts_every_error_and_names_the_exact_ones():
    errors = {"a": torch.tensor([0.0, 0.0, 0.0, 1e-3]), "b": torch.logspace(-9, 0, 50)}
    figure = figures.error_histogram(errors, {"a": 0.5})
    counts = [sum(axes.patches[0].get_data().values) for axes in figure.axes]
    assert counts == [1, 50]
    assert "a, 75% exact" in texts(figure)
    assert figure.axes[0].lines[0].get_xdata()[0] == 0.5


@pytest.mark.parametrize("block_size", [1, 5, 20, 64])
def test_running_softmax_ends_at_the_logsumexp(block_size):
    scores = torch.randn(20) * 4
    scores[:6] = -math.inf
    lse = torch.logsumexp(scores, 0)
    titles = " ".join(texts(figures.running_softmax(scores, block_size)))
    assert f"LSE = {lse:.3f}" in titles
    assert f"m = {scores.max():.3f}" in titles


def test_running_softmax_of_nothing_visible():
    titles = " ".join(texts(figures.running_softmax(torch.full((4,), -math.inf), 2)))
    assert "m = −∞, l = 0, LSE = −∞" in titles


@pytest.mark.parametrize("parts", [1, 2, 5, 8])
def test_merge_tree_shows_the_total_and_each_share(parts):
    lses = torch.randn(parts)
    if parts > 2:
        lses[1] = -math.inf
    shown = texts(figures.merge_tree(lses))
    assert f"LSE {torch.logsumexp(lses, 0):.3f}".replace("-", "−") in shown
    for part, share in enumerate(lses.softmax(0)):
        assert f"part {part}\n{share:.1%}" in shown
    assert ("empty, −∞" in shown) == (parts > 2)


def test_merge_tree_of_empty_parts_only():
    assert texts(figures.merge_tree(torch.full((3,), -math.inf))).count("empty, −∞") >= 4


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: figures.mask_alignment(6, 5), "s_kv must be at least 6"),
        (lambda: figures.mask_alignment(0, 5), "s_q must be at least 1"),
        (lambda: figures.masks({}), "named must hold one mask"),
        (lambda: figures.masks({"a": torch.ones(0, 3, dtype=torch.bool)}), r"named\['a'\]"),
        (lambda: figures.running_softmax(torch.tensor([math.nan]), 2), "scores must hold"),
        (lambda: figures.running_softmax(torch.randn(4), 0), "block_size"),
        (lambda: figures.merge_tree(torch.randn(0)), "lses must hold"),
        (lambda: figures.merge_tree(torch.randn(2), ["one"]), "names must hold one name a part"),
        (lambda: figures.error_by_row({"a": torch.rand(9)}, [4]), "calls must add up to 9"),
        (lambda: figures.error_histogram({}), "errors must be one to 5 rows, got 0"),
        (lambda: figures.error_histogram({"a": torch.tensor([math.nan])}), r"errors\['a'\] must"),
        (lambda: figures.error_histogram({"a": torch.zeros(3)}), "a number above 0, got none"),
        (lambda: figures.error_histogram({"a": torch.ones(3)}, {"b": 1.0}), "limits must name"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="mla-ref"):
        figures.mask_alignment(2, 5)

"""What lesson 12 says of verifier batches, and the bugs that it plants."""

import pytest
import torch

from mla_ref.attention import causal_attention, plan_splits
from mla_ref.backends import AttnSpec
from mla_ref.batching import Step, is_verifier_batch, kernel_cost
from mla_ref.numerics import compare, oracle_attention
from mla_ref.teaching import figures, planted

HIDING = planted.causal_attention_hiding_candidates
WITH_PADDING = planted.is_verifier_batch_with_padding


def qkv(s_q, s_kv):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(s_q, 4, 8, generator=generator),
        torch.randn(s_kv, 2, 8, generator=generator),
        torch.randn(s_kv, 2, 8, generator=generator),
    )


def test_B001_hiding_candidates_is_right_for_row_0_and_wrong_for_every_other():
    args = qkv(4, 9)
    wrong, right = (f(*args, softmax_scale=0.4) for f in (HIDING, causal_attention))
    for actual, expected in zip(wrong, right, strict=True):
        assert compare(actual[0], expected[0]).agrees(max_abs=1e-6)
        for row in (1, 2, 3):
            assert compare(actual[row], expected[row]).rel_l2 > 1e-2


def test_B001_hiding_candidates_is_what_its_docstring_says():
    q, k, v = qkv(3, 7)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[:, 4:] = torch.eye(3, dtype=torch.bool)
    expected = oracle_attention(q, k, v, mask, softmax_scale=0.4)
    found = HIDING(q, k, v, softmax_scale=0.4)
    assert compare(found.out.double(), expected.out).agrees(max_abs=1e-5)
    assert compare(found.lse.double(), expected.lse).agrees(max_abs=1e-5)


def test_B001_hiding_candidates_hides_in_a_step_of_one_token():
    args = qkv(1, 6)
    wrong, right = (f(*args, softmax_scale=0.4) for f in (HIDING, causal_attention))
    assert torch.equal(wrong.out, right.out)


@pytest.mark.parametrize(
    ("lens", "flags", "num_reqs", "differ"),
    [
        ((4, 4, 4), (False, False, False), 3, False),
        ((4, 4, 4), (False, False, True), 3, False),
        ((4, 4, 0), (False, False, False), 2, False),
        ((4, 4, 0), (False, False, True), 2, True),
        ((4, 4, 0), (False, False, True), 3, True),
    ],
)
def test_B001_a_stale_flag_misleads_the_planted_rule_only(lens, flags, num_reqs, differ):
    right = is_verifier_batch(lens, flags, 3, num_reqs=num_reqs)
    wrong = WITH_PADDING(lens, flags, 3, num_reqs=num_reqs)
    assert (wrong != right) == differ
    assert right or not wrong  # it loses time, never a result


def test_the_counts_that_the_lesson_names():
    """Part 3 and problem a."""
    spec = AttnSpec(num_heads=8, topk=2048)
    blocks = [kernel_cost(kind, [5000] * 4, spec).blocks for kind in ("extend", "decode")]
    assert blocks == [4, 128]
    assert [plan_splits(rows, 8, 2048, 188) for rows in (4, 64, 256)] == [32, 3, 1]


def small_step(**padding):
    table = torch.arange(9).reshape(3, 3)
    return Step.build([6, 9, 4], [4, 3, 1], table, page_size=4, **padding)


def shown(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.thorough
def test_verifier_rows_colours_a_cell_for_each_key_that_a_row_sees():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from mla_ref.teaching import style

    step = small_step(num_reqs_padded=4, num_tokens_padded=9)
    figure = figures.verifier_rows(step)
    colours = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    assert len(colours) == 4 * 10 + 3 * 12 + 5
    assert len(colours) - colours.count(style.FAINT) == int(step.visible_lens.sum())
    assert colours.count(style.VERMILLION) == step.num_tokens
    assert colours.count(style.ORANGE) == 0 + 1 + 2 + 3 + 0 + 1 + 2 + 0
    texts = shown(figure)
    assert "draft 1, sees 9, judges draft 2" in texts
    assert "newest token, sees 5, gives the next" in texts
    assert "padding, sees 0" in texts


@pytest.mark.thorough
def test_blocks_on_multiprocessors_fills_one_square_a_block():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from mla_ref.teaching import style

    spec = AttnSpec(num_heads=8, topk=2048)
    costs = [kernel_cost("decode", [99] * rows, spec, num_splits=2) for rows in (3, 200)]
    figure = figures.blocks_on_multiprocessors(costs)
    filled = [
        [to_hex(patch.get_facecolor()) for patch in axes.patches].count(style.BLUE)
        for axes in figure.axes
    ]
    assert filled == [6, 188]
    assert shown(figure) == [f"{n} of 188 multiprocessors have work" for n in filled]


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="costs must hold one to three launches, got 0"):
        figures.blocks_on_multiprocessors([])
    with pytest.raises(ValueError, match="step must have a token"):
        figures.verifier_rows(Step.build([4], [0], torch.zeros(1, 1, dtype=torch.int64), 4))
    with pytest.raises(TypeError, match="step must be a Step"):
        figures.verifier_rows(None)

"""What lesson 11 says of drafts, and the figures that it draws. Its bugs: tests/speculative."""

import itertools
import math

import pytest
import torch

from mla_ref.engine import Output
from mla_ref.speculative import AcceptanceStats, rejection_sample
from mla_ref.speculative.rejection import recovery_weights
from mla_ref.teaching import figures, planted

# -- Numbers in the prose --------------------------------------------------------------------------


def mean_tokens(a, n):
    """Of a step with n drafts, each of which stands with probability a if those before it do."""
    return sum(
        (a**i * (1 - a) if i < n else a**n) * (i + 1)  # i drafts stand, and one token more
        for i in range(n + 1)
    )


@pytest.mark.parametrize("a", [0.0, 0.3, 0.6, 0.8])
def test_problem_a_the_mean_is_a_geometric_sum(a):
    for n in range(6):
        assert mean_tokens(a, n) == pytest.approx((1 - a ** (n + 1)) / (1 - a))


def test_problem_a_numbers():
    means = [mean_tokens(0.8, n) for n in range(7)]
    assert round(means[3], 2) == 2.95
    added = [round(after - before, 2) for before, after in itertools.pairwise(means[3:])]
    assert added == [0.41, 0.33, 0.26]
    # Half of what drafts without end would add.
    assert (means[3] - 1) / (5 - 1) == pytest.approx(0.49, abs=0.005)


def test_problem_b_numbers():
    speed = [mean_tokens(0.6, n) / (1 + 0.066 * n) for n in range(1, 6)]
    assert [f"{value:.2f}" for value in speed] == ["1.50", "1.73", "1.82", "1.82", "1.79"]
    for a, c in ((0.3, 0.29), (0.3, 0.31)):
        assert ((1 + a) / (1 + c) > 1) == (a > c)
    # One more draft pays as long as it adds more a pass than the step has.
    for n in range(1, 8):
        adds = 0.6 ** (n + 1) / 0.066
        has = mean_tokens(0.6, n) / (1 + 0.066 * n)
        assert (adds > has) == (mean_tokens(0.6, n + 1) / (1 + 0.066 * (n + 1)) > has)


def test_problem_c_both_caches_hold_one_row_less_than_the_text():
    for k in range(1, 6):
        for a in range(k + 1):
            before, text = 10, 11 + a + 1  # rows in both caches; tokens after the step
            assert before + (1 + k) - (k - a) == text - 1
            assert before + k - (k - 1 - a) == text - 1


def test_problem_d_numbers():
    read = [256 * (1 - (1 - 8 / 256) ** rows) for rows in (4, 64, 256)]
    assert [round(experts, 1) for experts in read] == [30.5, 222.4, 255.9]
    expert = 3 * 6144 * 2048
    sparse = [75 * (experts + 1) * expert / 1e9 for experts in (8, read[0])]
    assert [round(gigabytes, 1) for gigabytes in sparse] == [25.5, 89.3]
    assert round((14.5 + sparse[1]) / (14.5 + sparse[0]), 1) == 2.6
    assert round(read[2] / read[1], 2) == 1.15


def test_the_law_by_enumeration_and_the_bug_that_bends_it():
    p, q = torch.tensor([[0.2, 0.4, 0.4], [0.2, 0.1, 0.7]], dtype=torch.float64)

    def law(weights_of):
        out = torch.zeros(3, dtype=torch.float64)
        for x in range(3):
            kept = min(1.0, float(p[x] / q[x]))
            weights = weights_of(x)
            out[x] += q[x] * kept
            out += q[x] * (1 - kept) * weights / weights.sum()
        return out.tolist()

    def at_the_draft(x):
        weights = p.clone()
        weights[x] = max(float(p[x] - q[x]), 0.0)
        return weights

    right = law(lambda x: recovery_weights(p[None], torch.tensor([x]), q[None])[0])
    assert right == pytest.approx(p.tolist(), abs=1e-12)
    assert law(at_the_draft) == pytest.approx([0.3, 0.3, 0.4], abs=1e-12)


def test_B096_a_line_of_code_that_nobody_wrote():
    """Drafts `return b - a` where the model writes `return a - b`: the verdicts of part 6."""
    says = torch.tensor([0, 1, 2, 1, 4])  # return, a, -, a, and a line break
    drafts = torch.tensor([0, 3, 2, 1, -1])  # return, b, -, a
    call = (
        torch.nn.functional.one_hot(says, 5).float(),
        torch.tensor([0, 5]),
        drafts,
        None,
        torch.full((5,), 0.5, dtype=torch.float64),
        torch.ones(5, 5),
        4,
    )
    right, wrong = rejection_sample(*call), planted.rejection_sample_counting_all(*call)
    assert right.num_accepted.tolist() == [1] and wrong.num_accepted.tolist() == [3]
    assert right.token_ids.tolist() == [[0, 1, -1, -1, -1]]
    assert wrong.token_ids.tolist() == [[0, 1, 2, 1, -1]]  # return a - a


# -- Figures ---------------------------------------------------------------------------------------

WORDS = ["\n", " return", " a", " b", " +", " -", "multiplication", "end"]
OUTPUTS = [
    Output("0", (0,), (), 0, 5, None),
    Output("0", (1, 2, 5), (1, 2, 4), 2, 0, None),
    Output("0", (3,), (6, 3, 3), 0, 0, None),
    Output("0", (0, 0, 1, 7), (0, 0, 1), 3, 0, None),
]


def shown(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.thorough
def test_draft_steps_shows_what_is_run_kept_and_rolled_back():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from mla_ref.teaching import style

    figure = figures.draft_steps(range(9), OUTPUTS, WORDS.__getitem__)
    texts = shown(figure)
    told = [text for text in texts if text.startswith("num_computed")]
    assert told == [
        "num_computed 9: 4 rows run, 2 of 3 drafts stand, 1 row rolled back; then 12",
        "num_computed 12: 4 rows run, 0 of 3 drafts stand, 3 rows rolled back; then 13",
        "num_computed 13: 4 rows run, 3 of 3 drafts stand, 0 rows rolled back; then 17",
    ]
    faces = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    assert faces.count(style.SKY) == 3
    assert faces.count(style.GREEN) == 2 + 0 + 3
    assert faces.count(style.FAINT) == 1 + 3 + 0
    assert faces.count(style.BLUE) == 3
    assert len(figure.axes[0].lines) == 4  # struck out
    assert texts.count("unused") == 2  # rows behind the first that was rejected
    assert "multipli…" in texts and "·return" in texts and "↵" in texts
    # The next step begins with the last token of the one before it.
    columns = [p.get_x() for p, face in zip(figure.axes[0].patches, faces, strict=True)
               if face == style.SKY]  # fmt: skip
    assert columns == pytest.approx([0.04, 3.04, 4.04])


@pytest.mark.thorough
def test_draft_steps_after_an_end_token_among_the_drafts():
    """The step has accepted three drafts and gives two tokens: no token of the model's own."""
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from mla_ref.teaching import style

    ended = [OUTPUTS[0], Output("0", (1, 7), (1, 7, 2), 3, 0, "eos")]
    figure = figures.draft_steps([5], ended, WORDS.__getitem__, count=1)
    faces = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    assert faces.count(style.GREEN) == 3 and faces.count(style.BLUE) == 0


@pytest.mark.thorough
def test_acceptance_shows_shares_and_rates():
    pytest.importorskip("matplotlib")
    stats = AcceptanceStats()
    for accepted in (0, 1, 1, 3):
        stats.add(3, accepted)
    short = AcceptanceStats()
    short.add(1, 1)
    figure = figures.acceptance({"MTP": stats, "n-gram": short})
    left, right = figure.axes
    assert [patch.get_height() for patch in left.patches] == [0.25, 0.5, 0, 0.25, 0, 1]
    assert [list(line.get_ydata()) for line in right.lines] == [[0.75, 0.25, 0.25], [1.0]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "MTP: 4 drafts, 2.25 tokens a step",
        "n-gram: 1 drafts, 2.00 tokens a step",
    ]
    assert math.isclose(stats.mean_acceptance_length, 2.25)


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"must name steps 1 .. 3, got steps 2 .. 4"):
        figures.draft_steps(range(9), OUTPUTS, WORDS.__getitem__, first=2)
    with pytest.raises(ValueError, match="first must be at least 1"):
        figures.draft_steps(range(9), OUTPUTS, WORDS.__getitem__, first=0)
    with pytest.raises(ValueError, match="stats must hold one to three drafters, got 0"):
        figures.acceptance({})
    with pytest.raises(ValueError, match=r"stats\['a'\] must have a draft at least"):
        figures.acceptance({"a": AcceptanceStats()})
    with pytest.raises(TypeError, match=r"stats\['a'\] must be AcceptanceStats, got"):
        figures.acceptance({"a": None})

"""The statistics of a validation against numbers worked out by hand, and what is no number."""

import json
import math

import pytest
import torch
from tests.support import raw

from mla_ref.validation import LayerErrors, PairStatistics, RowDifference, Summary, row_differences
from mla_ref.validation.measure import rounded


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def row(kl: float, position: int = 0, **changed: object) -> RowDifference:
    values = {"same_top1": True, "overlap": 1.0, "gap": 0.0, "gap_shift": 0.0, "identical": False}
    return RowDifference(position, kl, **(values | changed))  # type: ignore[arg-type]


def test_kl_by_hand_and_in_the_stated_direction() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = log(4/3) / 2, KL(q || p) = 3/4 log 3 - log 2."""
    p, q = logits([0.0, 0.0]), logits([0.0, math.log(3)])
    (forth,) = row_differences(p, q, [2])
    (back,) = row_differences(q, p, [2])
    assert forth.position == 2
    assert forth.kl == pytest.approx(math.log(4 / 3) / 2, rel=1e-14)
    assert back.kl == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-14)


def test_a_tiny_kl_is_not_rounding() -> None:
    """A logit moved by d changes KL by p (1 - p) d^2 / 2; a plain sum would give 1e-17 of noise."""
    p = torch.linspace(-3, 3, 50_000, dtype=torch.float64)[None]
    q = p.clone()
    q[0, 40_000] += 1e-6
    share = float(p.softmax(dim=-1)[0, 40_000])
    (found,) = row_differences(p, q, [0])
    assert found.kl == pytest.approx(share * (1 - share) * 1e-12 / 2, rel=1e-4)
    (same,) = row_differences(p, p, [0])
    assert same.kl == 0 and same.identical and not found.identical


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    p = logits([1.0, 2.0, -1.0])
    (found,) = row_differences(p, p + 3, [0])
    assert found.kl < 1e-30 and found.same_top1 and not found.identical


def test_top_tokens_overlap_and_gaps() -> None:
    p = torch.arange(20, dtype=torch.float64)[None] / 10
    q = p.clone()
    q[0, 18] = 2.0  # above token 19, whose logit is 1.9
    q[0, 0] = 1.95  # token 0 comes in and token 10 goes out
    (found,) = row_differences(p, q, [0])
    assert not found.same_top1
    assert found.overlap == pytest.approx(0.9)
    assert found.gap == pytest.approx(0.1)
    assert found.gap_shift == pytest.approx(0.2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_is_no_number_is_counted_and_left_out(value: float, side: int) -> None:
    pair = [logits([1.0, 2.0], [2.0, 1.0]), logits([1.0, 2.5], [2.0, 1.0])]
    pair[side][1, 0] = value
    rows = row_differences(*pair, [0, 1])
    assert [r.finite for r in rows] == [True, False]
    found = PairStatistics("p", "q", tuple(rows))
    assert found.not_finite == (1,) and found.kl.count == 1 and math.isfinite(found.kl.mean)
    assert found.kl_by_position[1].count == 0
    assert found.to_json()["kl_of_rows"][1] is None


def test_summary_by_hand() -> None:
    """1, 2, 6: mean 3, median 2, squares 4 + 1 + 9 over 2 = 7."""
    found = Summary.of([6.0, 1.0, math.nan, 2.0])
    assert (found.count, found.mean, found.median, found.min, found.max) == (3, 3, 2, 1, 6)
    assert found.stdev == pytest.approx(math.sqrt(7))
    assert Summary.of([4.0]).to_json()["stdev"] is None
    assert Summary.of([]).to_json() == dict.fromkeys(
        ("mean", "median", "stdev", "min", "max"), None
    ) | {"count": 0}


def test_the_originals_sixteen_rows_have_a_sample_deviation() -> None:
    """15 small rows and one of 0.0199466: a mean of 0.00149 and a deviation of 0.0049 go together
    with ddof 1 only (serving an MTP3 batch, local-inference-lab/vllm#164)."""
    rest = (16 * 0.001490835 - 0.019946607) / 15
    found = Summary.of([0.019946607, *[rest] * 15])
    assert found.mean == pytest.approx(0.001490835)
    assert 0.0049 < found.stdev < 0.00494


def test_rows_are_summed_up_by_position() -> None:
    found = PairStatistics(
        "extend",
        "decode",
        (row(1.0), row(3.0, 1), row(2.0), row(5.0, 1, same_top1=False, gap=0.5, gap_shift=0.25)),
    )
    assert found.name == "extend || decode"
    assert [s.mean for s in found.kl_by_position] == [1.5, 4.0]
    assert found.top1_changes == (3,) and found.gap_noise == 0.25 and not found.identical
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == found.to_json()


def test_floats_of_a_report_are_short() -> None:
    assert rounded(1.23456789e-7) == 1.23457e-7 and rounded(math.nan) is None and rounded(3) == 3
    assert rounded(0.123456, 2) == 0.12


def test_rows_must_fit() -> None:
    call = raw(row_differences)
    with pytest.raises(ValueError, match=r"tested must have size 2 in dimension 0"):
        call(logits([1.0], [2.0]), logits([1.0]), [0, 1])
    with pytest.raises(ValueError, match=r"reference must have size 1 in dimension 0"):
        call(logits([1.0], [2.0]), logits([1.0], [2.0]), [0])
    with pytest.raises(TypeError, match="reference must hold floating-point"):
        call(torch.zeros(1, 2, dtype=torch.int64), logits([1.0, 2.0]), [0])


def result(value: torch.Tensor) -> object:
    from mla_ref.numerics import AttentionResult

    return AttentionResult(value, torch.zeros(value.shape[:2]))


def test_layer_errors_by_hand_for_every_layer_and_shard() -> None:
    """Two layers, two heads, each a shard; the second way is off by 3 and 4 in head 1, layer 1."""
    calls = {"a": 0, "b": 0}

    def way(name: str, off: float) -> object:
        def attend(q: torch.Tensor, *_: object, **__: object) -> object:
            layer, calls[name] = calls[name] % 2, calls[name] + 1
            out = torch.ones(1, 2, 2)
            out[0, 1] += torch.tensor([3.0, 4.0]) * off * layer
            return result(out)

        return attend

    errors = LayerErrors({"a": way("a", 1.0), "b": way("b", 0.0)}, 2, 2)  # type: ignore[dict-item]
    q, cache, lists = torch.zeros(1, 2, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1).long()
    for _ in range(4):  # two passes
        handed_on = errors(q, cache, lists, softmax_scale=1.0)
    assert handed_on.out[0, 1].tolist() == [4.0, 5.0]
    found = {(e.layer, e.shard): (e.max_abs, e.rel_l2) for e in errors.of("a", "b")}
    assert found == {
        (0, 0): (0.0, 0.0),
        (0, 1): (0.0, 0.0),
        (1, 0): (0.0, 0.0),
        # ||(3, 4)|| / ||(1, 1)||, twice in each: the same.
        (1, 1): (4.0, pytest.approx(math.sqrt(25 / 2))),
    }
    (entry,) = errors.to_json()
    assert entry["comparisons"] == 4 and entry["max_abs"]["max"] == 4.0


def test_a_nan_of_a_layer_stays() -> None:
    outs = [torch.full((1, 1, 2), math.nan), torch.zeros(1, 1, 2)]
    errors = LayerErrors(
        {
            "a": lambda *_, **__: result(outs.pop(0)),
            "b": lambda *_, **__: result(torch.ones(1, 1, 2)),
        },  # type: ignore[dict-item]
        1,
    )
    for _ in range(2):
        errors(
            torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), softmax_scale=1.0
        )
    (error,) = errors.of("a", "b")
    assert math.isnan(error.max_abs) and math.isnan(error.rel_l2)

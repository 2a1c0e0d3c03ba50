"""Grading: solutions pass, blanks are not attempted, wrong answers fail where they should."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.teaching.wrong_00 import WRONG_00
from tests.teaching.wrong_03 import WRONG_03
from tests.teaching.wrong_04 import WRONG_04
from tests.teaching.wrong_05 import REPEATS_05, WRONG_05
from tests.teaching.wrong_06 import REPEATS_06, WRONG_06
from tests.teaching.wrong_07 import WRONG_07
from tests.teaching.wrong_08 import WRONG_08
from tests.teaching.wrong_09 import WRONG_09
from tests.teaching.wrong_10 import WRONG_10
from tests.teaching.wrong_11 import WRONG_11
from tests.teaching.wrong_12 import WRONG_12
from tests.teaching.wrong_13 import WRONG_13
from tests.teaching.wrong_14 import WRONG_14
from tests.teaching.wrong_15 import WRONG_15
from tests.teaching.wrong_16 import WRONG_16

from mla_ref.teaching import EXERCISES, grade, planted
from mla_ref.teaching.exercises import Case, Exercise

SOLUTIONS = Path(__file__).parents[2] / "lessons" / "solutions"


def solution(exercise):
    """The function that answers an exercise, from lessons/solutions/lesson_NN.py."""
    path = SOLUTIONS / f"lesson_{exercise.id[:2]}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, exercise.name)


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_the_solution_passes_every_case_and_passes_them_again(exercise):
    for _ in range(2):
        result = grade(exercise.id, solution(exercise))
        assert result.passed, result
        assert len(result.passed_cases) == result.num_cases == len(exercise.cases)


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_the_blank_is_not_attempted(exercise):
    namespace = {"Tensor": torch.Tensor, "Bool": dict, "Int": dict, "Float": dict}
    code = "from __future__ import annotations\n" + exercise.blank
    exec(code, namespace)
    result = grade(exercise, namespace[exercise.name])
    assert not result.attempted
    assert not result.passed
    assert "not attempted yet" in repr(result)


# -- Wrong answers, each with the case that must catch it ------------------------------------------


def top_left(s_q, s_kv):
    return torch.ones(s_q, s_kv, dtype=torch.bool).tril()


def decode_as_a_special_case(s_q, s_kv):
    return torch.ones(1, s_kv, dtype=torch.bool) if s_q == 1 else top_left(s_q, s_kv)


def nested_lists(s_q, s_kv):
    """The dtype of an empty list is float32."""
    return torch.tensor([[j <= s_kv - s_q + i for j in range(s_kv)] for i in range(s_q)])


def nested_lists_of_bools(s_q, s_kv):
    """The shape of no rows is [0], whatever their length."""
    rows = [[j <= s_kv - s_q + i for j in range(s_kv)] for i in range(s_q)]
    return torch.tensor(rows, dtype=torch.bool)


def one_key_too_few(s_q, s_kv):
    return torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q - 1)


def no_clamp(s_q, s_kv):
    """Takes the shift for positive: right unless there are more rows than keys."""
    return torch.ones(s_q, s_kv, dtype=torch.bool).tril(abs(s_kv - s_q))


def inverted(s_q, s_kv):
    return ~torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)


def additive_floats(s_q, s_kv):
    return torch.zeros(s_q, s_kv).masked_fill(inverted(s_q, s_kv), -torch.inf)


def batch_row_as_request_row(query_start_loc, seq_lens):
    """Forgets that rows are counted within the request."""
    q_lens = query_start_loc.diff()
    first = (seq_lens - q_lens + 1).repeat_interleave(q_lens)
    return torch.arange(int(query_start_loc[-1])) + first


def row_number_within_the_request(query_start_loc, seq_lens):
    q_lens = query_start_loc.diff()
    return torch.arange(int(query_start_loc[-1])) + (1 - query_start_loc[:-1]).repeat_interleave(
        q_lens
    )


def all_requests_like_the_first(query_start_loc, seq_lens):
    s_q = int(query_start_loc[1]) if len(seq_lens) else 0
    return (seq_lens[:, None] - s_q + 1 + torch.arange(s_q)).flatten()


def counts_the_starts(query_start_loc, seq_lens):
    """Finds a row's request by a running count of starts; two at one place count once."""
    starts = torch.zeros(int(query_start_loc[-1]), dtype=torch.int64)
    starts[query_start_loc[1:-1]] = 1
    request = starts.cumsum(0)
    ends = query_start_loc[1:][request]
    return seq_lens[request] - (ends - 1 - torch.arange(len(starts)))


def joins_pieces(query_start_loc, seq_lens):
    q_lens = query_start_loc.diff().tolist()
    return torch.cat(
        [torch.arange(n - q, n) + 1 for q, n in zip(q_lens, seq_lens.tolist(), strict=True)]
    )


def every_row_sees_all(query_start_loc, seq_lens):
    return seq_lens.repeat_interleave(query_start_loc.diff())


def shares(lse_a, lse_b, exp=torch.exp, log=torch.log):
    heaviest = torch.maximum(lse_a, lse_b)
    anchor = torch.where(heaviest == -torch.inf, 0.0, heaviest)
    a, b = exp(lse_a - anchor), exp(lse_b - anchor)
    total = a + b
    safe = torch.where(total == 0, 1.0, total)
    return (a / safe)[..., None], (b / safe)[..., None], anchor + log(total)


def used(out, lse):
    return torch.where(lse[..., None] == -torch.inf, 0.0, out)


def swapped(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    return b * out_a + a * out_b, lse


def plain_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def base_2(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b, torch.exp2, torch.log2)
    return a * out_a + b * out_b, lse


def base_2_shares_natural_lse(out_a, lse_a, out_b, lse_b):
    a, b, _ = shares(lse_a, lse_b, torch.exp2)
    return a * out_a + b * out_b, torch.logaddexp(lse_a, lse_b)


def base_10_lse(out_a, lse_a, out_b, lse_b):
    a, b, _ = shares(lse_a, lse_b)
    return a * out_a + b * out_b, torch.log10(torch.exp(lse_a) + torch.exp(lse_b))


def without_maximum(out_a, lse_a, out_b, lse_b):
    a, b = torch.exp(lse_a), torch.exp(lse_b)
    out = (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None]
    return out, torch.log(a + b)


def epsilon_in_the_sum(out_a, lse_a, out_b, lse_b):
    """A popular way round 0 / 0: it bends every other result by a rounding."""
    heaviest = torch.maximum(lse_a, lse_b).clamp(min=-1e30)
    a, b = torch.exp(lse_a - heaviest), torch.exp(lse_b - heaviest)
    total = a + b + 1e-6
    out = (a[..., None] * out_a + b[..., None] * out_b) / total[..., None]
    return out, torch.log(total) + heaviest


def finite_lse_for_empty(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a.clamp(min=-1e6), lse_b.clamp(min=-1e6))
    return a * used(out_a, lse_a) + b * used(out_b, lse_b), lse


def forgets_the_last_dimension(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    return a[..., 0] * out_a + b[..., 0] * out_b, lse


def multiplies_garbage(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    return a * out_a + b * out_b, lse


def whole_tensor_guard(out_a, lse_a, out_b, lse_b):
    """Guards against empty parts only if every row is empty."""
    if (lse_a == -torch.inf).all():
        empty = (lse_b == -torch.inf).all()
        return (torch.zeros_like(out_b), lse_b) if empty else (out_b, lse_b)
    if (lse_b == -torch.inf).all():
        return out_a, lse_a
    return planted.merge_without_guard(out_a, lse_a, out_b, lse_b)


def rounds_on_the_way(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    dtype = out_a.dtype
    return a.to(dtype) * used(out_a, lse_a) + b.to(dtype) * used(out_b, lse_b), lse


def wrong_dtype(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    return a * used(out_a, lse_a) + b * used(out_b, lse_b), lse


def in_place(out_a, lse_a, out_b, lse_b):
    a, b, lse = shares(lse_a, lse_b)
    return out_a.mul_(a).add_(b * out_b), lse


def no_guard_tile(m, total, acc, scores, values):
    new_m = torch.maximum(m, scores.amax(dim=-1))
    weights = torch.exp(scores - new_m[:, None])
    shrink = torch.exp(m - new_m)
    return new_m, total * shrink + weights.sum(-1), acc * shrink[:, None] + weights @ values


def no_rescale(m, total, acc, scores, values):
    new_m = torch.maximum(m, scores.amax(dim=-1))
    weights = torch.exp(scores - new_m[:, None])
    return new_m, total + weights.sum(-1), acc + weights @ values


def rescales_the_sum_only(m, total, acc, scores, values):
    new_m, new_total, _ = no_guard_tile(m, total, acc, scores, values)
    weights = torch.exp(scores - new_m[:, None])
    return new_m, new_total, acc + weights @ values


def tile_maximum(m, total, acc, scores, values):
    """Forgets the old maximum when the new tile is lower."""
    new_m = scores.amax(dim=-1)
    weights = torch.exp(scores - new_m[:, None])
    shrink = torch.exp(m - new_m)
    return new_m, total * shrink + weights.sum(-1), acc * shrink[:, None] + weights @ values


def no_maximum(m, total, acc, scores, values):
    weights = torch.exp(scores)
    new_m = torch.maximum(m, scores.amax(dim=-1))
    return new_m, total + weights.sum(-1), acc + weights @ values


def factors_the_exponential(m, total, acc, scores, values):
    new_m = torch.maximum(m, scores.amax(dim=-1))
    weights = torch.exp(scores) * torch.exp(-new_m)[:, None]
    shrink = torch.exp(m - new_m)
    return new_m, total * shrink + weights.sum(-1), acc * shrink[:, None] + weights @ values


def squeezes(m, total, acc, scores, values):
    new_m = torch.maximum(m, scores.amax(dim=-1))
    weights = torch.exp(scores - new_m[:, None]).squeeze()
    shrink = torch.exp(m - new_m)
    return new_m, total * shrink + weights.sum(-1), acc * shrink[:, None] + weights @ values


def finite_maximum(m, total, acc, scores, values):
    """Finite numbers in place of -inf: no NaN, but a row that sees nothing has a maximum."""
    return no_guard_tile(m.clamp(min=-1e30), total, acc, scores, values)


def skips_hidden_tiles(m, total, acc, scores, values):
    """Right if a tile is hidden for every row or for none."""
    if (scores == -torch.inf).all():
        return m, total, acc
    return no_guard_tile(m, total, acc, scores, values)


def normalises_at_once(m, total, acc, scores, values):
    m, total, acc = no_guard_tile(m, total, acc, scores, values)
    return m, total, acc / total[:, None]


WRONG = [
    *WRONG_00,
    ("01-offset-mask", top_left, "one-token decode", "sees the keys [0], expected [0, 1, 2, 3, 4]"),
    ("01-offset-mask", decode_as_a_special_case, "two new tokens", "row 0 sees the keys [0]"),
    ("01-offset-mask", nested_lists, "no keys at all", "float32 tensor of shape [3, 0]"),
    ("01-offset-mask", nested_lists_of_bools, "no rows", "bool tensor of shape [0]"),
    ("01-offset-mask", one_key_too_few, "square prefill", "row 0 sees the keys []"),
    ("01-offset-mask", no_clamp, "more rows than keys", "row 0 sees"),
    ("01-offset-mask", inverted, "square prefill", "the wrong way round"),
    ("01-offset-mask", additive_floats, "square prefill", "expected a bool tensor"),
    ("01-ragged-lens", batch_row_as_request_row, "three decode steps", "expected [9, 2, 5]"),
    ("01-ragged-lens", row_number_within_the_request, "one decode step", "[1], expected [9]"),
    ("01-ragged-lens", all_requests_like_the_first, "decode, chunk, verifier", "shape [3]"),
    ("01-ragged-lens", counts_the_starts, "a request without rows", "expected [4, 5, 3]"),
    ("01-ragged-lens", joins_pieces, "an empty batch", "it raised"),
    ("01-ragged-lens", every_row_sees_all, "one prompt", "expected [1, 2, 3, 4]"),
    ("02-merge", swapped, "by hand", "out at [0, 0, 0] is 2, expected 8"),
    ("02-merge", plain_mean, "by hand", "out at [0, 0, 0] is 5, expected 8"),
    ("02-merge", base_2, "by hand", "lse"),
    ("02-merge", base_2_shares_natural_lse, "by hand", "is 7.23303, expected 8"),
    ("02-merge", base_10_lse, "by hand", "lse at [0, 0] is 1, expected 2.30259"),
    ("02-merge", without_maximum, "LSE of 300", "inf"),
    ("02-merge", epsilon_in_the_sum, "an empty part changes no bit", ""),
    ("02-merge", finite_lse_for_empty, "two empty parts", "expected -inf"),
    ("02-merge", planted.merge_without_guard, "two empty parts", "NaN"),
    ("02-merge", whole_tensor_guard, "some rows empty", "NaN"),
    ("02-merge", forgets_the_last_dimension, "the two halves of a cut", "it raised RuntimeError"),
    ("02-merge", multiplies_garbage, "NaN in the output of an empty part", "NaN"),
    ("02-merge", wrong_dtype, "bfloat16 outputs", "float32 tensor"),
    ("02-merge", rounds_on_the_way, "bfloat16 outputs", "one rounding"),
    ("02-merge", in_place, "by hand", "changed its argument out_a"),
    ("02-add-tile", no_guard_tile, "the first tile hidden", "NaN"),
    ("02-add-tile", no_rescale, "a second tile with higher scores", "total"),
    ("02-add-tile", rescales_the_sum_only, "a second tile with higher scores", "acc"),
    ("02-add-tile", tile_maximum, "a second tile with lower scores", "m"),
    ("02-add-tile", no_maximum, "the first tile", "total"),
    ("02-add-tile", factors_the_exponential, "scores of 1,000", "NaN"),
    ("02-add-tile", squeezes, "nine tiles of one key", "it raised RuntimeError"),
    ("02-add-tile", finite_maximum, "nothing visible at all", "expected -inf"),
    ("02-add-tile", skips_hidden_tiles, "rows that differ", "NaN"),
    ("02-add-tile", normalises_at_once, "the first tile", "acc"),
    *WRONG_03,
    *WRONG_04,
    *WRONG_05,
    *WRONG_06,
    *WRONG_07,
    *WRONG_08,
    *WRONG_09,
    *WRONG_10,
    *WRONG_11,
    *WRONG_12,
    *WRONG_13,
    *WRONG_14,
    *WRONG_15,
    *WRONG_16,
]


@pytest.mark.parametrize(
    "exercise, answer, case, complaint", WRONG, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_answer_fails_at_the_case_meant_for_it(exercise, answer, case, complaint):
    result = grade(exercise, answer)
    assert not result.passed
    assert result.failed_case.startswith(case), result
    assert complaint in result.complaint, result
    assert result.why


def test_every_case_is_the_first_to_fail_for_some_answer():
    """A case that no wrong answer reaches proves nothing. Some repeat others in another way."""
    caught = {(exercise, grade(exercise, answer).failed_case) for exercise, answer, *_ in WRONG}
    cases = {(exercise.id, case.name) for exercise in EXERCISES.values() for case in exercise.cases}
    assert cases - caught == {
        ("01-offset-mask", "attention with the mask equals the loop"),
        ("02-merge", "the order and the grouping do not matter"),
        *REPEATS_05,
        *REPEATS_06,
    }


# -- What a reader's function may do to the grader -------------------------------------------------


def test_an_exception_is_shown_with_the_line_that_raised_it():
    def broken(s_q, s_kv):
        return torch.ones(s_q) @ torch.ones(s_kv + 1)

    result = grade("01-offset-mask", broken)
    assert result.attempted
    assert "it raised RuntimeError" in result.complaint
    assert "at: return torch.ones(s_q) @ torch.ones(s_kv + 1)" in result.complaint


def test_torch_not_implemented_is_an_attempt():
    def unsupported(s_q, s_kv):
        raise NotImplementedError("no kernel for this dtype")

    result = grade("01-offset-mask", unsupported)
    assert result.attempted
    assert "no kernel for this dtype" in result.complaint


def test_none_and_a_single_tensor_are_named():
    assert "None" in grade("01-offset-mask", lambda s_q, s_kv: None).complaint
    complaint = grade("02-merge", lambda out_a, lse_a, out_b, lse_b: out_a).complaint
    assert "expected the tuple (out, lse)" in complaint


def test_a_function_that_writes_into_its_arguments_cannot_spoil_the_next_grading():
    def vandal(m, total, acc, scores, values):
        values.fill_(7.0)
        return m, total, acc

    assert "changed its argument values" in grade("02-add-tile", vandal).complaint
    assert grade("02-add-tile", solution(EXERCISES["02-add-tile"])).passed


def test_nan_is_reported_before_distance():
    def nan_and_far(out_a, lse_a, out_b, lse_b):
        out, lse = out_a.clone() + 100, torch.logaddexp(lse_a, lse_b)
        out[..., -1] = torch.nan
        return out, lse

    assert "NaN" in grade("02-merge", nan_and_far).complaint


@pytest.mark.usefixtures("plain_calls")
def test_a_wrong_call_of_grade_is_an_error_that_names_the_argument():
    with pytest.raises(ValueError, match="exercise must be one of 00-compare, 01-offset-mask"):
        grade("01-offset", top_left)
    with pytest.raises(TypeError, match=r"function must be .* offset_mask\), got a bool tensor"):
        grade("01-offset-mask", top_left(2, 5))


def test_a_grade_prints_lines_that_need_no_scrolling():
    for exercise, answer, *_ in WRONG:
        assert max(map(len, repr(grade(exercise, answer)).splitlines())) <= 88


def test_a_bug_in_a_case_is_not_blamed_on_the_reader():
    def check(function):
        raise ZeroDivisionError

    exercise = Exercise("x", "x", "x", "def x():", (Case("broken", "never", check),))
    with pytest.raises(ZeroDivisionError):
        grade(exercise, lambda: None)

"""The law of a row: temperature, top-k and top-p, each against the definition in Python."""

import math

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
import hypothesis
import torch
from hypothesis import strategies as st
from tests.support import NothingReadBack, raw
from torch.utils._python_dispatch import TorchDispatchMode

from mla_ref.speculative import SamplingParams, probs_of_rows, target_probs

GREEDY = SamplingParams()
numbers = st.floats(-20, 20, width=16) | st.sampled_from([0.0, 1.0, -math.inf])


class NothingInfinite(TorchDispatchMode):
    """Fails at an operator that makes NaN or inf, even one whose result is then thrown away."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            assert bool(torch.isfinite(out).all()), f"{func} gave NaN or inf"
        return out


def by_definition(row: list[float], params: SamplingParams) -> list[float]:
    """Sorted lists and sums in float64."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    weights = {i: math.exp((row[i] - max(row)) / params.temperature) for i in order}
    kept = order[: params.top_k]
    if params.top_p < 1:
        total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if mass / total >= params.top_p:
                break
            nucleus.append(i)
            mass += weights[i]
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(row))]


@hypothesis.given(
    row=st.lists(numbers, min_size=1, max_size=9).filter(lambda r: max(r) > -math.inf),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 12),
    # No sum of weights of these rows meets one of these but by chance.
    top_p=st.sampled_from([1e-9, 0.1237, 0.5711, 0.9173, 0.999983, 1.0]),
)
def test_is_the_definition(
    row: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    probs = target_probs(torch.tensor([row], dtype=torch.float64), [params])[0]
    assert probs.dtype == torch.float64
    assert probs.tolist() == pytest.approx(by_definition(row, params), abs=1e-12)
    assert all(p == 0 for p, logit in zip(probs.tolist(), row, strict=True) if logit == -math.inf)


def test_worked_example() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def law(**settings: float | int) -> list[float]:
        return target_probs(logits, [SamplingParams(1.0, **settings)])[0].tolist()

    assert law() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert law(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # Fewest tokens with 0.65 of the mass: 0.4 + 0.3.
    assert law(top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # After top-k 3 the masses are 4/9, 3/9, 2/9, and two reach 0.72; before it they would not.
    assert law(top_k=3, top_p=0.72) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert law(top_k=3, top_p=0.8) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert law(top_p=1e-6) == [1, 0, 0, 0]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    assert (target_probs(logits, [SamplingParams(1.0, top_k=2)])[0] > 0).tolist() == [
        True, True, False, False,
    ]  # fmt: skip
    even = torch.zeros(1, 4)
    assert target_probs(even, [SamplingParams(1.0, top_p=0.5)]).tolist() == [[0.5, 0.5, 0, 0]]
    assert target_probs(even, [GREEDY]).tolist() == [[1, 0, 0, 0]]
    assert target_probs(even, [SamplingParams(9.0, top_k=1)]).tolist() == [[1, 0, 0, 0]]
    # As many as a vocabulary has, where a sort that need not be stable shows it.
    many = torch.randint(0, 3, (2, 50_000)).float()
    probs = target_probs(many, [SamplingParams(1.0, top_k=99), SamplingParams(9.0, top_p=0.1)])
    for row in range(2):
        kept = probs[row].nonzero()[:, 0]
        assert torch.equal(kept, (many[row] == 2).nonzero()[: len(kept), 0])


def test_top_p_1_keeps_the_tail() -> None:
    logits = torch.full((1, 50_000), -30.0)
    logits[0, 0] = 0.0
    both = target_probs(logits.expand(2, -1), [SamplingParams(1.0), SamplingParams(1.0, top_p=0.9)])
    assert bool((both[0] > 0).all())
    assert int((both[1] > 0).sum()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_logits_are_taken_as_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 40).to(dtype)
    params = [SamplingParams(0.6), GREEDY, SamplingParams(2.0, top_k=5, top_p=0.8)]
    probs = target_probs(logits, params)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, target_probs(logits.float(), params))


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-30, 1e-3, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[100.0, 99.0, -100.0, -torch.inf]])
    probs = target_probs(logits, [SamplingParams(temperature)])[0]
    assert bool(torch.isfinite(probs).all())
    assert probs[3] == 0
    expected = [1, 0, 0, 0] if temperature < 1 else [1 / 3, 1 / 3, 1 / 3, 0]
    assert probs.tolist() == pytest.approx(expected)


def test_B094_greedy_rows_among_sampled_ones_divide_by_nothing() -> None:
    logits = torch.randn(3, 50) * 30
    params = [GREEDY, SamplingParams(0.7), GREEDY]
    with NothingInfinite():
        probs = target_probs(logits, params)
    assert bool(torch.isfinite(probs).all())
    assert probs.sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    for row in (0, 2):
        assert probs[row].tolist() == [float(i == logits[row].argmax()) for i in range(50)]
    # Settings for sampling leave a greedy row alone.
    set_too = target_probs(logits, [SamplingParams(0.0, top_k=3, top_p=0.1), params[1], params[2]])
    assert torch.equal(set_too, probs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_law_are_named(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    for params in (GREEDY, SamplingParams(0.7, top_k=2)):
        with pytest.raises(ValueError, match="row 1 holds"):
            target_probs(logits, [params] * 3)
        unchecked = target_probs(logits, [params] * 3, validate=False)
        assert torch.equal(unchecked[0], target_probs(logits[:1], [params])[0])


def test_a_row_of_masked_tokens_only_is_named() -> None:
    logits = torch.zeros(2, 5)
    logits[1] = -torch.inf
    with pytest.raises(ValueError, match="row 1 holds only -inf"):
        target_probs(logits, [GREEDY] * 2)


def test_a_rows_law_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 64).round(decimals=1)
    params = [
        GREEDY,
        SamplingParams(0.5),
        SamplingParams(1.0, top_k=7),
        SamplingParams(1.0, top_p=0.6),
        SamplingParams(2.0, top_k=20, top_p=0.9),
        SamplingParams(1.3, top_k=10_000),
    ]
    together = target_probs(logits, params)
    order = [3, 0, 5, 1, 4, 2]
    permuted = target_probs(logits[order], [params[i] for i in order])
    assert torch.equal(permuted, together[order])
    for row in range(6):
        alone = target_probs(logits[row : row + 1], [params[row]])
        assert torch.equal(alone[0], together[row])


def test_tensors_alone_read_nothing_back() -> None:
    logits = torch.randn(3, 20)
    settings = (
        torch.tensor([0.0, 0.7, 1.0]), torch.tensor([20, 5, 20]), torch.tensor([1.0, 0.9, 0.5])
    )  # fmt: skip
    with NothingReadBack():
        probs = probs_of_rows(logits, *settings)
    params = [GREEDY, SamplingParams(0.7, 5, 0.9), SamplingParams(1.0, None, 0.5)]
    assert torch.allclose(probs, target_probs(logits, params), atol=1e-7)


def test_no_rows() -> None:
    assert target_probs(torch.zeros(0, 5), []).shape == (0, 5)


def test_parameters_that_make_no_sense_are_named() -> None:
    for settings in (
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-50},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"seed": 2**63},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            SamplingParams(**settings)
    for settings in ({"temperature": "hot"}, {"top_k": 2.5}, {"seed": None}, {"top_p": True}):
        with pytest.raises(TypeError, match=next(iter(settings))):
            raw(SamplingParams)(**settings)


def test_arguments_that_do_not_fit_are_named() -> None:
    logits = torch.zeros(2, 3)
    for error, name, arguments in (
        (TypeError, "logits", (logits.long(), [GREEDY] * 2)),
        (ValueError, "logits", (torch.zeros(3), [GREEDY])),
        (ValueError, "logits", (torch.zeros(2, 0), [GREEDY] * 2)),
        (ValueError, "params", (logits, [GREEDY])),
        (TypeError, "params", (logits, GREEDY)),
        (TypeError, "params", (logits, [GREEDY, 0.7])),
    ):
        with pytest.raises(error, match=name):
            raw(target_probs)(*arguments)

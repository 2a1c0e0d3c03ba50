"""The rejection sampler and its noise as kernels: the twins' tokens and the twins' numbers."""

import math

import pytest

pytest.importorskip("triton", reason="Triton kernels need triton")
import torch
from tests.kernels.twins import refuses_alike
from tests.support import NothingReadBack

from mla_kernels.triton_kernels import noise, sampler
from mla_kernels.triton_kernels.backend import TritonBackend
from mla_kernels.triton_kernels.noise import batch_noise
from mla_kernels.triton_kernels.sampler import rejection_sample, sampler_workspace
from mla_ref.speculative import position_noise
from mla_ref.speculative import rejection_sample as twin
from mla_ref.testing import cases

NEVER, ALWAYS = 1.0, 1e-300
ROWS = 9


def batch(vocab, *, with_q, uniform=None, seed=0):
    """Requests of 1, 4, 0 and 3 rows, and a padded row; drafts inside and outside."""
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS

    def law():
        return torch.randn(rows, vocab, generator=generator).mul(3).softmax(dim=-1)

    u = torch.rand(rows, dtype=torch.float64, generator=generator).clamp(min=1e-9)
    return {
        "target_probs": law(),
        "query_start_loc": torch.tensor([0, 1, 5, 5, 8]),
        "draft_ids": torch.randint(-1, vocab + 1, (rows,), generator=generator),
        "draft_probs": law() if with_q else None,
        "uniform": u if uniform is None else torch.full_like(u, uniform),
        "exponential": torch.empty(rows, vocab).exponential_(generator=generator),
        "max_drafts": 3,
    }


def agrees(arguments):
    made, expected = rejection_sample(**arguments), twin(**arguments)
    assert made.token_ids.dtype == made.num_accepted.dtype == torch.int64
    assert torch.equal(made.num_accepted, expected.num_accepted)
    assert torch.equal(made.token_ids, expected.token_ids)
    return made


@pytest.mark.parametrize("case", cases("sampler"), ids=str)
def test_conformance(case):
    case.check(TritonBackend())


@pytest.mark.parametrize("with_q", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize("vocab, uniform", [(1, None), (7, None), (7, NEVER), (4500, ALWAYS)])
def test_tokens_are_the_twins(vocab, uniform, with_q):
    """Part of a block; several blocks in two splits."""
    agrees(batch(vocab, with_q=with_q, uniform=uniform))


@pytest.mark.parametrize("max_drafts", [0, 1, 5])
def test_more_or_fewer_columns_than_drafts(max_drafts):
    agrees(batch(7, with_q=True, uniform=ALWAYS) | {"max_drafts": max_drafts})


@pytest.mark.parametrize("with_q", [False, True], ids=["one-hot", "sampled"])
def test_numbers_that_are_no_probabilities(with_q):
    """NaN, infinity, negative numbers and rows of nothing, in p and in q."""
    arguments = batch(1100, with_q=with_q, uniform=ALWAYS)
    p, q = arguments["target_probs"], arguments["draft_probs"]
    p[0], p[1, 5:900], p[2, 3], p[5, 0], p[6] = 0, math.nan, math.inf, -1, math.nan
    if q is not None:
        q[1, 1090], q[2, 0], q[3, 7], q[5], q[7] = math.nan, -1e-9, math.inf, 0, math.nan
    agrees(arguments)
    agrees(arguments | {"uniform": torch.full((ROWS,), NEVER, dtype=torch.float64)})


def test_greedy_is_one_hot_rows():
    """The target's best token stands at every place, and the walk ends behind the first other."""
    arguments = batch(50, with_q=False)
    best = torch.arange(ROWS) * 3
    arguments["target_probs"] = torch.nn.functional.one_hot(best, 50).float()
    arguments["draft_ids"] = best.clone()
    arguments["draft_ids"][6] = 1
    made = agrees(arguments)
    assert made.token_ids.tolist() == [
        [0, -1, -1, -1], [3, 6, 9, 12], [-1] * 4, [15, 18, -1, -1],
    ]  # fmt: skip
    assert made.num_accepted.tolist() == [0, 3, 0, 1]


def one_row_pair(p, draft, q, uniform, exponential=None):
    """One request of one draft: the tokens that it gets."""
    p = torch.tensor([p, p], dtype=torch.float32)
    made = agrees(
        {
            "target_probs": p,
            "query_start_loc": torch.tensor([0, 2]),
            "draft_ids": torch.tensor([draft, -1]),
            "draft_probs": None if q is None else torch.tensor([q, q], dtype=torch.float32),
            "uniform": torch.full((2,), uniform, dtype=torch.float64),
            "exponential": torch.ones_like(p) if exponential is None else exponential,
            "max_drafts": 1,
        }
    )
    return made.token_ids[0].tolist()


def test_B092_a_drafters_row_of_nan_recovers_from_p():
    p = [0.0, 0.1, 0.0, 0.9]
    assert one_row_pair(p, 0, [math.nan] * 4, ALWAYS) == [3, -1]


def test_B093_a_target_row_of_nan_stays_in_the_vocabulary():
    """1,000 tokens in a block of 1,024."""
    assert one_row_pair([math.nan] * 1000, 999, None, ALWAYS) == [0, -1]


def test_B098_the_residual_is_of_the_whole_vocabulary():
    """Without token 1 and 2 of q, token 0 would win."""
    assert one_row_pair([0.5, 0.3, 0.2], 0, [0.6, 0.0, 0.4], NEVER) == [1, -1]


def test_B099_nothing_left_of_p_less_q_draws_from_p():
    law = [0.2, 0.7, 0.1]
    barely = [0.2, 0.7, math.nextafter(0.1, 0)]
    assert one_row_pair(law, 2, law, NEVER) == [2, 1]  # p / q is 1: never rejected
    assert one_row_pair(barely, 0, [0.3, 0.7, 0.1], NEVER) == [1, -1]


def test_probability_zero_is_never_accepted_nor_drawn():
    """Not even at the smallest u, nor where all quotients underflow to 0."""
    assert one_row_pair([0.0, 1.0], 0, [1.0, 0.0], ALWAYS) == [1, -1]
    slow = torch.full((2, 2), 3e38)
    assert one_row_pair([0.0, 1e-30], 0, None, ALWAYS, slow) == [1, -1]


def test_B106_a_request_does_not_know_its_neighbours():
    """Requests 1 and 3 alone, in the other order, between others: the same tokens."""
    arguments = batch(300, with_q=True)
    made = rejection_sample(**arguments)
    rows = torch.tensor([5, 6, 7, 1, 2, 3, 4])
    moved = {
        name: value[rows]
        for name, value in arguments.items()
        if name not in ("query_start_loc", "max_drafts")
    }
    moved |= {"query_start_loc": torch.tensor([0, 3, 7]), "max_drafts": 3}
    again = rejection_sample(**moved)
    assert torch.equal(again.token_ids, made.token_ids[[3, 1]])
    assert torch.equal(again.num_accepted, made.num_accepted[[3, 1]])


def test_views_with_steps():
    arguments = batch(300, with_q=True)
    for name in ("target_probs", "draft_probs", "exponential"):
        arguments[name] = arguments[name].T.contiguous().T
    for name in ("uniform", "draft_ids"):
        arguments[name] = arguments[name].repeat_interleave(2)[::2]
    agrees(arguments)


def test_a_used_workspace_and_nothing_read_back():
    arguments = batch(4500, with_q=True)
    made = {
        "token_ids": torch.full((4, 4), 9),
        "num_accepted": torch.full((4,), 9),
        "workspace": sampler_workspace(20, 9000).fill_(0x7F),
    }
    with NothingReadBack():
        result = rejection_sample(**arguments, **made)
    assert result.token_ids is made["token_ids"]
    assert torch.equal(result.token_ids, twin(**arguments).token_ids)
    with pytest.raises(ValueError, match="workspace must be 360 uint8 bytes at least"):
        rejection_sample(**arguments, workspace=made["workspace"][:9])


def test_no_requests_and_no_rows():
    arguments = batch(7, with_q=False)
    none = arguments | {"query_start_loc": torch.tensor([0])}
    assert rejection_sample(**none).token_ids.shape == (0, 4)
    empty = {n: arguments[n][:0] for n in ("target_probs", "draft_ids", "uniform", "exponential")}
    agrees(arguments | empty | {"query_start_loc": torch.tensor([0, 0, 0])})


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_probs": torch.zeros(ROWS)},
        {"target_probs": torch.zeros(ROWS, 0)},
        {"query_start_loc": torch.zeros(0, dtype=torch.int64)},
        {"draft_ids": torch.zeros(ROWS - 1, dtype=torch.int64)},
        {"draft_probs": torch.zeros(ROWS, 8)},
        {"uniform": torch.zeros(ROWS)},
        {"exponential": torch.zeros(ROWS, 7, dtype=torch.int32)},
        {"max_drafts": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_what_the_twin_refuses(wrong):
    refuses_alike(rejection_sample, twin, batch(7, with_q=True) | wrong)


def test_refuses_other_dtypes_than_float32():
    arguments = batch(7, with_q=True)
    for name in ("target_probs", "draft_probs", "exponential"):
        with pytest.raises(TypeError, match=f"{name} must be float32, got a float64"):
            rejection_sample(**arguments | {name: arguments[name].double()})


def test_noise_is_the_twins():
    """Seeds of both signs and at the ends of 64 bits; (1, 2) and (2, 1) are strangers."""
    seeds = torch.tensor([0, -5, 2**63 - 1, -(2**63), 1, 2])
    positions = torch.tensor([0, 3, 7, 2**40, 2, 1])
    uniform, exponential = batch_noise(seeds, positions, 1027)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        expected = position_noise(seed, position, 1027)
        assert uniform[row].item() == expected.uniform
        # The last bit of a float64 logarithm may differ, and with it, rarely, that of a float32.
        torch.testing.assert_close(exponential[row], expected.exponential, rtol=1.2e-7, atol=0)
    assert uniform.unique().numel() == 6


def test_noise_of_a_larger_vocabulary_begins_the_same():
    seed, position = torch.tensor([7]), torch.tensor([0])
    few, many = (batch_noise(seed, position, vocab)[1][0] for vocab in (10, 300))
    assert torch.equal(few, many[:10])


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": torch.zeros(2, dtype=torch.int32)},
        {"positions": torch.zeros(3, dtype=torch.int64)},
        {"positions": torch.zeros(2)},
        {"vocab": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_noise_refuses(wrong):
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        batch_noise(**{"seeds": two, "positions": two, "vocab": 4} | wrong)


def test_signatures_name_every_parameter():
    for made in (*sampler.signatures(), *noise.signatures()):
        assert {*made.signature, *made.constexprs} == set(made.fn.arg_names), made.name

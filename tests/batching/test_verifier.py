"""Rung 11: verifier rows against one-token steps, and which logits judge which draft."""

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.attention import latent_attention, sparse_decode, sparse_extend
from mla_ref.batching import Step
from mla_ref.batching.verifier import VerifierRows, one_row_requests
from mla_ref.cache import write_rows
from mla_ref.indexer import positions_to_slots
from mla_ref.numerics import compare, oracle_attention

PAGE, D_C, D_ROW = 4, 16, 24


def verifier_step(computed: list[int], new: list[int], **padding: int) -> Step:
    widest = max(-(-(c + n) // PAGE) for c, n in zip(computed, new, strict=True))
    table = torch.randperm(widest * len(new) + 3)[: widest * len(new)].reshape(len(new), widest)
    return Step.build(computed, new, table, PAGE, prompt_lens=computed, **padding)


def test_B005_each_candidate_has_its_own_causal_length() -> None:
    step = one_row_requests(verifier_step([10], [4]))
    assert step.seq_lens.tolist() == [11, 12, 13, 14]
    assert step.query_lens == (1, 1, 1, 1)


def test_B006_flattening_is_request_by_request() -> None:
    """TensorRT-LLM#9045: an expansion in the transposed order mixes requests up."""
    step = verifier_step([1, 60, 126], [4, 4, 4])
    flat = one_row_requests(step)
    assert flat.num_reqs == flat.num_reqs_padded == 12
    assert torch.equal(flat.block_table, step.block_table.repeat_interleave(4, 0))
    lens = [length - 4 + j + 1 for length in (5, 64, 130) for j in range(4)]
    assert flat.seq_lens.tolist() == lens
    assert flat.query_start_loc.tolist() == list(range(13))
    for name in ("positions", "slot_mapping", "visible_lens"):
        assert torch.equal(getattr(flat, name), getattr(step, name))


def test_padding_stays_padding() -> None:
    step = verifier_step([3, 0], [2, 1], num_reqs_padded=3, num_tokens_padded=6)
    flat = one_row_requests(step)
    assert (flat.num_reqs, flat.num_reqs_padded, flat.num_tokens) == (3, 6, 3)
    assert flat.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert flat.seq_lens.tolist() == [4, 5, 1, 0, 0, 0]
    assert flat.request_of_row.tolist() == [0, 1, 2, -1, -1, -1]
    assert (flat.block_table[3:] == -1).all()
    assert flat.is_prefilling.tolist() == [False] * 6


@pytest.mark.parametrize("prompt_lens", [None, []])
def test_a_step_of_padding_alone_is_padded_requests(prompt_lens) -> None:
    table = torch.zeros(0, 1, dtype=torch.int64)
    step = Step.build([], [], table, 64, prompt_lens=prompt_lens, num_tokens_padded=4)
    flat = one_row_requests(step)
    assert (flat.num_reqs, flat.num_reqs_padded, flat.query_lens) == (0, 4, (0,) * 4)
    assert flat.query_start_loc.tolist() == [0] * 5
    assert flat.seq_lens.tolist() == [0] * 4 and flat.request_of_row.tolist() == [-1] * 4
    assert flat.block_table.tolist() == [[-1]] * 4
    flags = flat.is_prefilling
    assert flags is None if prompt_lens is None else flags.tolist() == [False] * 4


def problem(step: Step, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache whose unused slots are NaN, and each row's causal list of slots."""
    pages = int(step.block_table.max()) + 1
    cache = torch.full((pages, PAGE, D_ROW), torch.nan, dtype=torch.float64)
    everything = Step.build(
        [0] * step.num_reqs, step.seq_lens[: step.num_reqs].tolist(), step.block_table, PAGE
    )
    rows = torch.randn(everything.num_tokens, D_ROW, dtype=torch.float64)
    write_rows(cache, rows, everything.slot_mapping)
    longest = int(step.visible_lens.max())
    positions = torch.arange(longest).expand(step.num_tokens_padded, longest)
    positions = positions.masked_fill(positions >= step.visible_lens[:, None], -1)
    lists = positions_to_slots(positions, step.request_of_row, step.block_table, PAGE)
    return torch.randn(step.num_tokens_padded, heads, D_ROW, dtype=torch.float64), cache, lists


def hides_earlier_candidates(step: Step, lists: Tensor) -> Tensor:
    """What decode was believed to do: every row sees the keys before the step, and itself."""
    keep = step.seq_lens[step.request_of_row] - torch.tensor(step.query_lens)[step.request_of_row]
    column = torch.arange(lists.shape[1])
    own = column == step.visible_lens[:, None] - 1
    return lists.masked_fill(~((column < keep[:, None]) | own), -1)


# serving's own batch sets, scaled to small lengths: (tokens in the cache, new tokens)
BATCHES = {
    "spec_decode_small": ([12, 25, 51, 102], [4, 4, 4, 4]),
    "spec_decode_medium": ([51, 10, 20, 8], [8, 8, 8, 8]),
    "ragged": ([9, 17, 1], [4, 1, 3]),
    "first page": ([1], [4]),
    "across a page": ([3, 2], [4, 2]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", [1, 9])
def test_B001_a_verifier_batch_is_its_one_token_steps(batch: str, heads: int) -> None:
    """Decode, extend, one-token decode and token-wise causal attention are one result."""
    computed, new = BATCHES[batch]
    step = verifier_step(computed, new)
    q, cache, lists = problem(step, heads)
    args = {"softmax_scale": 0.3, "kv_lora_rank": D_C}
    decode = sparse_decode(q, cache, lists, num_splits=3, **args)
    dense = latent_attention(q, cache, **step.batch, **args)
    flat = latent_attention(q, cache, **one_row_requests(step).batch, **args)
    extend = sparse_extend(q, cache, lists, **args)
    alone = [
        sparse_decode(q[row : row + 1], cache, lists[row : row + 1], num_splits=3, **args)
        for row in range(step.num_tokens)
    ]
    one_by_one = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    flat_rows = cache.flatten(0, 1)
    for row in range(step.num_tokens):
        keys = flat_rows[lists[row][lists[row] >= 0]][:, None]
        exact = oracle_attention(
            q[row : row + 1],
            keys,
            keys[..., :D_C],
            torch.ones(1, len(keys), dtype=torch.bool),
            softmax_scale=0.3,
        )
        assert compare(decode.out[row : row + 1], exact.out).agrees(rel_l2=1e-12)
    for other in (dense, flat, extend, one_by_one):
        for actual, expected in zip(decode, other, strict=True):
            assert compare(actual, expected).agrees(rel_l2=1e-12)
    hidden = hides_earlier_candidates(step, lists)
    if max(new) > 1:
        believed = sparse_decode(q, cache, hidden, num_splits=3, **args)
        assert compare(believed.out, decode.out).rel_l2 > 1e-2


def test_rows_of_a_step_and_the_drafts_that_they_judge() -> None:
    rows = VerifierRows.of([4, 100, 3, 100, 2], [3, 0, 2, 0, 1])
    assert rows.logits.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert rows.target.tolist() == [0, 1, 2, 5, 6, 9]
    assert rows.bonus.tolist() == [3, 4, 7, 8, 10]
    assert rows.draft.tolist() == [1, 2, 3, 105, 106, 208]


def test_rows_of_nobody() -> None:
    rows = VerifierRows.of([], [])
    assert rows.logits.tolist() == rows.target.tolist() == rows.bonus.tolist() == []


@pytest.mark.parametrize(
    ("query_lens", "num_drafts", "message"),
    [
        ([4], [3, 1], "query_lens has 1 requests but num_drafts has 2"),
        ([4], [4], r"num_drafts\[0\] must be below the request's 4 new tokens, got 4"),
        ([2, 0], [1, 0], r"num_drafts\[1\] must be below the request's 0 new tokens"),
        ([4], [-1], "num_drafts must be at least 0"),
    ],
)
def test_a_draft_without_a_token_before_it_is_refused(query_lens, num_drafts, message) -> None:
    with pytest.raises(ValueError, match=message):
        raw(VerifierRows.of)(query_lens, num_drafts)

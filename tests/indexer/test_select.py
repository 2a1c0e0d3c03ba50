"""Selection over a ragged batch: against a plain loop, on pages with poison in unwritten slots."""

from dataclasses import dataclass, replace

import pytest
import torch
from tests.support import GARBAGE, raw
from torch import Tensor

from mla_ref.bench import TensorMemory
from mla_ref.cache import new_index_cache, quantise_index_keys, write_index_keys
from mla_ref.indexer import select_positions
from mla_ref.numerics.float8 import from_e4m3

HEADS = 3


@dataclass(frozen=True)
class Problem:
    """Arguments of `select_positions`, and each request's queries, weights and keys."""

    queries: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    cache: Tensor
    block_table: Tensor
    topk: int

    def select(self, **changed: object) -> Tensor:
        query_lens = [len(q) for q in self.queries]
        arguments = {
            "q": torch.cat(self.queries),
            "weights": torch.cat(self.weights),
            "index_cache": self.cache,
            "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0),
            "seq_lens": torch.tensor([len(k) for k in self.keys]),
            "block_table": self.block_table,
            "topk": self.topk,
        }
        return raw(select_positions)(**(arguments | changed))

    def by_loop(self) -> list[list[int]]:
        """Row by row, key by key and head by head in float64; Python's stable sort."""
        lists = []
        for queries, weights, keys in zip(self.queries, self.weights, self.keys, strict=True):
            if self.cache.dtype == torch.uint8:
                queries, keys = dequantised(queries), dequantised(keys)
            for i, (q, w) in enumerate(zip(queries.double(), weights.double(), strict=True)):
                visible = keys[: len(keys) - len(queries) + i + 1].double()
                products = torch.stack([visible @ head for head in q]).clamp(min=0)
                scores = (w[:, None] * products).sum(0).tolist()
                best = sorted(range(len(scores)), key=lambda s: -scores[s])[: self.topk]
                lists.append(best + [-1] * (self.topk - len(best)))
        return lists

    def reordered(self, order: list[int]) -> "Problem":
        """The same requests, in the same pages, in another order."""
        return replace(
            self,
            queries=tuple(self.queries[r] for r in order),
            weights=tuple(self.weights[r] for r in order),
            keys=tuple(self.keys[r] for r in order),
            block_table=self.block_table[order],
        )


def dequantised(x: Tensor, rule: str = "pow2-floor") -> Tensor:
    data, scale = quantise_index_keys(x.float(), rule)
    return from_e4m3(data) * scale[..., None]


def problem(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    topk: int = 6,
    page_size: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    """Pages in a random order. A slot that no token has is NaN, or bytes 0xFF, which are NaN."""
    generator = torch.Generator().manual_seed(seed)
    width = 128 if dtype == torch.uint8 else 12
    plain = torch.float32 if dtype == torch.uint8 else dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(plain)

    needed = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(needed) + 3
    cache = new_index_cache(num_pages, page_size, dtype=dtype, head_dim=width)
    cache.fill_(0xFF if dtype == torch.uint8 else torch.nan)
    free = torch.randperm(num_pages, generator=generator).tolist()
    block_table = torch.full((len(seq_lens), max([0, *needed]) + 2), GARBAGE, dtype=torch.int32)
    keys = tuple(normal(length, width) for length in seq_lens)
    for request, request_keys in enumerate(keys):
        block_table[request, : needed[request]] = torch.tensor(
            [free.pop() for _ in range(needed[request])], dtype=torch.int32
        )
        positions = torch.arange(len(request_keys))
        pages = block_table[request].long()[positions // page_size]
        write_index_keys(cache, request_keys, pages * page_size + positions % page_size)
    return Problem(
        queries=tuple(normal(n, HEADS, width) for n in query_lens),
        weights=tuple(normal(n, HEADS) for n in query_lens),
        keys=keys,
        cache=cache,
        block_table=block_table,
        topk=topk,
    )


# Prefill, decode, a verifier's rows, a request without new tokens, empty requests, short ones.
BATCHES = [
    ([9], [9]),
    ([1], [23]),
    ([4, 1, 7], [30, 11, 7]),
    ([0, 2, 0, 3], [0, 2, 8, 17]),
    ([1, 1, 1], [1, 6, 5]),
]
DTYPES = [torch.float64, torch.float32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_equals_a_plain_loop(
    query_lens: list[int], seq_lens: list[int], page_size: int, dtype: torch.dtype
) -> None:
    given = problem(query_lens, seq_lens, page_size=page_size, dtype=dtype)
    got = given.select()
    assert got.dtype == torch.int32 and got.shape == (sum(query_lens), 6)
    assert got.tolist() == given.by_loop()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [0, 1, 8, 100])
def test_any_width(topk: int, dtype: torch.dtype) -> None:
    given = problem([3, 2], [8, 30], topk=topk, dtype=dtype)
    assert given.select().tolist() == given.by_loop()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permuting_requests_permutes_the_lists(dtype: torch.dtype) -> None:
    given = problem([4, 1, 0, 7], [30, 11, 3, 7], dtype=dtype)
    order = [2, 3, 0, 1]
    parts = given.select().split([4, 1, 0, 7])
    assert torch.equal(given.reordered(order).select(), torch.cat([parts[r] for r in order]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_request_alone_gives_its_part_of_the_batch(dtype: torch.dtype) -> None:
    given = problem([4, 1, 7], [30, 11, 7], dtype=dtype)
    alone = [given.reordered([request]).select() for request in range(3)]
    assert torch.equal(torch.cat(alone), given.select())


def test_nobody() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    found = select_positions(
        torch.empty(0, HEADS, 12),
        torch.empty(0, HEADS),
        torch.zeros(1, 5, 12),
        query_start_loc=torch.tensor([0]),
        seq_lens=nothing,
        block_table=nothing.reshape(0, 2),
        topk=6,
    )
    assert found.shape == (0, 6) and found.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [52, 76, 88, 96])
def test_B042_a_prompt_in_two_steps_selects_what_one_step_selects(
    cut: int, dtype: torch.dtype
) -> None:
    whole = problem([100], [100], topk=4, dtype=dtype)
    expected = whole.select()
    for first, last in ((0, cut), (cut, 100)):
        part = replace(
            whole,
            queries=(whole.queries[0][first:last],),
            weights=(whole.weights[0][first:last],),
            keys=(whole.keys[0][:last],),
        )
        assert torch.equal(part.select(), expected[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_keys_change_nothing(dtype: torch.dtype) -> None:
    given = problem([4, 1, 7], [30, 11, 7], dtype=dtype)
    expected = given.by_loop()
    for chunk in (3, 8, 30, 10**6):
        assert given.select(chunk=chunk).tolist() == expected


def test_ties_go_to_the_earlier_key_across_pages_and_chunks() -> None:
    given = problem([1], [23])
    same = replace(given, cache=torch.where(given.cache.isnan(), torch.nan, 1.0))
    for chunk in (1, 4, 100):
        assert same.select(chunk=chunk).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_the_scale_rule_is_the_one_of_the_queries() -> None:
    """By the scores of what was selected: in float32 two keys a hair apart may change places."""
    given = problem([40], [200], topk=20, dtype=torch.uint8)
    keys = dequantised(given.keys[0]).double()
    future = torch.arange(200) > torch.arange(160, 200)[:, None]
    wrong = {"pow2-floor": "fp32", "fp32": "pow2-floor"}
    for rule in wrong:
        q = dequantised(given.queries[0], rule).double()
        scores = (torch.relu(q @ keys.T) * given.weights[0].double()[..., None]).sum(1)
        best = scores.masked_fill(future, -torch.inf).topk(20).values
        for asked, largest_error in ((rule, 1e-4), (wrong[rule], torch.inf)):
            found = scores.gather(1, given.select(scale_rule=asked).long())
            error = float((found - best).abs().max())
            assert error < largest_error and (asked == rule or error > 0.01)


def test_scores_of_128k_keys_are_never_held_at_once() -> None:
    length, rows, chunk = 131_072, 2, 4096
    cache = torch.randn(length // 64, 64, 8)
    q, weights = torch.randn(rows, HEADS, 8), torch.randn(rows, HEADS)
    with TensorMemory() as memory:
        select_positions(
            q,
            weights,
            cache,
            query_start_loc=torch.tensor([0, rows]),
            seq_lens=torch.tensor([length]),
            block_table=torch.arange(length // 64)[None],
            topk=64,
            chunk=chunk,
        )
    # No tensor is as long as the context but the list of its pages, and the products of the heads
    # [rows, heads, chunk] are the largest at a time beside the keys [chunk, 8].
    assert memory.largest_tensor.numel <= chunk * max(8, rows * HEADS)
    assert memory.peak_bytes < 4 * chunk * (8 + 3 * rows * HEADS + 10 * rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8], ids=str)
def test_bad_input_is_named(dtype: torch.dtype) -> None:
    given = problem([2, 1], [7, 3], dtype=dtype)
    q, weights = torch.cat(given.queries), torch.cat(given.weights)
    outside = given.block_table.clone()
    outside[1, 0] = -1
    for name, wrong in (
        ("q", q[0]),
        ("q", q[:2]),
        ("q", q[..., :-1]),
        ("q", q.long()),
        ("weights", weights[:2]),
        ("weights", weights[:, :1]),
        ("weights", None),
        ("index_cache", None),
        ("query_start_loc", torch.tensor([0, 1, 2, 3])),
        ("query_start_loc", torch.tensor([0, 3, 2])),
        ("seq_lens", torch.tensor([1, 3])),
        ("seq_lens", torch.tensor([7.0, 3.0])),
        ("block_table", given.block_table[:, :1]),
        ("block_table", given.block_table[:1]),
        ("block_table", outside),
        ("topk", -1),
        ("topk", None),
        ("chunk", 0),
        ("scale_rule", "pow3"),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            given.select(**{name: wrong})

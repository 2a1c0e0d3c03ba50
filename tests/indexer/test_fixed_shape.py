"""The fixed shape: its lists are those of `select_positions`, and so are its refusals."""

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.cache import new_index_cache, write_index_keys
from mla_ref.indexer import select_positions, select_positions_fixed

HEADS, TOPK = 3, 5
DTYPES = [torch.float64, torch.uint8]


def arguments(dtype: torch.dtype) -> dict[str, object]:
    """Two requests of 7 and 3 keys, with 2 and 1 rows, and a row of padding."""
    width = 128 if dtype == torch.uint8 else 16
    cache = new_index_cache(6, 4, dtype=dtype, head_dim=width)
    write_index_keys(cache, torch.randn(24, width, dtype=torch.float64), torch.arange(24))
    return {
        "q": torch.randn(4, HEADS, width, dtype=torch.float64),
        "weights": torch.randn(4, HEADS, dtype=torch.float64),
        "index_cache": cache,
        "visible_lens": torch.tensor([6, 7, 3, 0]),
        "request_of_row": torch.tensor([0, 0, 1, -1]),
        "block_table": torch.tensor([[4, 1], [2, -1]]),
        "topk": TOPK,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lists_are_those_of_a_step_with_lengths(dtype: torch.dtype) -> None:
    given = arguments(dtype)
    fixed = raw(select_positions_fixed)(**given)
    ragged = raw(select_positions)(
        *(given[name][:3] for name in ("q", "weights")),  # type: ignore[index]
        given["index_cache"],
        query_start_loc=torch.tensor([0, 2, 3]),
        seq_lens=torch.tensor([7, 3]),
        block_table=given["block_table"],
        topk=TOPK,
    )
    assert torch.equal(fixed[:3], ragged)
    assert fixed[3].tolist() == [-1] * TOPK


@pytest.mark.parametrize("pages", [2, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_does_not_fit_is_named_with_any_table(dtype: torch.dtype, pages: int) -> None:
    """Also with an empty table, where nothing is scored and so nothing else would look."""
    given = arguments(dtype)
    given["block_table"] = given["block_table"][:pages]  # type: ignore[index]
    q, weights = given["q"], given["weights"]
    assert isinstance(q, Tensor) and isinstance(weights, Tensor)
    for name, wrong in (
        ("q", q[..., :8]),
        ("q", q[0]),
        ("q", q.long()),
        ("weights", None),
        ("weights", weights[:2]),
        ("weights", weights[:, :1]),
        ("weights", weights.long()),
        ("index_cache", None),
        ("visible_lens", torch.tensor([6, 7, 3])),
        ("request_of_row", torch.tensor([0.0, 0.0, 1.0, -1.0])),
        ("block_table", torch.tensor([4, 1])),
        ("topk", -1),
        ("scale_rule", "pow3"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            raw(select_positions_fixed)(**(given | {name: wrong}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_without_pages_gives_lists_without_keys(dtype: torch.dtype) -> None:
    given = arguments(dtype)
    given |= {
        "index_cache": given["index_cache"][:0],  # type: ignore[index]
        "block_table": torch.full((2, 2), -1),
        "visible_lens": torch.zeros(4, dtype=torch.int64),
    }
    assert raw(select_positions_fixed)(**given).eq(-1).all()

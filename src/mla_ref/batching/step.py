"""One forward step of a ragged batch, as the attention and the cache need it described."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.cache import pages_needed, slot_mapping
from mla_ref.checks import describe, require_count


@dataclass(frozen=True)
class Step:
    """Which new tokens run, at which positions, and in which slots their rows are written.

    Attributes:
        query_start_loc: Offsets of each request's new tokens, from 0 to num_tokens.
        seq_lens: Length of each request with its new tokens.
        block_table: Pages of each request in order.
        positions: Position of each new token in its request.
        slot_mapping: Slot of each new token's row.
        page_size: Tokens a page.
    """

    query_start_loc: Int[Tensor, " b_plus_1"]
    seq_lens: Int[Tensor, " b"]
    block_table: Int[Tensor, "b max_pages"]
    positions: Int[Tensor, " num_tokens"]
    slot_mapping: Int[Tensor, " num_tokens"]
    page_size: int

    @classmethod
    def build(
        cls,
        computed_lens: Sequence[int],
        query_lens: Sequence[int],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
    ) -> "Step":
        """Describe a step in which request r runs query_lens[r] tokens after computed_lens[r].

        Raises:
            ValueError: The lists differ in length, a number is negative, or the block table is
                too narrow.
        """
        for name, lens in (("computed_lens", computed_lens), ("query_lens", query_lens)):
            if not isinstance(lens, Sequence):
                raise TypeError(f"{name} must be a sequence of ints, got {describe(lens)}")
            for value in lens:
                require_count(name, value)
        if len(computed_lens) != len(query_lens):
            raise ValueError(
                f"computed_lens has {len(computed_lens)} requests but query_lens has "
                f"{len(query_lens)}"
            )
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0)
        seq_lens = torch.tensor(
            [c + q for c, q in zip(computed_lens, query_lens, strict=True)], dtype=torch.int64
        )
        slots = slot_mapping(block_table, query_start_loc, seq_lens, page_size)
        positions = [torch.arange(c, c + q) for c, q in zip(computed_lens, query_lens, strict=True)]
        return cls(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            slot_mapping=slots,
            page_size=page_size,
        )

    @classmethod
    def one_request(cls, computed_len: int, query_len: int, page_size: int) -> "Step":
        """A step of one request whose pages are 0, 1, 2, ... in order."""
        require_count("computed_len", computed_len)
        require_count("query_len", query_len)
        pages = pages_needed(computed_len + query_len, page_size)
        return cls.build([computed_len], [query_len], torch.arange(pages)[None], page_size)

    @property
    def batch(self) -> dict[str, Any]:
        """The keyword arguments by which attention over pages knows the batch."""
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
        }

    @property
    def request_of_row(self) -> Int[Tensor, " num_tokens"]:
        """Which request each new token belongs to."""
        requests = torch.arange(self.seq_lens.shape[0])
        return requests.repeat_interleave(self.query_start_loc.diff())

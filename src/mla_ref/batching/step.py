"""One forward step of a ragged batch, as the attention, the cache and the router need it described.

Facts that decide something (which kernel runs, how a batch is cut) are needed on the host, before
the step is launched; facts that a kernel reads are needed on the device. So some stand here twice.
Nothing on the host is ever made by reading the device back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mla_ref.cache import pages_needed, slot_mapping
from mla_ref.checks import describe, require_count, require_integer


@dataclass(frozen=True)
class Step:
    """Which new tokens run, at which positions, and in which slots their rows are written.

    A step that replays a CUDA graph is padded to the graph's size. Padded requests have length 0,
    no new token, no page (-1) and are not prefilling; padded tokens belong to request -1, see no
    key and are written nowhere (-1). A kernel that obeys these values needs no real count, and the
    host has both (`num_reqs`, `num_tokens` are the real ones; vLLM's `num_reqs` is the padded one
    where a full graph runs, which is how stale rows came to decide routes: vllm#41841).

    Attributes:
        query_start_loc: Offsets of each request's new tokens, from 0 to num_tokens; padded entries
            repeat the last.
        seq_lens: Length of each request with its new tokens.
        block_table: Pages of each request in order.
        positions: Position of each new token in its request; 0 for padding.
        visible_lens: Keys that each new token may see: its position + 1; 0 for padding.
        request_of_row: Which request each new token belongs to; -1 for padding.
        slot_mapping: Slot of each new token's row; -1 for padding.
        page_size: Tokens a page.
        query_lens: New tokens of each request, on the host; 0 for padding.
        is_prefilling: Whether each request still runs its prompt, on the host; False for padding.
            None: nobody has said, and a router must not guess.
        num_reqs: Real requests.
        num_tokens: Real new tokens.
    """

    query_start_loc: Int[Tensor, " b_plus_1"]
    seq_lens: Int[Tensor, " b"]
    block_table: Int[Tensor, "b max_pages"]
    positions: Int[Tensor, " padded_tokens"]
    visible_lens: Int[Tensor, " padded_tokens"]
    request_of_row: Int[Tensor, " padded_tokens"]
    slot_mapping: Int[Tensor, " padded_tokens"]
    page_size: int
    query_lens: tuple[int, ...]
    is_prefilling: Bool[Tensor, " b"] | None
    num_reqs: int
    num_tokens: int

    @classmethod
    def build(
        cls,
        computed_lens: Sequence[int],
        query_lens: Sequence[int],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
        *,
        prompt_lens: Sequence[int] | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> "Step":
        """Describe a step in which request r runs query_lens[r] tokens after computed_lens[r].

        Args:
            computed_lens: Tokens of each request that the cache holds.
            query_lens: New tokens of each request.
            block_table: Pages of each request, on the device that the step runs on.
            page_size: Tokens a page.
            prompt_lens: Tokens of each prompt. A request is prefilling while its computed tokens
                are fewer than these; a scheduler's fact, never a guess from lengths.
            num_reqs_padded: Requests of the graph that is replayed.
            num_tokens_padded: Tokens of the graph that is replayed.

        Raises:
            ValueError: The lists differ in length, a number is negative, the block table is too
                narrow, or a padded count is smaller than the real one.
        """
        lists = {"computed_lens": computed_lens, "query_lens": query_lens}
        if prompt_lens is not None:
            lists["prompt_lens"] = prompt_lens
        for name, lens in lists.items():
            if not isinstance(lens, Sequence):
                raise TypeError(f"{name} must be a sequence of ints, got {describe(lens)}")
            for value in lens:
                require_count(name, value)
            if len(lens) != len(computed_lens):
                raise ValueError(
                    f"computed_lens has {len(computed_lens)} requests but {name} has {len(lens)}"
                )
        require_integer("block_table", block_table, "b max_pages")
        device, reqs, tokens = block_table.device, len(query_lens), sum(query_lens)
        extra_reqs = _padding("num_reqs_padded", num_reqs_padded, reqs)
        extra_tokens = _padding("num_tokens_padded", num_tokens_padded, tokens)
        pairs = list(zip(computed_lens, query_lens, strict=True))
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0)
        seq_lens = torch.tensor([c + q for c, q in pairs], dtype=torch.int64)
        slots = slot_mapping(
            block_table, query_start_loc.to(device), seq_lens.to(device), page_size
        )
        positions = torch.tensor([p for c, q in pairs for p in range(c, c + q)], dtype=torch.int64)
        request_of_row = torch.tensor(
            [r for r, (_, q) in enumerate(pairs) for _ in range(q)], dtype=torch.int64
        )
        prefilling = None
        if prompt_lens is not None:
            prefilling = torch.tensor(
                [c < p for c, p in zip(computed_lens, prompt_lens, strict=True)]
                + [False] * extra_reqs,
                dtype=torch.bool,
            )

        def padded(x: Tensor, extra: int, value: int) -> Tensor:
            return torch.nn.functional.pad(x, (0, extra), value=value).to(device)

        return cls(
            query_start_loc=padded(query_start_loc, extra_reqs, tokens),
            seq_lens=padded(seq_lens, extra_reqs, 0),
            block_table=torch.cat(
                [block_table, block_table.new_full((extra_reqs, block_table.shape[1]), -1)]
            )
            if extra_reqs
            else block_table,
            positions=padded(positions, extra_tokens, 0),
            visible_lens=padded(positions + 1, extra_tokens, 0),
            request_of_row=padded(request_of_row, extra_tokens, -1),
            slot_mapping=padded(slots, extra_tokens, -1),
            page_size=page_size,
            query_lens=(*query_lens, *(0,) * extra_reqs),
            is_prefilling=prefilling,
            num_reqs=reqs,
            num_tokens=tokens,
        )

    @classmethod
    def one_request(cls, computed_len: int, query_len: int, page_size: int) -> "Step":
        """A step of one request whose pages are 0, 1, 2, ... in order."""
        require_count("computed_len", computed_len)
        require_count("query_len", query_len)
        pages = pages_needed(computed_len + query_len, page_size)
        return cls.build([computed_len], [query_len], torch.arange(pages)[None], page_size)

    @property
    def num_reqs_padded(self) -> int:
        """Requests with padding."""
        return len(self.query_lens)

    @property
    def num_tokens_padded(self) -> int:
        """New tokens with padding: the rows that a kernel gets."""
        return self.positions.shape[0]

    @property
    def max_query_len(self) -> int:
        """New tokens of the request that has the most, from the host."""
        return max(self.query_lens, default=0)

    @property
    def batch(self) -> dict[str, Any]:
        """The keyword arguments by which attention over pages knows the batch."""
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
        }


def _padding(name: str, padded: int | None, real: int) -> int:
    if padded is None:
        return 0
    if require_count(name, padded) < real:
        raise ValueError(f"{name} must be at least the {real} that are real, got {padded}")
    return padded - real

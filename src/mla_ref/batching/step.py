"""One forward step of a ragged batch, as the attention, the cache and the router need it described.

Facts that decide something (which kernel runs, how a batch is cut) are needed on the host, before
the step is launched; facts that a kernel reads are needed on the device. So some stand here twice.
Nothing on the host is ever made by reading the device back: a step is built on the host and moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mla_ref.batching.transfer import move_together
from mla_ref.cache import pages_needed, slot_mapping
from mla_ref.checks import describe, require_count, require_integer

# What a kernel reads of a step, in the order in which it travels to the device.
ON_DEVICE = (
    "query_start_loc",
    "seq_lens",
    "block_table",
    "positions",
    "visible_lens",
    "request_of_row",
    "slot_mapping",
)


class HostBatch(NamedTuple):
    """The batch on the host, by the names of attention over pages, whose loops go by its numbers.

    Attributes:
        query_start_loc: As in `Step`.
        seq_lens: As in `Step`.
        block_table: As in `Step`.
    """

    query_start_loc: Int[Tensor, " b_plus_1"]
    seq_lens: Int[Tensor, " b"]
    block_table: Int[Tensor, "b max_pages"]


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
        host: The batch on the host, of a step that lies on a device; else None.
        captured: Whether the step stands for every batch of its size, as in a graph. A replay runs
            no Python, so nothing may look at the numbers that happened to be there.
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
    host: HostBatch | None = None
    captured: bool = False

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
            block_table: Pages of each request, on the host; see `to`.
            page_size: Tokens a page.
            prompt_lens: Tokens of each prompt. A request is prefilling while its computed tokens
                are fewer than these; a scheduler's fact, never a guess from lengths.
            num_reqs_padded: Requests of the graph that is replayed.
            num_tokens_padded: Tokens of the graph that is replayed.

        Raises:
            TypeError: A list is none, or the block table lies on a device.
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
        if block_table.device.type != "cpu":
            raise TypeError(
                f"block_table must be on the host, got {describe(block_table)} on "
                f"{block_table.device}: reading it would wait for the device"
            )
        reqs, tokens = len(query_lens), sum(query_lens)
        extra_reqs = _padding("num_reqs_padded", num_reqs_padded, reqs)
        extra_tokens = _padding("num_tokens_padded", num_tokens_padded, tokens)
        pairs = list(zip(computed_lens, query_lens, strict=True))
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0)
        seq_lens = torch.tensor([c + q for c, q in pairs], dtype=torch.int64)
        slots = slot_mapping(block_table, query_start_loc, seq_lens, page_size)
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
            return torch.nn.functional.pad(x, (0, extra), value=value)

        if extra_reqs:
            no_pages = block_table.new_full((extra_reqs, block_table.shape[1]), -1)
            block_table = torch.cat([block_table, no_pages])
        return cls(
            query_start_loc=padded(query_start_loc, extra_reqs, tokens),
            seq_lens=padded(seq_lens, extra_reqs, 0),
            block_table=block_table,
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
    def is_on_cpu(self) -> bool:
        """Whether what a kernel reads lies on the CPU."""
        return self.positions.device.type == "cpu"

    @property
    def on_host(self) -> HostBatch:
        """What loops over requests and pages go by.

        Raises:
            ValueError: The step is one that is captured, or was put on a device by other means
                than `to`.
        """
        found = self.host
        if self.is_on_cpu and not self.captured:
            found = HostBatch(self.query_start_loc, self.seq_lens, self.block_table)
        if found is None:
            raise ValueError("step must have its batch on the host, got one that is captured")
        return found

    @property
    def batch(self) -> dict[str, Any]:
        """The same as keyword arguments of attention over pages."""
        return self.on_host._asdict()

    @property
    def validates(self) -> bool:
        """Whether what runs the step may look at its numbers. Off the CPU it would have to wait.

        `build` has looked at them.
        """
        return self.is_on_cpu and not self.captured

    @property
    def on_device(self) -> list[Tensor]:
        """What a kernel reads, in the order of `ON_DEVICE`."""
        return [getattr(self, name) for name in ON_DEVICE]

    def to(self, device: torch.device) -> "Step":
        """The same step with what a kernel reads on a device, moved there by one copy."""
        return self.moved(move_together(self.on_device, device))

    def moved(self, on_device: Sequence[Tensor]) -> "Step":
        """The same step on tensors that the caller has moved, in the order of `ON_DEVICE`."""
        moved = replace(self, **_named(on_device))
        return moved if moved.is_on_cpu else replace(moved, host=self.on_host)

    def captured_on(self, on_device: Sequence[Tensor]) -> "Step":
        """A step of this size that stands for all of them: every request and row is looked at.

        Args:
            on_device: Its tensors, in the order of `ON_DEVICE`, which are to be written before
                each run.
        """
        return replace(
            self,
            **_named(on_device),
            num_reqs=self.num_reqs_padded,
            num_tokens=self.num_tokens_padded,
            host=None,
            captured=True,
        )


def _named(on_device: Sequence[Tensor]) -> dict[str, Any]:
    return dict(zip(ON_DEVICE, on_device, strict=True))


def _padding(name: str, padded: int | None, real: int) -> int:
    if padded is None:
        return 0
    if require_count(name, padded) < real:
        raise ValueError(f"{name} must be at least the {real} that are real, got {padded}")
    return padded - real

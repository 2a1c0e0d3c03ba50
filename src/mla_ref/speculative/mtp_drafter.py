"""Drafting with the MTP module: one pass over the target's new rows, then token by token.

The module has a row for each position, as the target has. After a step of the target:

    first pass   positions that are valid now, with the target's hidden states; the token of each
                 is the one *after* it, so the newest token stands at the last valid position
    then         one position further each time, on the module's own hidden state and its own guess

The later rows are guesses: the next first pass writes over them with what came true. So after it
the cache holds what a fresh run over the whole text would have put there, whatever was drafted and
rejected in between (vllm#9730, mlxcel#1002), and nothing has to be rolled back.

Rejected rows are left out of the first pass. A server that must not wait for the sampler keeps them
as padding with slot -1 and corrects lengths on the device; then they must be corrected once and not
twice (vllm#26498, vllm#32951).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.batching.transfer import move_together
from mla_ref.checks import describe, require_count
from mla_ref.models.mtp import MTPModule
from mla_ref.speculative.drafter import Draft, DraftRequest


class MTPDrafter:
    """Greedy drafts of an MTP module.

    Attributes:
        module: The module, on the target's model.
        num_drafts: Most tokens a draft; a request may want fewer.
    """

    name = "mtp"

    def __init__(self, module: MTPModule, num_drafts: int) -> None:
        """Draft with a module.

        Raises:
            TypeError: `module` is no MTPModule.
            ValueError: `num_drafts` is less than 1.
        """
        if not isinstance(module, MTPModule):
            raise TypeError(f"module must be an MTPModule, got {describe(module)}")
        self.module = module
        self.num_drafts = require_count("num_drafts", num_drafts, at_least=1)

    def new_cache(self, num_pages: int, page_size: int) -> Float[Tensor, "*pages"]:
        """One layer's cache with the target's pages."""
        return self.module.new_cache(num_pages, page_size)

    def propose(
        self,
        requests: Sequence[DraftRequest],
        hidden: Float[Tensor, "rows hidden"],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
        cache: Float[Tensor, "*pages"],
    ) -> list[Draft]:
        """One draft a request; see `Drafter.propose`."""
        for request in requests:
            _require_rows(request, hidden, block_table)
        drafts = [Draft([]) for _ in requests]
        if not any(request.num_rows for request in requests):
            return drafts  # no row to run, and so no draft wanted either
        state = self._first_pass(requests, hidden, block_table, page_size, cache)
        guesses: list[tuple[list[int], Tensor]] = []
        # Requests that want a token more; `state` has a row for each.
        going = list(range(len(requests)))
        for number in range(1, self.num_drafts + 1):
            wanting = [i for i in going if requests[i].num_drafts >= number]
            if not wanting:
                break
            places = torch.tensor([going.index(i) for i in wanting])
            if number == 1:
                (places,) = move_together([places], state.device)
                state = state[places]
            else:
                tables = block_table[[requests[i].block_table_row for i in wanting]]
                computed = [requests[i].computed_len + number - 2 for i in wanting]
                step = Step.build(computed, [1] * len(wanting), tables, page_size)
                *on_device, places = move_together([*step.on_device, places], state.device)
                newest = guesses[-1][1][places]
                state = self.module.forward(newest, state[places], step.moved(on_device), cache)
            going = wanting
            guesses.append((going, self.module.guess(state)))
        # Guesses are read at the end and together: a pass takes those before it on the device.
        owners = [i for rows, _ in guesses for i in rows]
        found = torch.cat([ids for _, ids in guesses]).tolist() if guesses else []
        for i, token_id in zip(owners, found, strict=True):
            drafts[i].token_ids.append(token_id)
        return drafts

    def _first_pass(
        self,
        requests: Sequence[DraftRequest],
        hidden: Float[Tensor, "rows hidden"],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
        cache: Float[Tensor, "*pages"],
    ) -> Float[Tensor, "drafting hidden"]:
        """Run the target's valid rows of this step; the state of each request's last one."""
        spans = [(r.computed_len - r.num_rows, r.computed_len) for r in requests]
        next_ids = [
            token_id
            for request, (first, end) in zip(requests, spans, strict=True)
            for token_id in request.token_ids[first + 1 : end + 1]
        ]
        rows = [row for r in requests for row in range(r.first_row, r.first_row + r.num_rows)]
        lens = [request.num_rows for request in requests]
        step = Step.build(
            [first for first, _ in spans],
            lens,
            block_table[[request.block_table_row for request in requests]],
            page_size,
        )
        own = [torch.tensor(next_ids), torch.tensor(rows), torch.tensor(lens).cumsum(0) - 1]
        *on_device, ids, picked, last = move_together([*step.on_device, *own], hidden.device)
        state = self.module.forward(ids, hidden[picked], step.moved(on_device), cache)
        return state[last]


def _require_rows(request: DraftRequest, hidden: Tensor, block_table: Tensor) -> None:
    """Raise a ValueError where a request names a row that is not there."""
    if request.first_row + request.num_rows > hidden.shape[0]:
        raise ValueError(
            f"first_row + num_rows must be at most the {hidden.shape[0]} rows of hidden, got "
            f"{request.first_row} + {request.num_rows}"
        )
    if request.block_table_row >= block_table.shape[0]:
        raise ValueError(
            f"block_table_row must be below the {block_table.shape[0]} rows of block_table, got "
            f"{request.block_table_row}"
        )

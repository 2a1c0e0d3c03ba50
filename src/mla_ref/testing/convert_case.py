"""Cases of the part "convert": positions of requests become slots of the cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.testing.one_tensor_case import OneTensorCase


@dataclass(frozen=True, kw_only=True)
class ConvertCase(OneTensorCase):
    """Positions of requests become slots of the cache; exact integers.

    Attributes:
        rows: Query rows.
        topk: Width of the lists.
        page_size: Tokens a page.
        requests: Rows of the block table.
        wrong: "none"; "none entries" (-1 strewn in), "beyond" (positions behind the block table's
            width), "pages" (-1 in the table) or "requests" (a row of no request).
        strided: The block table is a view of a wider one.
    """

    kind: str = "convert"
    rows: int = 5
    topk: int = 64
    page_size: int = 64
    requests: int = 3
    wrong: str = "none"
    strided: bool = False

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """positions, request_of_row, block_table, page_size."""
        generator = torch.Generator().manual_seed(self.seed)
        width = 6
        pages = torch.randperm(4 * self.requests * width, generator=generator)
        table = torch.full((self.requests, width + 3), 10**6, dtype=torch.int32)
        table[:, :width] = pages[: self.requests * width].view(self.requests, width)
        shape = (self.rows, self.topk)
        positions = torch.randint(width * self.page_size, shape, generator=generator)
        chosen = torch.rand(shape, generator=generator) < 0.3
        request = torch.arange(self.rows) % self.requests
        if self.wrong == "none entries":
            positions[chosen] = -1
        elif self.wrong == "beyond":
            positions[chosen] = width * self.page_size
            positions[:, 0] = 2**31 - 1
        elif self.wrong == "pages":
            table[:, 1::2] = -1
        elif self.wrong == "requests":
            request[0], request[-1] = -1, self.requests
        table = table.to(device)
        return {
            "positions": positions.to(torch.int32).to(device),
            "request_of_row": request.to(torch.int32).to(device),
            "block_table": table[:, :width] if self.strided else table[:, :width].contiguous(),
            "page_size": self.page_size,
        }

    def expect(self) -> Tensor:
        """Entry by entry."""
        return self._slots(none=-1)

    def _slots(self, none: int) -> Tensor:
        positions, request, table, page_size = self.build().values()
        slots = torch.full(positions.shape, none)
        for row, r in enumerate(request.tolist()):
            for column, position in enumerate(positions[row].tolist()):
                column_of_table, offset = divmod(position, page_size)
                if position < 0 or column_of_table >= table.shape[1] or not 0 <= r < len(table):
                    continue
                page = int(table[r, column_of_table])
                if page >= 0:
                    slots[row, column] = page * page_size + offset
        return slots

    def guesses(self) -> dict[str, Tensor]:
        """-1 that becomes data."""
        return {"what is none becomes slot 0, which is real data": self._slots(none=0)}

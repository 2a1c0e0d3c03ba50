"""Who owns which page of the cache. A page belongs to one request or to nobody.

The name is the field's: what vLLM calls a block is a page here, and a block table lists pages.
"""

from collections.abc import Sequence

from mla_ref.cache import pages_needed
from mla_ref.checks import require_count


class BlockManager:
    """Hands pages out and takes them back.

    Pages are used again as they are: a freed page keeps the rows of its last owner, or NaN. Nothing
    that reads a cache may look behind a request's length, so nothing has to be wiped.

    Attributes:
        num_pages: Pages in all.
        page_size: Tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free."""
        self.num_pages = require_count("num_pages", num_pages)
        self.page_size = require_count("page_size", page_size, at_least=1)
        # A stack: the page that was freed last is handed out first. 0, 1, 2, ... at the start.
        self._free = list(range(num_pages))[::-1]
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, pages: list[int], num_tokens: int) -> bool:
        """Append pages to a request's list until it holds so many tokens.

        Returns:
            False if there are too few; then nothing is changed.
        """
        missing = pages_needed(num_tokens, self.page_size) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._owned.add(page)
            pages.append(page)
        return True

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back.

        Raises:
            ValueError: Nobody owns one of them, or it is listed twice: another request would get
                it a second time. Nothing is changed.
        """
        if len(set(pages)) < len(pages) or not self._owned.issuperset(pages):
            raise ValueError(f"pages must be owned and listed once each, got {list(pages)}")
        self._owned.difference_update(pages)
        self._free.extend(reversed(pages))

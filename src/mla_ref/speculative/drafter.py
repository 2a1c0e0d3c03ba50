"""What an engine asks of a drafter: a few tokens that the target may soon agree with.

A draft costs speed when it is wrong and never correctness: the verifier sees to that. So a drafter
may propose fewer tokens than wanted, or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import describe, require_count
from mla_ref.speculative.ngram import propose_ngram, require_ngram_sizes


@dataclass(frozen=True)
class DraftRequest:
    """One request as its drafter sees it, after the target has run and its tokens are accepted.

    The target has run the first computed_len tokens, and its cache rows for them are valid. Hidden
    states of the last num_rows of them are in this step's `hidden`; row first_row + i belongs to
    position computed_len - num_rows + i, and the token that follows it is
    token_ids[computed_len - num_rows + i + 1]. Rows of rejected drafts lie behind and are not ours.

    Attributes:
        token_ids: Prompt and output. The newest has not been run by the target.
        num_drafts: Tokens wanted; 0: none, as in the middle of a prompt.
        computed_len: Tokens whose target rows are valid after this step.
        first_row: First row of this request in `hidden`.
        num_rows: Rows that stay valid: 1 + accepted drafts, or the chunk of a prompt.
        block_table_row: Row of this request in `block_table`.

    Raises:
        ValueError: A number is negative; num_rows <= computed_len < len(token_ids) does not hold;
            or drafts are wanted although the target has tokens before the newest still to run, or
            has run none in this step, so that there is no hidden state to draft from.
        TypeError: token_ids is no sequence, or a number not an int.
    """

    token_ids: Sequence[int]
    num_drafts: int
    computed_len: int
    first_row: int
    num_rows: int
    block_table_row: int

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, Sequence) or isinstance(self.token_ids, (str, bytes)):
            raise TypeError(f"token_ids must be a sequence of ints, got {describe(self.token_ids)}")
        for name in ("num_drafts", "computed_len", "first_row", "num_rows", "block_table_row"):
            require_count(name, getattr(self, name))
        if not self.computed_len < len(self.token_ids):
            raise ValueError(
                f"computed_len must be less than the {len(self.token_ids)} tokens, because the "
                f"newest has not been run, got {self.computed_len}"
            )
        if self.num_rows > self.computed_len:
            raise ValueError(
                f"num_rows must be at most computed_len, {self.computed_len}, got {self.num_rows}"
            )
        if self.num_drafts and self.computed_len != len(self.token_ids) - 1:
            raise ValueError(
                f"num_drafts must be 0 in the middle of a prompt ({self.computed_len} of "
                f"{len(self.token_ids)} tokens are computed), got {self.num_drafts}"
            )
        if self.num_drafts and not self.num_rows:
            raise ValueError(f"num_rows must be at least 1 for {self.num_drafts} drafts, got 0")


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one request.

    Attributes:
        token_ids: The tokens in order, at most as many as were wanted.
        probs: The law that each was sampled from. None: each was chosen, not sampled, and the
            verifier takes q to be one-hot at it.
    """

    token_ids: list[int]
    probs: Float[Tensor, "drafts vocab"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the requests of a step."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def new_cache(self, num_pages: int, page_size: int) -> Any:
        """A cache with the pages of the target's, or None for a drafter that keeps nothing.

        A drafter's rows lie in the slots of the target's rows, so one block table serves both.
        """
        ...

    def propose(
        self,
        requests: Sequence[DraftRequest],
        hidden: Float[Tensor, "rows hidden"],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
        cache: Any,
    ) -> list[Draft]:
        """One draft a request, in order.

        Args:
            requests: All requests of the step, those that want no draft too: a drafter with a cache
                has to see every chunk of a prompt.
            hidden: Hidden states of the target for the rows of this step.
            block_table: Pages of each request, on the host; wide enough for the drafts.
            page_size: Tokens a page.
            cache: What `new_cache` gave; written in place.
        """
        ...


@dataclass(frozen=True)
class NgramDrafter:
    """Prompt look-up: copies what followed the same words earlier. No model, no cache.

    Attributes:
        num_drafts: Most tokens a draft; a request may want fewer.
        max_ngram: As in `propose_ngram`.
        min_ngram: As in `propose_ngram`.
    """

    num_drafts: int
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        require_count("num_drafts", self.num_drafts, at_least=1)
        require_ngram_sizes(self.max_ngram, self.min_ngram)

    @property
    def name(self) -> str:
        """For reports."""
        return "ngram"

    def new_cache(self, num_pages: int, page_size: int) -> None:
        """None: it reads the tokens alone."""
        return None

    def propose(
        self,
        requests: Sequence[DraftRequest],
        hidden: Float[Tensor, "rows hidden"],
        block_table: Int[Tensor, "b max_pages"],
        page_size: int,
        cache: Any,
    ) -> list[Draft]:
        """One draft a request; everything but `requests` is left unread."""
        return [
            Draft(
                propose_ngram(
                    request.token_ids,
                    num_drafts=min(request.num_drafts, self.num_drafts),
                    max_ngram=self.max_ngram,
                    min_ngram=self.min_ngram,
                )
            )
            for request in requests
        ]

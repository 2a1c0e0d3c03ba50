"""What generation asks of a model, whichever way its attention is computed."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import Route, ServingLimits, Step
from mla_ref.checks import can_look
from mla_ref.models.smollm2_weights import SmolLM2Config


@runtime_checkable
class LanguageModel(Protocol):
    """Token ids to hidden states to logits, with a paged cache of the model's own making."""

    @property
    def config(self) -> SmolLM2Config:
        """The model's dimensions."""

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and so caches and steps."""

    @property
    def captures(self) -> bool:
        """Whether `forward` can be captured in a graph: it reads lengths on the device alone."""

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        *,
        limits: ServingLimits | None = None,
        mode: str | None = None,
    ) -> Any:
        """An empty cache for all layers, for `forward`, with whatever else a run needs.

        Args:
            num_pages: Pages for all requests together.
            page_size: Tokens a page.
            dtype: What to store; default: the model's choice.
            limits: What the server is configured for: buffers of kernels are made for it.
            mode: Where verifier batches go, "auto" (default), "0" or "1"; see `SpecMode`.
        """

    def route(self, step: Step, cache: Any, *, per_request: bool = False) -> Route | None:
        """Which kernel takes which rows of a step; None where the model has only one kernel.

        Args:
            step: The batch; only its facts on the host are looked at.
            cache: From `new_cache`.
            per_request: Ask for each request by itself, not once for the batch.
        """

    def forward(
        self,
        token_ids: Int[Tensor, " padded_tokens"],
        step: Step,
        cache: Any,
        *,
        route: Route | None = None,
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """Run the new tokens of a step and store their rows.

        Tokens and step lie on the model's device. A padded row has some token and a state that
        means nothing. Without a route the model makes its own.
        """

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""


def require_ids(name: str, ids: Int[Tensor, "*s"], vocab: int) -> None:
    """Raise a ValueError if a token id is not in the vocabulary.

    Ids that lie on a device are not looked at (see `can_look`): whoever brings them there does.
    """
    # A negative id would read the embedding from its end.
    if can_look(ids) and ids.numel() and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(
            f"{name} must lie in 0 .. {vocab - 1}, got {int(ids.min())} .. {int(ids.max())}"
        )

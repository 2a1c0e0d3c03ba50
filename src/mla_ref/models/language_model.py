"""What generation asks of a model, whichever way its attention is computed."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.models.smollm2_weights import SmolLM2Config


@runtime_checkable
class LanguageModel(Protocol):
    """Token ids to hidden states to logits, with a paged cache of the model's own making."""

    @property
    def config(self) -> SmolLM2Config:
        """The model's dimensions."""

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> Any:
        """An empty cache for all layers, for `forward`."""

    def forward(
        self, token_ids: Int[Tensor, " num_tokens"], step: Step, cache: Any
    ) -> Float[Tensor, "num_tokens hidden"]:
        """Run the new tokens of a step and store their rows."""

    def logits(self, hidden: Float[Tensor, "s hidden"]) -> Float[Tensor, "s vocab"]:
        """Scores of the next token for each row."""

"""What processes of `test_modes_ranks.py` make their model of; they import it by name.

No test may stand here: a new process must not import pytest's tests.
"""

import os
from copy import copy
from pathlib import Path

import torch
import torch.distributed as dist
from tests.engine.serving import prompt, small_model
from torch import Tensor

from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.speculative import Drafter, NgramDrafter

CPU = torch.device("cpu")
TOKENS = 8
# 20 tokens, where top-k 6 leaves most keys out, and 8.
PROMPTS = {"twenty": prompt(2), "eight": prompt(3)}


def small(device: torch.device = CPU) -> tuple[SparseSmolLM2, Drafter]:
    """A sparse model of two layers in float64, and prompt look-up, which keeps nothing."""
    return small_model("sparse"), NgramDrafter(3)


def recording(directory: str, device: torch.device) -> tuple[SparseSmolLM2, Drafter]:
    """The small model; each process leaves the hidden states of all its choices in a file."""
    model, ngram = small()
    model = copy(model)
    name = f"rank {dist.get_rank()}" if dist.is_initialized() else "alone"
    choose, kept = model.logits, []

    def logits(hidden: Tensor) -> Tensor:
        kept.append(hidden.clone())
        torch.save(torch.cat(kept), Path(directory) / name)
        return choose(hidden)

    model.logits = logits  # type: ignore[method-assign]
    return model, ngram


def gone(device: torch.device) -> tuple[SparseSmolLM2, Drafter]:
    """Rank 1 is gone without a word, as when the system kills it for memory; rank 0 waits."""
    if dist.get_rank() == 1:
        os._exit(3)
    return small()

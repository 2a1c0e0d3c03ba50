"""From a user's choices to a model and a drafter; and how much cache their requests need."""

from collections.abc import Iterable

import torch

from mla_ref.backends import Backend
from mla_ref.cache import pages_needed
from mla_ref.checks import describe, require_choice, require_count
from mla_ref.engine.request import Request
from mla_ref.models.gguf_file import GGUFFile
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.mtp import MTPModule
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Weights
from mla_ref.speculative import Drafter, NgramDrafter
from mla_ref.speculative.mtp_drafter import MTPDrafter

DRAFTERS = ("mtp", "ngram")


def load_model(
    file: GGUFFile,
    *,
    attention: str = "packed",
    form: str | None = None,
    topk: int | None = None,
    backend: Backend | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> SmolLM2 | SparseSmolLM2:
    """SmolLM2 from its file.

    Args:
        file: The weights.
        attention: As in `SmolLM2`.
        form: As in `SmolLM2`.
        topk: Attend to so many keys, chosen by the indexers of this package; None: to all.
        backend: Who computes sparse attention; None: torch.
        device: Where it runs; None: on the CPU.
        dtype: What the weights are held in and computed in.

    Raises:
        ValueError: A choice is unknown, or sparse attention is asked for and not the packed form.
    """
    if topk is not None and attention != "packed":
        raise ValueError(f'attention must be "packed" with topk, got {attention!r}')
    weights = SmolLM2Weights.read(file, dtype)
    if device is not None:
        weights = weights.to(device)
    dense = SmolLM2(weights, attention=attention, form=form)
    return dense if topk is None else SparseSmolLM2.trained(dense, topk=topk, backend=backend)


def new_drafter(name: str, model: LanguageModel, num_drafts: int) -> Drafter:
    """A drafter by name: "mtp", the module of this package, or "ngram", prompt look-up.

    Raises:
        ValueError: The name is unknown, or the module does not fit the model.
    """
    if require_choice("drafter", name, DRAFTERS) == "ngram":
        return NgramDrafter(num_drafts)
    dense = model.dense if isinstance(model, SparseSmolLM2) else model
    if not isinstance(dense, SmolLM2):
        raise TypeError(f"model must be a SmolLM2 for the drafter mtp, got {describe(model)}")
    return MTPDrafter(MTPModule.trained(dense), num_drafts)


def pages_for(
    requests: Iterable[Request], *, max_num_seqs: int, page_size: int, context_length: int
) -> int:
    """Pages with which none of these requests ever has to give way to another.

    Those that are longer than the context count as if they just fitted: the engine refuses them,
    and says so, which memory for them would forestall.

    Args:
        requests: All that will be given to the engine.
        max_num_seqs: Of them that run at once at most.
        page_size: Tokens a page.
        context_length: The model's.
    """
    require_count("max_num_seqs", max_num_seqs, at_least=1)
    require_count("context_length", context_length, at_least=1)
    needed = sorted(
        pages_needed(min(request.max_rows, context_length), page_size) for request in requests
    )
    return max(sum(needed[-max_num_seqs:]), max_num_seqs)

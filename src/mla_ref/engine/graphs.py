"""Steps of a model as CUDA graphs: recorded once for each size and route, then replayed.

    batch ──copy──> static buffers ──> [ the recorded step ] ──> hidden states
                    tokens, positions, slots, lengths, block table

A replay repeats the branches that were taken while recording and reads the addresses that were
there. So the route is part of a graph's key, no buffer is ever made anew (vllm#46067), and every
entry of every buffer is written before each replay: what an earlier, larger batch has left there
must not be read (rtp-llm#1181).

A batch of verifiers or single tokens is padded to one of a few sizes. Chunks of prompts run as they
are, and so does a batch that is larger than all sizes: they keep a GPU busy without a graph. On a
CPU the recorded function is run again on the same buffers, so all but the recording is the same.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import Route, ServingLimits, Step
from mla_ref.batching.transfer import joined, views
from mla_ref.checks import require_count
from mla_ref.models.language_model import LanguageModel
from mla_ref.platform.cuda_graph import Recorded, Recorder


@dataclass(frozen=True)
class GraphSizes:
    """To which sizes batches are padded.

    Attributes:
        limits: Of the server.
    """

    limits: ServingLimits

    @property
    def tokens_per_request(self) -> int:
        """Rows that a request may have: its newest token and its drafts."""
        return 1 + self.limits.num_speculative_tokens

    def padded(self, query_lens: Sequence[int]) -> tuple[int, int] | None:
        """Requests and tokens of the size that holds these requests; None: there is none.

        Requests are rounded up to a power of two, or to max_num_seqs where that is less
        (xllm#1939). If anybody has a draft, each has room for all its drafts, however many there
        are; if nobody has, each has one row, which a plan without drafts holds too.
        """
        longest = max(query_lens, default=0)
        most = 1 if longest == 1 else self.tokens_per_request
        if not query_lens or longest > most:
            return None
        requests = min(1 << (len(query_lens) - 1).bit_length(), self.limits.max_num_seqs)
        tokens = requests * most
        if requests < len(query_lens) or tokens > self.limits.max_num_batched_tokens:
            return None
        return requests, tokens


class StaticStep:
    """Buffers for the steps of one size: a recorded step reads them and nothing else.

    Attributes:
        step: The step whose tensors they are.
        token_ids: The tokens.
    """

    def __init__(
        self, num_reqs: int, num_tokens: int, max_pages: int, page_size: int, device: torch.device
    ) -> None:
        """Make them, for a batch of nobody."""
        padding = Step.build(
            [],
            [],
            torch.full((0, max_pages), -1),
            page_size,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
        )
        tensors = [*padding.on_device, torch.zeros(num_tokens, dtype=torch.int64)]
        self._flat = joined(tensors, pinned=False).to(device)
        *on_device, self.token_ids = views(self._flat, [tensor.shape for tensor in tensors])
        self.step = padding.captured_on(on_device)

    def fill(self, step: Step, token_ids: Int[Tensor, " padded_tokens"]) -> None:
        """Write a batch over all that is there, by one copy.

        Args:
            step: On the host, padded to this size; its block table may be narrower.
            token_ids: On the host.

        Raises:
            ValueError: It has another size.
        """
        own, width = self.step, self.step.block_table.shape[1]
        for name in ("num_reqs_padded", "num_tokens_padded", "page_size"):
            if getattr(step, name) != getattr(own, name):
                raise ValueError(
                    f"step must have {name} {getattr(own, name)}, got {getattr(step, name)}"
                )
        missing = width - step.block_table.shape[1]
        if missing < 0:
            raise ValueError(
                f"step must have at most {width} pages a request, got {step.block_table.shape[1]}"
            )
        table = torch.nn.functional.pad(step.block_table, (0, missing), value=-1)
        tensors = [table if x is step.block_table else x for x in step.on_device]
        flat = joined([*tensors, token_ids], pinned=self._flat.device.type == "cuda")
        self._flat.copy_(flat, non_blocking=True)


class StepGraphs:
    """The recorded steps of a model on one cache.

    Attributes:
        sizes: To which sizes batches are padded.
        recorded: What has been recorded, by padded size and route.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: Any,
        *,
        limits: ServingLimits,
        max_pages: int,
        page_size: int,
    ) -> None:
        """Record nothing yet: each graph is made when its first batch comes.

        Args:
            model: The model.
            cache: Its cache, whose addresses the graphs will hold.
            limits: Of the server.
            max_pages: Pages of a request at most: the width of the block table.
            page_size: Tokens a page.
        """
        self.sizes = GraphSizes(limits)
        self.recorded: dict[Hashable, Recorded] = {}
        self._model, self._cache = model, cache
        self._max_pages = require_count("max_pages", max_pages, at_least=1)
        self._page_size = require_count("page_size", page_size, at_least=1)
        self._buffers: dict[tuple[int, int], StaticStep] = {}
        self._recorder = Recorder(model.device)

    def forward(
        self, token_ids: Int[Tensor, " padded_tokens"], step: Step, route: Route | None
    ) -> Float[Tensor, "padded_tokens hidden"]:
        """The model's `forward`, replayed.

        Args:
            token_ids: On the host.
            step: On the host, of a size from `sizes`.
            route: Of this step; None where the model has one kernel.

        Returns:
            Hidden states in a buffer that the next replay writes over.
        """
        size = (step.num_reqs_padded, step.num_tokens_padded)
        if size not in self._buffers:
            self._buffers[size] = StaticStep(
                *size, self._max_pages, self._page_size, self._model.device
            )
        buffers = self._buffers[size]
        buffers.fill(step, token_ids)
        key = (size, route.graph_key if route else None)
        if key not in self.recorded:
            self.recorded[key] = self._recorder.record(
                partial(
                    self._model.forward, buffers.token_ids, buffers.step, self._cache, route=route
                )
            )
        self.recorded[key].replay()
        return self.recorded[key].output

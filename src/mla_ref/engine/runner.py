"""What a step computes: the model on all rows, the verifier on its logits, then the drafter."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from mla_ref.batching import Route
from mla_ref.batching.transfer import move_together
from mla_ref.checks import require_count
from mla_ref.engine.batch import Batch
from mla_ref.engine.graphs import StepGraphs
from mla_ref.engine.record import StopWatch
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import Drafter, DraftRequest, Verified, rejection_sample, verify


class Executed(NamedTuple):
    """What the target has said to a batch.

    Attributes:
        token_ids: New tokens of each request: accepted drafts and one more; none of a request
            whose prompt goes on.
        num_accepted: Accepted drafts of each.
        hidden: Hidden states of all rows, for the drafter.
        route: Which kernel took which rows; None where the model has only one.
        graph: "replayed", "recorded" or None, as in `StepRecord`.
    """

    token_ids: list[list[int]]
    num_accepted: list[int]
    hidden: Float[Tensor, "padded_tokens hidden"]
    route: Route | None
    graph: str | None


class Runner:
    """The model and the drafter with their caches. It knows batches, and no queue.

    Attributes:
        model: The model.
        drafter: Who proposes drafts, or None.
        num_drafts: Drafts a request and step at most.
        cache: The model's cache.
        draft_cache: The drafter's, with the same pages: one block table serves both.
        per_request: Whether each request is routed by itself.
        graphs: Recorded steps; None: every step is run.
        sampler: Who judges the drafts of sampled requests.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: Any,
        *,
        drafter: Drafter | None,
        num_drafts: int,
        draft_cache: Any,
        per_request: bool,
        graphs: StepGraphs | None = None,
        sampler: Callable[..., Verified] = rejection_sample,
    ) -> None:
        """Hold them."""
        self.graphs, self.sampler = graphs, sampler
        self.model, self.cache, self.per_request = model, cache, per_request
        self.drafter, self.num_drafts, self.draft_cache = drafter, num_drafts, draft_cache

    def execute(self, batch: Batch, watch: StopWatch) -> Executed:
        """Route, run the model, and judge drafts and choose tokens from its logits.

        The batch goes to the model's device here, and the new tokens come back: all that the host
        has to know of what the device computes.
        """
        route = self.model.route(batch.step, self.cache, per_request=self.per_request)
        watch.lap("schedule")
        graph, graphs = None, self.graphs
        # Segments of several kernels begin wherever requests do: too many graphs to record.
        if graphs and batch.fits_graph and (route is None or len(route.segments) == 1):
            known = len(graphs.recorded)
            hidden = graphs.forward(batch.token_ids, batch.step, route)
            graph = "replayed" if len(graphs.recorded) == known else "recorded"
        else:
            hidden = self._run(batch, route)
        watch.lap("forward")
        (rows,) = move_together([batch.logits_rows], self.model.device)
        logits = self.model.logits(hidden[rows])
        watch.lap("logits")
        choosing = [item for item in batch.items if item.samples]
        verified = verify(
            logits,
            [item.drafts for item in choosing],
            [item.state.request.sampling for item in choosing],
            # The noise of a token belongs to its place in the output, so that no draft, no
            # neighbour and no preemption makes a request's chance another (vllm#51226).
            [len(item.state.output_ids) for item in choosing],
            sampler=self.sampler,
        )
        found = zip(*verified, strict=True)
        pairs = [next(found) if item.samples else ([], 0) for item in batch.items]
        return Executed([t for t, _ in pairs], [n for _, n in pairs], hidden, route, graph)

    def _run(self, batch: Batch, route: Route | None) -> Float[Tensor, "padded_tokens hidden"]:
        """The model on a batch of any size."""
        *on_device, token_ids = move_together(
            [*batch.step.on_device, batch.token_ids], self.model.device
        )
        return self.model.forward(token_ids, batch.step.moved(on_device), self.cache, route=route)

    def draft(self, batch: Batch, executed: Executed) -> None:
        """Let the drafter propose for all requests that go on.

        Those in the middle of a prompt are shown to it too: a drafter with a cache needs its rows.

        Raises:
            TypeError: A draft is not an int.
            ValueError: The drafter proposes for another number of requests, too many tokens, one
                that is not in the vocabulary, or sampled ones, whose probabilities this engine
                does not keep. No request has drafts then.
        """
        if self.drafter is None or not self.num_drafts:
            return
        states, asked = [], []
        for place, item in enumerate(batch.items):
            state = item.state
            if state.finish_reason:
                continue
            wanted = min(self.num_drafts, state.max_drafts) if item.samples else 0
            states.append(state)
            asked.append(
                DraftRequest(
                    token_ids=state.token_ids,
                    num_drafts=wanted,
                    computed_len=state.num_computed,
                    first_row=batch.first_rows[place],
                    num_rows=item.valid_rows(executed.num_accepted[place]),
                    block_table_row=place,
                )
            )
        if not asked:
            return
        step = batch.step
        drafts = self.drafter.propose(
            asked, executed.hidden, step.block_table, step.page_size, self.draft_cache
        )
        vocab, who = self.model.config.vocab_size, f"drafter {self.drafter.name!r}"
        if len(drafts) != len(asked):
            raise ValueError(
                f"{who} must propose for each of {len(asked)} requests, got {len(drafts)} drafts"
            )
        for state, request, draft in zip(states, asked, drafts, strict=True):
            ids, most = draft.token_ids, request.num_drafts
            whose = f"for request {state.request.request_id!r}"
            for token_id in ids:
                require_count(f"{who}: a draft {whose}", token_id)
            if len(ids) > most or any(token_id >= vocab for token_id in ids):
                raise ValueError(
                    f"{who} must propose at most {most} ids below {vocab} {whose}, got {ids}"
                )
            if draft.probs is not None:
                raise ValueError(f"{who} must choose its drafts, but has sampled them")
        for state, draft in zip(states, drafts, strict=True):
            state.drafts = tuple(draft.token_ids)

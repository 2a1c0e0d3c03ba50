"""Rung 12: continuous batching with drafts. Checked against plain decoding, one by one.

One step, for all requests together:

    schedule   who runs, with how many tokens, on which pages      scheduler.py, batch.py
    forward    the model runs them and writes their rows           runner.py
    logits     of the rows that choose a token or judge a draft
    sampling   verify, take what is accepted, roll the rest back
    drafting   propose tokens for the next step

Greedy requests get the tokens that plain decoding would give them, sampled ones tokens of the same
law; drafts, neighbours, chunks, padding and preemption change only when they come.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from mla_ref.batching import ServingLimits, parse_mode
from mla_ref.cache import pages_needed
from mla_ref.checks import describe, require_count
from mla_ref.engine.batch import Batch
from mla_ref.engine.blocks import BlockManager
from mla_ref.engine.graphs import StepGraphs
from mla_ref.engine.record import Output, StepRecord, StopWatch
from mla_ref.engine.request import Request, RequestState
from mla_ref.engine.runner import Executed, Runner
from mla_ref.engine.scheduler import Scheduler
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import AcceptanceStats, Drafter, Verified, rejection_sample


class Engine:
    """Runs requests on a model until each is finished.

    Batches are made on the host and go to the model's device, from which new tokens come back.

    Attributes:
        scheduler: Queues and pages.
        runner: Model and drafter with their caches.
        requests: Those that are not finished, by their ids.
        timeline: One record a step.
        acceptance: How many drafts were accepted.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        mode: str = "auto",
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        max_chunk: int | None = None,
        num_pages: int | None = None,
        page_size: int = 64,
        cache_dtype: torch.dtype | None = None,
        per_request_routes: bool = False,
        pad_to: int = 1,
        graphs: bool = False,
        sampler: Callable[..., Verified] = rejection_sample,
    ) -> None:
        """Make the cache and the buffers; no step makes any.

        Args:
            model: The model.
            drafter: Proposes drafts.
            num_drafts: Drafts a request and step at most; 0: plain decoding.
            mode: Where verifier batches go, "auto", "0" or "1"; see `SpecMode`.
            max_num_seqs: Requests of a step at most.
            max_num_batched_tokens: New tokens of a step at most, a multiple of `pad_to`.
            max_chunk: Tokens of one prompt in a step at most; None: the whole budget.
            num_pages: Pages for all requests; None: as many as one request of the model's whole
                context needs, so that none is refused for its length, and one a request at least.
            page_size: Tokens a page.
            cache_dtype: What the cache stores; None: the model's choice.
            per_request_routes: Route each request by itself, not the batch as one.
            pad_to: Pad steps to multiples of it, as for CUDA graphs.
            graphs: Record steps without a prompt and replay them, see `StepGraphs`; for a model
                that `captures`.
            sampler: Who judges the drafts of sampled requests, see `verify`.

        Raises:
            ValueError: Drafts are asked for and nobody proposes them, graphs of a model that cannot
                be captured, or a number is out of range.
        """
        if not isinstance(model, LanguageModel):
            raise TypeError(f"model must be a LanguageModel, got {describe(model)}")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"drafter must be a Drafter or None, got {describe(drafter)}")
        if require_count("num_drafts", num_drafts) and drafter is None:
            raise ValueError(f"num_drafts must be 0 without a drafter, got {num_drafts}")
        if graphs and not model.captures:
            raise ValueError("graphs must be False for a model that reads lengths on the host")
        parse_mode("mode", mode)  # dense models have one kernel and would not look at it
        limits = ServingLimits(max_num_seqs, max_num_batched_tokens, num_drafts)
        if max_num_batched_tokens % require_count("pad_to", pad_to, at_least=1):
            raise ValueError(
                f"max_num_batched_tokens must be a multiple of pad_to = {pad_to}, got "
                f"{max_num_batched_tokens}"
            )
        if num_pages is None:
            num_pages = max(pages_needed(model.config.context_length, page_size), max_num_seqs)
        self.scheduler = Scheduler(limits, BlockManager(num_pages, page_size), max_chunk)
        cache = model.new_cache(num_pages, page_size, cache_dtype, limits=limits, mode=mode)
        most = min(pages_needed(model.config.context_length, page_size), num_pages)
        self.runner = Runner(
            model,
            cache,
            drafter=drafter,
            num_drafts=num_drafts,
            draft_cache=drafter.new_cache(num_pages, page_size) if drafter else None,
            per_request=per_request_routes,
            graphs=StepGraphs(model, cache, limits=limits, max_pages=most, page_size=page_size)
            if graphs
            else None,
            sampler=sampler,
        )
        self.requests: dict[str, RequestState] = {}
        self.timeline: list[StepRecord] = []
        self.acceptance = AcceptanceStats()
        self._pad_to = pad_to

    def add(self, request: Request) -> RequestState:
        """Take a request in; it runs from the next step on, or when its turn comes.

        Returns:
            Its state, which the coming steps change.

        Raises:
            ValueError: Its id is in use, a token of its prompt or one that ends it is not in the
                vocabulary, or it is too long for the model's context or for all pages together.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {describe(request)}")
        name, config = request.request_id, self.runner.model.config
        if name in self.requests:
            raise ValueError(f"request_id must be new, but {name!r} is running or waiting")
        request.require_fits(config.vocab_size, config.context_length)
        state = RequestState(request)
        self.scheduler.add(state)
        self.requests[name] = state
        return state

    def abort(self, request_id: str) -> RequestState:
        """Drop a request, whether it runs or waits; what it has written stays in its state.

        Raises:
            ValueError: There is no such request, or it has finished.
        """
        if request_id not in self.requests:
            raise ValueError(f"request_id must be of a live request, got {request_id!r}")
        state = self.requests[request_id]
        self._finish(state, "abort")
        return state

    def stream(self, requests: Iterable[Request] = ()) -> Iterator[Output]:
        """Add requests and step until nothing is left to do; others may be added meanwhile.

        A request that is aborted meanwhile is not heard of again. One that is live when the stream
        is left, or ends in an error, stays live: abort it, or go on with another stream.

        Raises:
            ValueError: As in `add`, raised by the call; then none of the requests is taken in.
        """
        self._add_all(requests)
        return self._steps()

    def run(self, requests: Iterable[Request]) -> list[RequestState]:
        """The same to the end: the finished requests, in the order in which they were given."""
        states = self._add_all(requests)
        for _ in self._steps():
            pass
        return states

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One step, or nothing if nobody is there.

        If the model or the sampler raises, no request has gained or lost a token, and the step can
        be repeated. If the drafter raises, requests have their tokens and no drafts, and the
        drafter has not seen their rows.
        """
        watch = StopWatch()
        plan = self.scheduler.schedule()
        if not plan.items:
            return []
        page_size = self.scheduler.blocks.page_size
        graphs = self.runner.graphs
        sizes = graphs.sizes if graphs else None
        batch = Batch.build(plan.items, page_size, self.scheduler.limits, self._pad_to, sizes)
        executed = self.runner.execute(batch, watch)
        outputs = self._accept(batch, executed)
        watch.lap("sampling")
        self.runner.draft(batch, executed)
        watch.lap("drafting")
        route = executed.route
        record = StepRecord(
            num_reqs=batch.step.num_reqs,
            num_tokens=batch.step.num_tokens,
            num_tokens_padded=batch.step.num_tokens_padded,
            num_prefill_tokens=sum(output.num_prefilled for output in outputs),
            num_drafts=sum(len(output.drafts) for output in outputs),
            num_accepted=sum(output.num_accepted for output in outputs),
            num_new_tokens=sum(len(output.token_ids) for output in outputs),
            route=route.kind if route else None,
            reason=route.reason if route else None,
            graph=executed.graph,
            preempted=tuple(state.request.request_id for state in plan.preempted),
            seconds=watch.seconds,
        )
        self.timeline.append(record)
        return outputs

    def _accept(self, batch: Batch, executed: Executed) -> list[Output]:
        """Advance each request over its valid rows, once, and give it its tokens."""
        outputs = []
        for item, tokens, accepted in zip(
            batch.items, executed.token_ids, executed.num_accepted, strict=True
        ):
            state, prefilled = item.state, item.num_tokens if item.state.is_prefilling else 0
            # That is the whole rollback: rows of rejected drafts are not counted, and what the
            # next step writes lies over them.
            state.num_computed += item.valid_rows(accepted)
            state.drafts = ()
            self.acceptance.add(len(item.drafts), accepted)
            taken = state.append(tokens)
            outputs.append(
                Output(
                    request_id=state.request.request_id,
                    token_ids=tuple(taken),
                    drafts=item.drafts,
                    num_accepted=accepted,
                    num_prefilled=prefilled,
                    finish_reason=state.finish_reason,
                )
            )
            if state.finish_reason:
                self._finish(state, state.finish_reason)
        return outputs

    def _finish(self, state: RequestState, reason: str) -> None:
        self.scheduler.finish(state, reason)
        del self.requests[state.request.request_id]

    def _add_all(self, requests: Iterable[Request]) -> list[RequestState]:
        """All or none."""
        states: list[RequestState] = []
        try:
            for request in requests:
                states.append(self.add(request))
        except BaseException:
            for state in states:
                self.abort(state.request.request_id)
            raise
        return states

    def _steps(self) -> Iterator[Output]:
        while self.requests:
            states = dict(self.requests)
            for output in self.step():
                # Whoever hears one output of a step may abort the request of another.
                if states[output.request_id].finish_reason != "abort":
                    yield output

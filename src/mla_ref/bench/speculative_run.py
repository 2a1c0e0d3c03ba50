"""One request decoded once by the engine, alone: its tokens, its time, and where the time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_ref.bench.timer import Clock
from mla_ref.cache import pages_needed
from mla_ref.engine import PARTS, Engine, Request, StepRecord
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import AcceptanceStats, Drafter

PLAIN = "plain"
PAGE_SIZE = 64
# New tokens of a step at most: a prompt of more runs in chunks, with drafts or without.
MAX_TOKENS = 256


@dataclass(frozen=True)
class Run:
    """What one run of a request leaves behind.

    Attributes:
        token_ids: What was written.
        seconds: From the request's arrival to its last token, the prompt included.
        timeline: Every step.
        acceptance: Drafts that were accepted.
    """

    token_ids: tuple[int, ...]
    seconds: float
    timeline: tuple[StepRecord, ...]
    acceptance: AcceptanceStats

    @property
    def prompt_steps(self) -> tuple[StepRecord, ...]:
        """Steps that ran some of the prompt; the last of them chose the first token."""
        return tuple(record for record in self.timeline if record.num_prefill_tokens)

    @property
    def decode_steps(self) -> tuple[StepRecord, ...]:
        """The steps after the prompt: they wrote all tokens but the first."""
        return tuple(record for record in self.timeline if not record.num_prefill_tokens)

    @property
    def decode_seconds(self) -> float:
        """All but the steps of the prompt."""
        return self.seconds - sum(record.total_seconds for record in self.prompt_steps)

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of the decode steps by `PARTS`."""
        return {part: sum((r.seconds[part] for r in self.decode_steps), 0.0) for part in PARTS}

    def to_json(self) -> dict[str, Any]:
        """What was measured, as plain data."""
        return {
            "seconds": self.seconds,
            "decode_seconds": self.decode_seconds,
            "prompt_steps": len(self.prompt_steps),
            "decode_steps": len(self.decode_steps),
            "decode_seconds_by_part": dict(self.parts),
            "route_reasons": sorted({r.reason for r in self.timeline if r.reason}),
        }


@dataclass(frozen=True)
class Decoder:
    """A way to decode: plainly, or with drafts.

    Attributes:
        name: For reports: `PLAIN`, or the drafter's.
        model: The model, which all ways share.
        drafter: None: plain decoding.
        num_drafts: Drafts a step; 0 without a drafter.
    """

    name: str
    model: LanguageModel
    drafter: Drafter | None = None
    num_drafts: int = 0

    def run(
        self, prompt_ids: Sequence[int], tokens: int, clock: Clock, eos_id: int | None = None
    ) -> Run:
        """Decode one request greedily with an engine of its own, made outside the clock."""
        engine = Engine(
            self.model,
            drafter=self.drafter,
            num_drafts=self.num_drafts,
            max_num_seqs=1,
            max_num_batched_tokens=MAX_TOKENS,
            num_pages=pages_needed(len(prompt_ids) + tokens, PAGE_SIZE),
            page_size=PAGE_SIZE,
        )
        request = Request(self.name, tuple(prompt_ids), tokens, eos_id=eos_id)
        (state,), seconds = clock(lambda: engine.run([request]))
        return Run(tuple(state.output_ids), seconds, tuple(engine.timeline), engine.acceptance)

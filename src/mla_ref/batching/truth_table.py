"""Modes against kinds of batch: one table, for the tests, the documentation and the command line.

It is written by hand from the rule as the pull request states it (local-inference-lab/vllm#164),
not computed, so that a change of the rule shows.
"""

from dataclasses import dataclass

from mla_ref.batching.facts import BatchFacts, batch_facts
from mla_ref.batching.modes import SpecMode
from mla_ref.batching.scratch import ServingLimits

# Of the server that the table speaks of; its n stands in each row.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 8192


@dataclass(frozen=True)
class BatchKind:
    """A kind of batch, an example of it, and where each mode sends it.

    Attributes:
        name: In a few words.
        num_speculative_tokens: n.
        query_lens: New tokens of each request, padding included.
        is_prefilling: A flag each; one flag for all; None: nobody has said.
        routes: (kernel, reason code) by mode. The plan is made for the same mode.
        num_reqs: Real requests; None: all.
        num_tokens_padded: Rows of the graph; None: the sum of the lengths.
    """

    name: str
    num_speculative_tokens: int
    query_lens: tuple[int, ...]
    is_prefilling: tuple[bool, ...] | bool | None
    routes: dict[SpecMode, tuple[str, str]]
    num_reqs: int | None = None
    num_tokens_padded: int | None = None

    @property
    def flags(self) -> tuple[bool, ...] | None:
        """One flag a request, padding included."""
        if isinstance(self.is_prefilling, bool):
            return (self.is_prefilling,) * len(self.query_lens)
        return self.is_prefilling

    @property
    def facts(self) -> BatchFacts:
        """The batch as a router takes it."""
        return batch_facts(
            self.query_lens,
            self.flags,
            num_reqs=self.num_reqs,
            num_tokens_padded=self.num_tokens_padded,
        )

    @property
    def limits(self) -> ServingLimits:
        """The server."""
        return ServingLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, self.num_speculative_tokens)


def _routes(auto: str, off: str, forced: str) -> dict[SpecMode, tuple[str, str]]:
    """Three times "kernel reason"."""
    words = {SpecMode.AUTO: auto, SpecMode.OFF: off, SpecMode.FORCED: forced}
    return {mode: (text.split()[0], text.split()[1]) for mode, text in words.items()}


TRUTH_TABLE = (
    BatchKind(
        "one token each",
        3,
        (1, 1, 1),
        False,
        _routes("decode single-token", "decode single-token", "decode single-token"),
    ),
    BatchKind(
        "verifier",
        3,
        (4, 4, 4),
        False,
        _routes("decode verifier", "extend mode-off", "decode verifier"),
    ),
    BatchKind(
        "ragged verifier",
        3,
        (4, 1, 3),
        False,
        _routes("decode verifier", "extend mode-off", "decode verifier"),
    ),
    BatchKind(
        "stale flag in padding",
        3,
        (4, 4, 0),
        (False, False, True),
        _routes("decode verifier", "extend mode-off", "decode verifier"),
        num_reqs=2,
        num_tokens_padded=12,
    ),
    BatchKind(
        "verifier, 7 drafts",
        7,
        (8, 8),
        False,
        _routes("decode verifier", "extend mode-off", "decode verifier"),
    ),
    BatchKind(
        "verifier, 9 drafts",
        9,
        (10,),
        False,
        _routes("extend over-max-q", "extend mode-off", "extend over-max-q"),
    ),
    BatchKind(
        "short chunk, same shape",
        3,
        (4, 4, 4),
        (False, False, True),
        _routes("extend prefill-in-batch", "extend mode-off", "decode forced"),
    ),
    BatchKind(
        "verifiers and a chunk",
        3,
        (4, 4, 512),
        (False, False, True),
        _routes("extend prefill-in-batch", "extend mode-off", "extend over-max-q"),
    ),
    BatchKind(
        "more tokens than 1 + n",
        3,
        (5, 5),
        False,
        _routes("extend query-over-n+1", "extend mode-off", "decode forced"),
    ),
    BatchKind(
        "more tokens than max_q",
        3,
        (9,),
        False,
        _routes("extend query-over-n+1", "extend mode-off", "extend over-max-q"),
    ),
    BatchKind(
        "no speculative decoding",
        0,
        (4, 4),
        False,
        _routes("extend no-spec-config", "extend mode-off", "decode forced"),
    ),
    BatchKind(
        "flags not given",
        3,
        (4, 4),
        None,
        _routes("extend prefilling-unknown", "extend mode-off", "decode forced"),
    ),
    BatchKind(
        "graph beyond the plan",
        3,
        (4,) * 16,
        False,
        _routes("extend over-planned-rows", "extend mode-off", "decode verifier"),
        num_tokens_padded=72,
    ),
    BatchKind(
        "nobody",
        3,
        (0, 0),
        False,
        _routes("decode empty", "decode empty", "decode empty"),
    ),
)

"""Honest measurements: times behind a correctness gate, tensor memory counted to the byte."""

from mla_ref.bench.context import ContextRow, growth, measure_context
from mla_ref.bench.context_plot import plot
from mla_ref.bench.gate import Agreement, Check, GateError, Verdict, close_to, spoil
from mla_ref.bench.memory import CreatedTensor, TensorMemory
from mla_ref.bench.routing import (
    Launch,
    RoutingRow,
    measure_routing,
    what_is_counted,
    what_was_lost,
)
from mla_ref.bench.sparse import Ratio, SparseRow, measure_sparse, ratios
from mla_ref.bench.sparse_plot import plot_sparse
from mla_ref.bench.speculative import SpeculativeRow, measure_speculative
from mla_ref.bench.speculative_gate import Difference, SameTokens, compare_tokens
from mla_ref.bench.speculative_plot import plot_speculative
from mla_ref.bench.speculative_run import Decoder, Run
from mla_ref.bench.speculative_summary import Gain, WayTotal, in_a_sentence
from mla_ref.bench.timer import Clock, Contender, WallClock, compare_times, measure
from mla_ref.bench.timing import TimeComparison, Timing, in_words

__all__ = [
    "Agreement",
    "Check",
    "Clock",
    "Contender",
    "ContextRow",
    "CreatedTensor",
    "Decoder",
    "Difference",
    "Gain",
    "GateError",
    "Launch",
    "Ratio",
    "RoutingRow",
    "Run",
    "SameTokens",
    "SparseRow",
    "SpeculativeRow",
    "TensorMemory",
    "TimeComparison",
    "Timing",
    "Verdict",
    "WallClock",
    "WayTotal",
    "close_to",
    "compare_times",
    "compare_tokens",
    "growth",
    "in_a_sentence",
    "in_words",
    "measure",
    "measure_context",
    "measure_routing",
    "measure_sparse",
    "measure_speculative",
    "plot",
    "plot_sparse",
    "plot_speculative",
    "ratios",
    "spoil",
    "what_is_counted",
    "what_was_lost",
]

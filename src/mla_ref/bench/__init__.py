"""Honest measurements: times behind a correctness gate, tensor memory counted to the byte."""

from mla_ref.bench.context import ContextRow, growth, measure_context
from mla_ref.bench.context_plot import plot
from mla_ref.bench.gate import Agreement, Check, GateError, Verdict, close_to, spoil
from mla_ref.bench.memory import CreatedTensor, TensorMemory
from mla_ref.bench.sparse import Ratio, SparseRow, measure_sparse, ratios
from mla_ref.bench.sparse_plot import plot_sparse
from mla_ref.bench.timer import Clock, Contender, WallClock, compare_times, measure
from mla_ref.bench.timing import TimeComparison, Timing, in_words

__all__ = [
    "Agreement",
    "Check",
    "Clock",
    "Contender",
    "ContextRow",
    "CreatedTensor",
    "GateError",
    "Ratio",
    "SparseRow",
    "TensorMemory",
    "TimeComparison",
    "Timing",
    "Verdict",
    "WallClock",
    "close_to",
    "compare_times",
    "growth",
    "in_words",
    "measure",
    "measure_context",
    "measure_sparse",
    "plot",
    "plot_sparse",
    "ratios",
    "spoil",
]

"""Honest measurements: times behind a correctness gate, tensor memory counted to the byte."""

from mla_ref.bench.context import ContextRow, growth, measure_context
from mla_ref.bench.context_plot import plot
from mla_ref.bench.gate import Agreement, Check, GateError, Verdict, close_to, spoil
from mla_ref.bench.kernel_timer import kernel_timer
from mla_ref.bench.kernel_workload import KernelShape, KernelWorkload, make_workload, random_cache
from mla_ref.bench.kernels import KernelLine, KernelPoint, measure_kernels
from mla_ref.bench.memory import CreatedTensor, TensorMemory
from mla_ref.bench.receipt import Receipt, is_fresh, read_receipt
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
from mla_ref.bench.timing import NoTime, TimeComparison, Timing, in_words

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
    "KernelLine",
    "KernelPoint",
    "KernelShape",
    "KernelWorkload",
    "Launch",
    "NoTime",
    "Ratio",
    "Receipt",
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
    "is_fresh",
    "kernel_timer",
    "make_workload",
    "measure",
    "measure_context",
    "measure_kernels",
    "measure_routing",
    "measure_sparse",
    "measure_speculative",
    "plot",
    "plot_sparse",
    "plot_speculative",
    "random_cache",
    "ratios",
    "read_receipt",
    "spoil",
    "what_is_counted",
    "what_was_lost",
]

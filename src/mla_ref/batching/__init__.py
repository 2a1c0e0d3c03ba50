"""The host's side of a step: which tokens run, where their rows go, which kernel takes them."""

from mla_ref.batching.attend import attend_along
from mla_ref.batching.classify import Verdict, classify, is_verifier_batch
from mla_ref.batching.cost import KernelCost, kernel_cost
from mla_ref.batching.decide import Decision, decide
from mla_ref.batching.facts import BatchFacts, batch_facts
from mla_ref.batching.modes import SpecMode, parse_mode, read_max_q, read_mode
from mla_ref.batching.original import OriginalAnswer, original_route
from mla_ref.batching.reasons import REASONS
from mla_ref.batching.remedy import Remedy, find_remedy
from mla_ref.batching.reorder import CLASSES, Order, reorder_batch, request_class
from mla_ref.batching.route import Route, Segment, route, route_per_request
from mla_ref.batching.scratch import ScratchPlan, ScratchRows, ServingLimits, plan_scratch
from mla_ref.batching.server_metadata import ServerBatch, read_metadata
from mla_ref.batching.split import (
    SixWaySplit,
    Split,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)
from mla_ref.batching.step import Step
from mla_ref.batching.truth_table import TRUTH_TABLE, BatchKind
from mla_ref.batching.verifier import VerifierRows, one_row_requests

__all__ = [
    "CLASSES",
    "REASONS",
    "TRUTH_TABLE",
    "BatchFacts",
    "BatchKind",
    "Decision",
    "KernelCost",
    "Order",
    "OriginalAnswer",
    "Remedy",
    "Route",
    "ScratchPlan",
    "ScratchRows",
    "Segment",
    "ServerBatch",
    "ServingLimits",
    "SixWaySplit",
    "SpecMode",
    "Split",
    "Step",
    "Verdict",
    "VerifierRows",
    "attend_along",
    "batch_facts",
    "classify",
    "decide",
    "find_remedy",
    "is_verifier_batch",
    "kernel_cost",
    "one_row_requests",
    "original_route",
    "parse_mode",
    "plan_scratch",
    "read_max_q",
    "read_metadata",
    "read_mode",
    "reorder_batch",
    "request_class",
    "route",
    "route_per_request",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
]

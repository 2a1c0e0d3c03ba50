"""Running a model on requests: many at once with drafts, or plainly one to compare with."""

from mla_ref.engine.batch import Batch, logits_rows
from mla_ref.engine.blocks import BlockManager
from mla_ref.engine.difference import first_difference
from mla_ref.engine.engine import Engine
from mla_ref.engine.generate import generate
from mla_ref.engine.graphs import GraphSizes, StaticStep, StepGraphs
from mla_ref.engine.load import DRAFTERS, load_model, new_drafter, pages_for
from mla_ref.engine.prompts import Prompt, chat_text, read_prompts, request_seed
from mla_ref.engine.record import PARTS, Output, StepRecord, StopWatch
from mla_ref.engine.request import Request, RequestState, Status
from mla_ref.engine.runner import Executed, Runner
from mla_ref.engine.scheduler import Schedule, Scheduled, Scheduler
from mla_ref.engine.transcript import Transcript

__all__ = [
    "DRAFTERS",
    "PARTS",
    "Batch",
    "BlockManager",
    "Engine",
    "Executed",
    "GraphSizes",
    "Output",
    "Prompt",
    "Request",
    "RequestState",
    "Runner",
    "Schedule",
    "Scheduled",
    "Scheduler",
    "StaticStep",
    "Status",
    "StepGraphs",
    "StepRecord",
    "StopWatch",
    "Transcript",
    "chat_text",
    "first_difference",
    "generate",
    "load_model",
    "logits_rows",
    "new_drafter",
    "pages_for",
    "read_prompts",
    "request_seed",
]

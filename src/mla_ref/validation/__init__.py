"""Decode against extend on thousands of verifier rows of a real model, with controls."""

from mla_ref.validation.configuration import (
    CACHES,
    DTYPES,
    FULL_ROWS,
    Configuration,
    Finding,
    full_axes,
    validate_configuration,
)
from mla_ref.validation.kernels import Kernels, plan_kernels
from mla_ref.validation.layer_errors import LayerError, LayerErrors
from mla_ref.validation.measure import PairStatistics, RowDifference, Summary, row_differences
from mla_ref.validation.plot import draw_validation, plot_validation
from mla_ref.validation.prompts import package_prompts
from mla_ref.validation.replay import PAIRS, Replay, RowPlace, replay
from mla_ref.validation.script import Script, ScriptStep, write_scripts
from mla_ref.validation.verdict import TopChange, Verdict, headline, judge

__all__ = [
    "CACHES",
    "DTYPES",
    "FULL_ROWS",
    "PAIRS",
    "Configuration",
    "Finding",
    "Kernels",
    "LayerError",
    "LayerErrors",
    "PairStatistics",
    "Replay",
    "RowDifference",
    "RowPlace",
    "Script",
    "ScriptStep",
    "Summary",
    "TopChange",
    "Verdict",
    "draw_validation",
    "full_axes",
    "headline",
    "judge",
    "package_prompts",
    "plan_kernels",
    "plot_validation",
    "replay",
    "row_differences",
    "validate_configuration",
    "write_scripts",
]

"""Numbers that every floor relies on: the oracle, comparison, the precision rule, LSE and merge."""

from mla_ref.numerics.compare import Comparison, compare
from mla_ref.numerics.hadamard import hadamard
from mla_ref.numerics.lse import apply_sink, blank_empty_rows, to_natural_lse
from mla_ref.numerics.merge import merge, merge_many
from mla_ref.numerics.mxfp8 import MXFP8Tensor, dequantise_mxfp8, quantise_mxfp8
from mla_ref.numerics.nvfp4 import NVFP4Tensor, dequantise_nvfp4, quantise_nvfp4
from mla_ref.numerics.oracle import oracle_attention
from mla_ref.numerics.precision import PrecisionVerdict, precision_rule
from mla_ref.numerics.result import AttentionResult, compute_dtype, lse_dtype

__all__ = [
    "AttentionResult",
    "Comparison",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "PrecisionVerdict",
    "apply_sink",
    "blank_empty_rows",
    "compare",
    "compute_dtype",
    "dequantise_mxfp8",
    "dequantise_nvfp4",
    "hadamard",
    "lse_dtype",
    "merge",
    "merge_many",
    "oracle_attention",
    "precision_rule",
    "quantise_mxfp8",
    "quantise_nvfp4",
    "to_natural_lse",
]

"""What a kernel is handed, field for field as the structs of call.cuh, merge.cu, cache_write.cu."""

import ctypes

import torch
from torch import Tensor

from mla_ref.checks import describe

# The enum Number of call.cuh.
NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_P, _L, _I = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Call(ctypes.Structure):
    """struct Call of call.cuh."""

    _fields_ = (
        *_fields(_P, "q cache indices counts sink out lse"),
        *_fields(_L, "q_row q_head q_dim page_stride row_stride list_row count_row"),
        *_fields(_L, "out_row out_head lse_row lse_head out_split lse_split slots"),
        *_fields(_I, "rows heads topk splits split_length page_size one_piece"),
        *_fields(_I, "q_number out_number sink_number sink_step"),
        ("scale", ctypes.c_float),
    )


class UnionCall(ctypes.Structure):
    """struct UnionCall of decode_union.cu."""

    _fields_ = (
        ("call", Call),
        ("starts", _P),
        *_fields(_I, "request_rows row_shift row_parts parts"),
        ("last_hash", ctypes.c_uint),
    )


class Merge(ctypes.Structure):
    """struct Merge of merge.cu."""

    _fields_ = (
        *_fields(_P, "outs lses sink out lse"),
        *_fields(_L, "part_out part_row part_head part_lse part_lse_row part_lse_head"),
        *_fields(_L, "out_row out_head lse_row lse_head"),
        *_fields(_I, "parts heads width part_number out_number sink_number sink_step"),
    )


class Write(ctypes.Structure):
    """struct Write of cache_write.cu."""

    _fields_ = (
        *_fields(_P, "cache rows slots"),
        *_fields(_L, "page_stride row_stride from_row from_dim slot_stride capacity"),
        *_fields(_I, "tokens width page_size number rule slots_are_64_bit"),
    )


def number_of(name: str, tensor: Tensor) -> int:
    """The kernels' code for a tensor's dtype."""
    if tensor.dtype not in NUMBERS:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {describe(tensor)}")
    return NUMBERS[tensor.dtype]


def sink_fields(sink: Tensor | None) -> dict[str, int | None]:
    """The three fields that describe a sink; without one a null pointer."""
    if sink is None:
        return {"sink": None}
    return {
        "sink": sink.data_ptr(),
        "sink_number": number_of("sink", sink),
        "sink_step": sink.stride(0),
    }

"""The exercise of lesson 10: attention over lists of slots, with entries that are none."""

import math

import torch
from torch import Tensor

from mla_ref.attention import causal_attention, sparse_extend
from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_parts, expect_tensor

_H, _D, _D_V, _SLOTS, _SCALE = 3, 12, 8, 20, 0.4


def _problem(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, _H, _D, generator=generator)
    return q, torch.randn(_SLOTS, _D, generator=generator)


def _run(sparse: Function, q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = expect_parts(sparse(q, kv, indices, _SCALE, _D_V), ("out", "lse"))
    shape = tuple(q.shape[:2])
    return (
        expect_tensor(out, torch.float32, (*shape, _D_V), "out"),
        expect_tensor(lse, torch.float32, shape, "lse"),
    )


def _expect(sparse: Function, q: Tensor, kv: Tensor, indices: Tensor) -> None:
    out, lse = _run(sparse, q, kv, indices)
    right = sparse_extend(q, kv[:, None], indices, softmax_scale=_SCALE, kv_lora_rank=_D_V)
    expect_close(lse, right.lse, "lse", max_abs=1e-5)
    expect_close(out, right.out, "out", max_abs=1e-5)


def _lists_case(name: str, why: str, lists: list[list[int]]) -> Case:
    def check(sparse: Function) -> None:
        q, kv = _problem(len(lists), rows=len(lists))
        indices = torch.tensor(lists, dtype=torch.int32).reshape(len(lists), -1)
        _expect(sparse, q, kv, indices)

    return Case(name, why, check)


def _check_by_hand(sparse: Function) -> None:
    # Scores 0 and ln 2, values 0 and 3: (1 * 0 + 2 * 3) / 3 = 2, LSE ln 3.
    kv = torch.tensor([[0.0, 0.0], [3.0, math.log(2.0)], [9.0, 9.0]])
    q, indices = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[0, 1]], dtype=torch.int32)
    out, lse = expect_parts(sparse(q, kv, indices, 1.0, 1), ("out", "lse"))
    out = expect_tensor(out, torch.float32, (1, 1, 1), "out")
    expect_close(out, torch.tensor([[[2.0]]]), "out", max_abs=1e-6)
    lse = expect_tensor(lse, torch.float32, (1, 1), "lse")
    expect_close(lse, torch.tensor([[math.log(3.0)]]), "lse", max_abs=1e-6)


def _check_dense(sparse: Function) -> None:
    q, kv = _problem(5, rows=6)
    positions = torch.arange(_SLOTS).expand(6, -1)
    lens = torch.arange(_SLOTS - 5, _SLOTS + 1)
    indices = positions.masked_fill(positions >= lens[:, None], -1).int()
    out, lse = _run(sparse, q, kv, indices)
    dense = causal_attention(q, kv[:, None], kv[:, None, :_D_V], softmax_scale=_SCALE)
    expect_close(lse, dense.lse, "lse", max_abs=1e-5)
    expect_close(out, dense.out, "out", max_abs=1e-5)


def _check_poison(sparse: Function) -> None:
    for bad in (math.nan, math.inf):
        q, kv = _problem(6)
        kv[0], kv[_SLOTS - 1] = bad, bad
        lists = [[3, -1, 7], [-1, -1, 2], [5, 6, -1], [-1, -1, -1]]
        _expect(sparse, q, kv, torch.tensor(lists, dtype=torch.int32))


def _check_no_slots(sparse: Function) -> None:
    q, kv = _problem(7)
    _expect(sparse, q, kv, torch.empty(4, 0, dtype=torch.int32))
    _expect(sparse, q, kv[:0], torch.full((4, 3), -1, dtype=torch.int32))


SPARSE = Exercise(
    id="10-sparse-attention",
    title="Attention over lists",
    task=(
        "Write `sparse(q, kv, indices, softmax_scale, d_v)`: attention of each row over the slots "
        "that its list names. A row of `kv` is the key, and its first `d_v` numbers are the value. "
        "-1 may stand anywhere and means none; an index outside `kv` is treated like -1; a slot "
        "that is listed twice counts twice. Return `(out, lse)` in float32, the LSE in natural "
        "logarithms; a row without any entry gives 0 and -inf. What lies in slots that are not on "
        "a row's list must not matter."
    ),
    signature=(
        'def sparse(\n    q: Float[Tensor, "rows h d_row"],\n'
        '    kv: Float[Tensor, "slots d_row"],\n    indices: Int[Tensor, "rows k"],\n'
        "    softmax_scale: float,\n    d_v: int,\n"
        ') -> tuple[Float[Tensor, "rows h d_v"], Float[Tensor, "rows h"]]:'
    ),
    cases=(
        Case(
            "one row, two slots, by hand",
            "Scores 0 and ln 2, values 0 and 3. The third row of the cache is not on the list.",
            _check_by_hand,
        ),
        _lists_case(
            "three rows with lists of their own",
            "Each row gathers for itself, in any order. The heads share the list.",
            [[4, 2, 19, 7], [0, 1, 2, 3], [11, 5, 6, 18]],
        ),
        Case(
            "lists of all keys equal dense attention",
            "The test that every sparse kernel needs: with top-k as long as the context, nothing "
            "is left out. Early rows end in -1.",
            _check_dense,
        ),
        _lists_case(
            "-1 first, last and between",
            "Lists are not always sorted or packed: a rank of a parallel cache holds some of the "
            "entries, and a kernel that met 16 of -1 first gave NaN for good (vllm#48364).",
            [[-1, -1, 3, 5], [4, -1, -1, 9], [8, 1, -1, -1]],
        ),
        _lists_case(
            "rows without any entry",
            "A padded row of a batch. It must be 0 and -inf, or merging and quantising spread NaN.",
            [[-1, -1], [3, 4], [-1, -1]],
        ),
        _lists_case(
            "a slot listed twice",
            "A matter of contract: here it counts as often as it is listed, so a mask is no "
            "substitute for a list.",
            [[3, 3, 5], [7, 7, 7]],
        ),
        _lists_case(
            "indices beyond the cache",
            "A stale or uninitialised list must not read memory that is not there. Attention's "
            "public test suites use INT_MIN and INT_MAX.",
            [[2, 20, 5], [-2, 1, 2**31 - 1], [-(2**31), -1, 99]],
        ),
        Case(
            "NaN and inf in the first and the last slot",
            "kv[-1] is the last row, silently, and clamping -1 to 0 reads the first. Their weight "
            "is 0, and 0 * NaN is NaN (miles#2079).",
            _check_poison,
        ),
        Case(
            "lists of width 0, and a cache without slots",
            "The warm-up of a server.",
            _check_no_slots,
        ),
    ),
)

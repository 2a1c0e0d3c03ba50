"""What the tests of the kernel bench share: a small workload, a clock that invents times, fakes."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_ref.backends import find_backend
from mla_ref.bench import KernelShape, KernelWorkload, make_workload, random_cache
from mla_ref.bench.ceilings import Ceilings
from mla_ref.bench.kernel_workload import SOFTMAX_SCALE
from mla_ref.numerics import AttentionResult
from mla_ref.platform import Captured

CPU = torch.device("cpu")
CEILINGS = Ceilings(1e12, 1e15, 1e-6, "a copy", "a product")
SM90, SM120 = (9, 0), (12, 0)


def small_workload(
    name: str = "verifier", *, rows: int = 4, heads: int = 2, topk: int = 64
) -> KernelWorkload:
    return make_workload(name, KernelShape(rows, heads, topk), random_cache(512, "fp8", CPU))


def right_result(work: KernelWorkload) -> AttentionResult:
    """By the torch backend."""
    rows = work.shape.rows
    plan = find_backend("torch").plan(work.shape.spec, max_rows=rows, max_requests=rows, device=CPU)
    return plan.extend(work.q, work.kv_cache, work.indices, softmax_scale=SOFTMAX_SCALE)


class FakeClock:
    """A GPU that runs everything at once and takes as long as it is told, in turn.

    Attributes:
        calls: What was asked of it, in order.
    """

    flush_bytes = 2**20

    def __init__(self, *seconds: float, captures: bool = True) -> None:
        self.seconds_in_turn = list(seconds) or [1e-3]
        self.captures = captures
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def capture(self, run: Callable[[], Any]) -> Captured:
        self.calls.append("capture")
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        result = run()

        def replay() -> None:
            self.calls.append("replay")
            _write(result, run())

        return Captured(replay, result)

    def seconds(
        self, run: Callable[[], object], repeats: int, before_each: Callable[[], None]
    ) -> Sequence[float]:
        for _ in range(repeats):
            before_each()
            run()
        took = self.seconds_in_turn.pop(0)
        self.seconds_in_turn.append(took)
        return [took] * repeats

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def _write(into: Any, values: Any) -> None:
    for target, value in zip(_tensors(into), _tensors(values), strict=True):
        target.copy_(value)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def importer(**modules: Any) -> Callable[[str], Any]:
    """An import of these modules, dots written as __, and of no others."""
    found = {name.replace("__", "."): module for name, module in modules.items()}

    def import_module(name: str) -> Any:
        if name not in found:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found[name]

    return import_module


def on_sm90(device: torch.device) -> tuple[int, int]:
    return SM90


def on_sm120(device: torch.device) -> tuple[int, int]:
    return SM120


class FakeOperators:
    """FlashMLA's operator, in torch: keeps its arguments, and gives FlashMLA's layouts."""

    def __init__(self, work: KernelWorkload, *, error: float = 0.0) -> None:
        self.work, self.error = work, error
        self.arguments: list[tuple[Any, ...]] = []

    def sparse_decode_fwd(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.arguments.append(arguments)
        q, cache, indices = arguments[:3]
        heads, s_q = self.work.shape.heads, q.shape[1]
        call = SimpleNamespace(shape=self.work.shape, q=q.flatten(0, 1)[:, :heads].contiguous())
        result = right_result(
            KernelWorkload(
                self.work.name,
                call.shape,
                call.q,
                cache[:, :, 0],
                indices.flatten(0, 1),
                0.0,
                1,
            )
        )
        padding = q.shape[2] - heads
        out = torch.nn.functional.pad(result.out + self.error, (0, 0, 0, padding))
        lse = torch.nn.functional.pad(result.lse, (0, padding))
        return (
            out.unflatten(0, (-1, s_q)),
            lse.unflatten(0, (-1, s_q)).transpose(1, 2),
            torch.tensor([1]),
            torch.tensor([2]),
        )

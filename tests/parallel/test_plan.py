"""Plans whose results can be merged over ranks, and those that are refused, when they are made."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parallel.problems import VERIFIER, rank_problem
from tests.support import assert_agrees, raw

from mla_ref.backends import AttnSpec, Plan, TorchBackend
from mla_ref.numerics import AttentionResult, to_natural_lse
from mla_ref.parallel import plan_for_ranks
from mla_ref.parallel.attend import merge_shares

CPU = torch.device("cpu")
LN2 = math.log(2)
SPEC = AttnSpec(
    num_heads=3,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    topk=11,
    page_size=16,
    cache_format="bf16",
    q_dtype=torch.float32,
)
Change = Callable[[AttentionResult], Any]


@dataclasses.dataclass(frozen=True)
class ForeignPlan:
    """A plan of the torch backend whose results are changed on the way out."""

    plan: Plan
    change: Change
    routes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        result = self.plan.decode(*args, **kwargs)
        return self.change(result) if "decode" in self.routes else result

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        result = self.plan.extend(*args, **kwargs)
        return self.change(result) if "extend" in self.routes else result


@dataclasses.dataclass(frozen=True)
class ForeignBackend:
    change: Change
    routes: tuple[str, ...] = ("decode", "extend")
    name: str = "foreign"
    parts: Any = dataclasses.field(default_factory=dict)

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        return None

    def plan(self, spec: AttnSpec, **kwargs: Any) -> ForeignPlan:
        return ForeignPlan(TorchBackend().plan(spec, **kwargs), self.change, self.routes)


def base_2(result: AttentionResult) -> AttentionResult:
    return AttentionResult(result.out, result.lse / LN2)


def plan(backend: Any, spec: AttnSpec = SPEC, max_rows: int = 4) -> Plan:
    return raw(plan_for_ranks)(backend, spec, max_rows=max_rows, max_requests=2, device=CPU)


@pytest.mark.parametrize("topk", [1, 2, 11])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("q_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_honest_backend_is_planned(topk: int, page_size: int, q_dtype: torch.dtype) -> None:
    spec = dataclasses.replace(SPEC, topk=topk, page_size=page_size, q_dtype=q_dtype)
    assert plan(TorchBackend(), spec).nbytes > 0
    served = dataclasses.replace(spec, kv_lora_rank=512, qk_rope_head_dim=64, cache_format="fp8")
    assert plan(TorchBackend(), served, max_rows=1).nbytes > 0


@pytest.mark.parametrize("route", ["decode", "extend"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.out, "gives no LSE"),
        (lambda r: None, "gives no LSE"),
        (lambda r: AttentionResult(r.out, None), "gives no LSE"),
        (lambda r: AttentionResult(r.out, r.lse.bfloat16()), "LSE of torch.bfloat16"),
        (lambda r: AttentionResult(r.out.bfloat16(), r.lse), "partial results in torch.float32"),
        (lambda r: AttentionResult(r.out, r.lse.nan_to_num(neginf=-1e4)), "row without keys"),
        (lambda r: AttentionResult(r.out, r.lse.abs()), "row without keys"),
    ],
)
def test_B119_without_an_lse_there_is_no_plan(change: Change, message: str, route: str) -> None:
    """Found out before a request runs, whichever of the two ways is at fault."""
    with pytest.raises(ValueError, match=rf"'foreign' cannot serve .* its {route} .*{message}"):
        plan(ForeignBackend(change, (route,)))


@pytest.mark.parametrize("topk", [1, 2, 11])
def test_B111_another_base_is_refused_or_converted_by_name(topk: int) -> None:
    """In base 2 a merge goes through and is wrong, so a plan must not."""
    spec = dataclasses.replace(SPEC, topk=topk)
    with pytest.raises(ValueError, match=r"gives the LSE .* to_natural_lse"):
        plan(ForeignBackend(base_2), spec)
    # The empty row of another convention: +inf.
    plus = ForeignBackend(lambda r: AttentionResult(r.out, r.lse.abs()))
    with pytest.raises(ValueError, match="-inf for a row without keys"):
        plan(plus, spec)

    def converted(result: AttentionResult) -> AttentionResult:
        foreign = base_2(result)
        return AttentionResult(foreign.out, to_natural_lse(foreign.lse, base="2"))

    assert plan(ForeignBackend(converted), spec)
    with pytest.raises(ValueError, match="base must be one of e, 2"):
        raw(to_natural_lse)(torch.zeros(1), base="10")


def test_B110_ranks_are_merged_by_natural_lses() -> None:
    """Sums 2 and 8, outputs 0 and 10: 8. Through the function that all ranks end with."""
    outs = torch.tensor([0.0, 10.0], dtype=torch.float64).view(2, 1, 1, 1)

    def merged(*lses: float) -> float:
        parts = torch.tensor(lses, dtype=torch.float64).view(2, 1, 1)
        return float(merge_shares(outs, parts, None, torch.float64).out)

    assert merged(math.log(2), math.log(8)) == pytest.approx(8.0, abs=1e-12)
    assert merged(math.log(2) * LN2, math.log(8) * LN2) == pytest.approx(7.2330317, abs=1e-7)
    assert merged(1.0, 3.0) == pytest.approx(8.8079708, abs=1e-7)
    lse = to_natural_lse(torch.tensor([1.0, 3.0], dtype=torch.float64), base="2")
    assert merged(*lse.tolist()) == pytest.approx(8.0, abs=1e-12)


def test_a_foreign_backend_serves_the_ranks() -> None:
    problem = rank_problem(**VERIFIER)
    honest = ForeignBackend(lambda result: result)
    assert_agrees(problem.simulate(4, backend=honest), problem.one_rank(), rel_l2=1e-6)
    with pytest.raises(ValueError, match="to_natural_lse"):
        problem.simulate(4, backend=ForeignBackend(base_2))


@pytest.mark.parametrize(("kind", "other"), [("decode", "extend"), ("extend", "decode")])
def test_only_the_kinds_that_are_asked_for_are_planned_and_probed(kind: str, other: str) -> None:
    faulty = ForeignBackend(base_2, (other,))
    made = raw(plan_for_ranks)(faulty, SPEC, max_rows=4, max_requests=2, device=CPU, kinds=(kind,))
    assert made.plan.kinds == (kind,)
    assert rank_problem(**VERIFIER).simulate(2, backend=faulty, route=kind).lse.isfinite().any()
    with pytest.raises(ValueError, match="to_natural_lse"):
        raw(plan_for_ranks)(faulty, SPEC, max_rows=4, max_requests=2, device=CPU, kinds=(other,))


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="kinds must be a tuple"):
        raw(plan_for_ranks)(
            TorchBackend(), SPEC, max_rows=4, max_requests=2, device=CPU, kinds="decode"
        )
    with pytest.raises(TypeError, match="backend must have"):
        plan("torch")
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        plan(TorchBackend(), max_rows=0)
    with pytest.raises(ValueError, match="656-byte row"):
        plan(TorchBackend(), dataclasses.replace(SPEC, cache_format="fp8"))

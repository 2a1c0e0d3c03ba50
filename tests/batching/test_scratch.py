"""Rows of the two plans in each mode, bytes, and that nothing ever grows."""

import pytest
import torch
from tests.batching.routed_problem import SPEC, small_plan
from tests.support import raw

from mla_ref.backends import KINDS, AttnSpec, TorchBackend
from mla_ref.batching import ScratchPlan, ScratchRows, ServingLimits, SpecMode, plan_scratch

OFF, AUTO, FORCED = SpecMode.OFF, SpecMode.AUTO, SpecMode.FORCED


@pytest.mark.parametrize(
    ("seqs", "tokens", "n", "max_q", "mode", "rows"),
    [
        (16, 8192, 3, 8, OFF, 16),
        (16, 8192, 3, 8, AUTO, 64),
        (16, 8192, 3, 8, FORCED, 128),
        (16, 8192, 9, 8, FORCED, 160),
        (16, 8192, 9, 8, AUTO, 160),
        (16, 32, 3, 8, AUTO, 32),
        (16, 32, 3, 8, FORCED, 32),
        (16, 8192, 0, 8, AUTO, 16),
        (16, 8192, 0, 8, FORCED, 128),
        (1, 8192, 3, 8, AUTO, 4),
        # A step of one token for each request must fit, whatever the tokens.
        (16, 8, 3, 8, AUTO, 16),
        (64, 8192, 2, 8, AUTO, 192),
    ],
)
def test_decode_rows(seqs, tokens, n, max_q, mode, rows) -> None:
    planned = ScratchRows(ServingLimits(seqs, tokens, n, max_q), mode)
    assert planned.decode_rows == planned.rows("decode") == rows
    assert planned.extend_rows == planned.rows("extend") == tokens


def test_B001_rows_follow_from_the_drafts_and_not_from_a_generic_maximum() -> None:
    planned = [ScratchRows(ServingLimits(8, 8192, 3, max_q)) for max_q in (1, 8, 512)]
    assert [p.decode_rows for p in planned] == [32, 32, 32]


def test_a_word_will_do_for_the_mode() -> None:
    assert plan_scratch(TorchBackend(), SPEC, ServingLimits(1, 1), " OFF ").mode is OFF


def test_bytes_are_those_that_the_backend_has_allocated() -> None:
    backend = TorchBackend()
    limits = ServingLimits(4, 100, 3)
    plan = plan_scratch(backend, SPEC, limits)
    cpu = torch.device("cpu")
    both = backend.plan(SPEC, max_rows=16, max_requests=16, device=cpu)
    assert plan.decode.nbytes == both.nbytes > 0
    assert plan.extend.nbytes == 0
    assert plan.nbytes == both.nbytes
    buffers = [*plan.decode.partials, *plan.extend.partials]
    assert plan.nbytes == sum(b.untyped_storage().nbytes() for b in buffers)
    # Without memory the same is counted.
    counted = plan_scratch(backend, SPEC, limits, device=torch.device("meta"))
    assert counted.nbytes == plan.nbytes


def test_each_plan_is_for_its_kernel_alone() -> None:
    """The splits of 8,192 rows of extend took 134 MB and were never written."""
    spec = AttnSpec(num_heads=8)
    plan = plan_scratch(
        TorchBackend(), spec, ServingLimits(16, 8192, 3), device=torch.device("meta")
    )
    assert (plan.decode.kinds, plan.extend.kinds) == (("decode",), ("extend",))
    both = TorchBackend().plan(spec, max_rows=8192, max_requests=16, device=torch.device("meta"))
    assert both.nbytes == 8192 * 8 * 513 * 4
    assert plan.nbytes == plan.decode.num_splits * 64 * 8 * 513 * 4


@pytest.mark.parametrize(("kind", "other"), [("decode", "extend"), ("extend", "decode")])
def test_the_plan_of_one_kernel_does_not_run_the_other(kind: str, other: str) -> None:
    plan = small_plan().take(kind, 1)
    q = torch.zeros(1, SPEC.num_heads, SPEC.row_dim, dtype=SPEC.q_dtype)
    cache = torch.zeros(1, SPEC.page_size, SPEC.row_dim, dtype=SPEC.q_dtype)
    indices = torch.zeros(1, SPEC.topk, dtype=torch.int32)
    getattr(plan, kind)(q, cache, indices, softmax_scale=1.0)
    with pytest.raises(ValueError, match=f"this plan is for {kind}, it cannot run {other}"):
        getattr(plan, other)(q, cache, indices, softmax_scale=1.0)


class Recording:
    """A backend that keeps what it was asked for."""

    name, parts = "recording", {}

    def __init__(self) -> None:
        self.asked = []

    def supports(self, spec, device) -> str | None:
        return None

    def plan(self, spec, *, max_rows, max_requests, device, kinds=KINDS):
        self.asked.append((max_rows, max_requests, kinds))
        return TorchBackend().plan(
            spec, max_rows=max_rows, max_requests=max_requests, device=device, kinds=kinds
        )


def test_B005_every_verifier_row_is_a_request_of_the_decode_plan() -> None:
    """Its lengths stand by row: a plan for 16 requests would hold the lengths of 16 rows."""
    backend = Recording()
    plan_scratch(backend, SPEC, ServingLimits(16, 200, 3))
    assert backend.asked == [(64, 64, ("decode",)), (200, 16, ("extend",))]


def test_B007_four_tokens_after_a_plan_for_one_are_refused() -> None:
    plan = small_plan(seqs=2, n=0)
    with pytest.raises(ValueError, match=r"rows is 8, but decode is planned for 2 at most") as e:
        plan.take("decode", 8)
    assert "num_speculative_tokens 0" in str(e.value)
    assert plan.take("decode", 2) is plan.decode
    # The plan itself refuses as well, with both numbers: nothing is cut.
    q = torch.zeros(8, SPEC.num_heads, SPEC.row_dim, dtype=SPEC.q_dtype)
    cache = torch.zeros(1, SPEC.page_size, SPEC.row_dim, dtype=SPEC.q_dtype)
    indices = torch.zeros(8, SPEC.topk, dtype=torch.int32)
    with pytest.raises(ValueError, match="q has 8 rows, but the plan is for 2"):
        plan.decode.decode(q, cache, indices, softmax_scale=1.0)


def test_B013_a_plan_never_grows() -> None:
    plan = small_plan()
    before = [t.data_ptr() for p in (plan.decode, plan.extend) for t in p.partials]
    for rows in (1, 32, 5):
        assert plan.take("decode", rows) is plan.decode
    with pytest.raises(ValueError, match="rows is 33, but decode is planned for 32"):
        plan.take("decode", 33)
    with pytest.raises(ValueError, match="rows is 65, but extend is planned for 64"):
        plan.take("extend", 65)
    assert [t.data_ptr() for p in (plan.decode, plan.extend) for t in p.partials] == before
    with pytest.raises(AttributeError):
        plan.decode = plan.extend


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("num_speculative_tokens", -1),
        ("max_q", 0),
        ("max_q", "8"),
        ("max_num_seqs", True),
    ],
)
def test_bad_limits_are_named(field, value) -> None:
    good = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    with pytest.raises((TypeError, ValueError), match=field):
        raw(ServingLimits)(**(good | {field: value}))


def test_other_bad_input_is_named() -> None:
    limits = ServingLimits(1, 1)
    with pytest.raises(TypeError, match="limits"):
        raw(ScratchRows)((1, 1))
    with pytest.raises(TypeError, match="mode must be a SpecMode"):
        raw(ScratchRows)(limits, "auto")
    with pytest.raises(ValueError, match="mode must be one of"):
        plan_scratch(TorchBackend(), SPEC, limits, "maybe")
    with pytest.raises(ValueError, match="kind"):
        ScratchRows(limits).rows("prefill")
    with pytest.raises(TypeError, match="backend"):
        raw(plan_scratch)("torch", SPEC, limits)
    narrow = AttnSpec(num_heads=1, kv_lora_rank=8, cache_format="fp8")
    with pytest.raises(ValueError, match="656"):
        plan_scratch(TorchBackend(), narrow, limits)
    with pytest.raises((TypeError, ValueError), match="rows"):
        raw(ScratchPlan.take)(small_plan(), "decode", -1)

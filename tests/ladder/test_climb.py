"""The climb passes on right rungs and names the rung that is wrong."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_ref.attention import expand_kv
from mla_ref.backends import TorchBackend
from mla_ref.ladder import kernel_runs, rung_runs, serving_runs, sparse_runs, speculative_runs
from mla_ref.ladder.activations import IndexView, LatentView, LayerActivations
from mla_ref.ladder.climb import climb
from mla_ref.ladder.kernel_runs import BACKENDS, kernel_gap
from mla_ref.ladder.report import disagreement, to_json
from mla_ref.ladder.rung_runs import gaps, hand_worked
from mla_ref.numerics import AttentionResult


def activations(n=70, dtype=torch.float64, layer=0):
    """A small layer whose K and V come from latents; 70 tokens fill one page and a bit."""
    torch.manual_seed(layer)
    h, d_n, d_r, d_c, d_v = 4, 8, 4, 12, 6
    view = LatentView(
        "random",
        torch.randn(n, h, d_n, dtype=dtype),
        torch.randn(n, h, d_r, dtype=dtype),
        torch.randn(n, d_c + d_r, dtype=dtype),
        torch.randn(h, d_n, d_c, dtype=dtype) / d_c**0.5,
        torch.randn(h, d_v, d_c, dtype=dtype) / d_c**0.5,
    )
    k, v = expand_kv(view.kv_rows, view.w_uk, view.w_uv)
    q = torch.cat([view.q_nope, view.q_pe], dim=-1)
    return LayerActivations(layer, q, k, v, (view,), (d_n + d_r) ** -0.5)


def served_activations(n=70, dtype=torch.float64, indexed=True):
    """A layer with rows of 512 + 64 numbers and index keys of 128: it can climb all rungs."""
    torch.manual_seed(3)
    h, d_n, d_v = 2, 8, 6
    view = LatentView(
        "random",
        torch.randn(n, h, d_n, dtype=dtype),
        torch.randn(n, h, 64, dtype=dtype),
        torch.randn(n, 576, dtype=dtype),
        torch.randn(h, d_n, 512, dtype=dtype) / 512**0.5,
        torch.randn(h, d_v, 512, dtype=dtype) / 512**0.5,
    )
    k, v = expand_kv(view.kv_rows, view.w_uk, view.w_uv)
    q = torch.cat([view.q_nope, view.q_pe], dim=-1)
    index = IndexView(
        torch.randn(n, 8, 128, dtype=dtype),
        torch.randn(n, 8, dtype=dtype),
        torch.randn(n, 128, dtype=dtype),
        max(n // 4, 1),
        "pow2-floor",
    )
    return LayerActivations(0, q, k, v, (view,), 72**-0.5, index if indexed else None)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_rungs_agree(n, dtype):
    reports = list(climb([activations(n, dtype), activations(n, dtype, layer=1)]))
    assert [r.rung.number for r in reports] == [1, 2, 3, 4, 5, 6]
    assert all(r.ok for r in reports), [disagreement(r) for r in reports if not r.ok]


@pytest.mark.parametrize("n", [1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_fifteen_rungs_agree(n, dtype):
    layer = served_activations(n, dtype)
    reports = list(climb([layer]))
    kernels = [number for number in (14, 15) if not kernel_gap(number, layer)]
    assert dtype != torch.float64 or not kernels
    assert [r.rung.number for r in reports] == [*range(1, 14), *kernels]
    assert all(r.ok for r in reports), [disagreement(r) for r in reports if not r.ok]


def test_how_far_a_layer_climbs_is_what_it_has():
    assert len(list(climb([activations()]))) == 6
    assert len(list(climb([served_activations(indexed=False)]))) == 7
    # All layers climb together.
    assert len(list(climb([served_activations(), served_activations(indexed=False)]))) == 7


def test_the_example_by_hand_is_right():
    assert hand_worked().max_abs < 1e-15


def _flipped(function):
    def wrong(*args, **kwargs):
        out, lse = function(*args, **kwargs)
        return AttentionResult(-out, lse)

    return wrong


def _lse_in_base_two(function):
    def wrong(*args, **kwargs):
        out, lse = function(*args, **kwargs)
        return AttentionResult(out, lse / 0.6931471805599453)

    return wrong


FUNCTIONS = [
    "causal_attention",
    "vectorised_attention",
    "online_attention",
    "paged_attention",
    "mla_expanded_attention",
    "mla_absorbed_attention",
]


@pytest.mark.parametrize("fault", [_flipped, _lse_in_base_two], ids=["sign", "LSE base"])
@pytest.mark.parametrize("number", range(1, 7))
def test_a_wrong_rung_is_named(monkeypatch, number, fault):
    name = FUNCTIONS[number - 1]
    monkeypatch.setattr(rung_runs, name, fault(getattr(rung_runs, name)))
    reports = list(climb([activations()]))
    assert not reports[number - 1].ok
    assert f"rung {number} " in disagreement(reports[number - 1])
    assert all(r.ok for r in reports[: number - 1])


SPARSE_FUNCTIONS = {
    7: (sparse_runs, "fp8_latent_attention"),
    9: (sparse_runs, "sparse_extend"),
    10: (sparse_runs, "sparse_decode"),
    11: (serving_runs, "attend_along"),
    12: (speculative_runs, "attend_along"),
    13: (serving_runs, "simulate_ranks"),
}


@pytest.mark.parametrize("fault", [_flipped, _lse_in_base_two], ids=["sign", "LSE base"])
@pytest.mark.parametrize("number", SPARSE_FUNCTIONS)
def test_a_wrong_sparse_rung_is_named(monkeypatch, number, fault):
    module, name = SPARSE_FUNCTIONS[number]
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    reports = {r.rung.number: r for r in climb([served_activations()])}
    assert not reports[number].ok
    assert f"rung {number} " in disagreement(reports[number])
    assert all(r.ok for below, r in reports.items() if below < number)


def test_decode_that_hides_earlier_candidates_is_caught(monkeypatch):
    """What decode was believed to do to a verifier's rows, and why extend was taken."""
    right = serving_runs.attend_along

    def believed(route, plans, q, cache, slots, **kwargs):
        hidden = slots.clone()
        newest = slots[3] == slots[0].max() + 1
        hidden[3] = slots[3].masked_fill(newest, -1)
        return right(route, plans, q, cache, hidden, **kwargs)

    layer = served_activations(n=8)
    layer = replace(layer, index=replace(layer.index, topk=8))
    assert all(r.ok for r in climb([layer]))
    monkeypatch.setattr(serving_runs, "attend_along", believed)
    assert [r.rung.number for r in climb([layer]) if not r.ok] == [11]


def _chooses_the_worst(function):
    def wrong(q, weights, cache, **kwargs):
        return function(q, -weights, cache, **kwargs)

    return wrong


def _sees_the_future(function):
    def wrong(*args, **kwargs):
        positions = function(*args, **kwargs)
        return positions.roll(-1, 0)

    return wrong


@pytest.mark.parametrize("fault", [_chooses_the_worst, _sees_the_future])
def test_a_wrong_selection_is_named(monkeypatch, fault):
    right = sparse_runs.select_positions
    monkeypatch.setattr(sparse_runs, "select_positions", fault(right))
    reports = list(climb([served_activations()]))
    assert not reports[7].ok
    assert "chosen" in disagreement(reports[7])


def test_the_error_of_rounding_is_told_and_not_counted_as_a_fault():
    report = list(climb([served_activations()]))[6]
    assert report.ok and report.out.rel_l2 < 1e-12
    # E4M3 keeps 4 bits: a few percent.
    assert re.search(r"off by [1-9]\.\de-02", report.shown)


def test_a_rung_wrong_in_a_ragged_batch_only_is_caught(monkeypatch):
    right = rung_runs.paged_attention

    def wrong(q, *args, query_start_loc, **kwargs):
        out, lse = right(q, *args, query_start_loc=query_start_loc, **kwargs)
        return AttentionResult(out if len(query_start_loc) == 2 else out.flip(0), lse)

    monkeypatch.setattr(rung_runs, "paged_attention", wrong)
    assert not list(climb([activations()]))[3].ok


def test_a_wrong_view_that_is_not_the_last_is_caught():
    good = activations()
    view = good.latent[0]
    bad_view = LatentView("bad", view.q_nope, view.q_pe, view.kv_rows, view.w_uk, view.w_uv * 1.001)
    layer = LayerActivations(0, good.q, good.k, good.v, (bad_view, view), good.softmax_scale)
    assert not list(climb([layer]))[4].ok


def test_report_is_plain_data():
    report = next(climb([activations()]))
    data = to_json(report)
    assert data["rung"] == 1
    assert data["ok"] is True
    # Keys and values of 4 heads with 12 and 6 numbers in float64.
    assert data["kv_bytes_per_token_per_layer"] == 4 * (12 + 6) * 8


def test_no_layer_is_an_error():
    with pytest.raises(ValueError, match="layers"):
        next(climb([]))


def test_rung_12_rolls_back_what_is_rejected(monkeypatch):
    """With one row too many or too few kept, the text or the rows are others."""
    right = speculative_runs.verify

    def one_more(*args):
        said = right(*args)
        return said._replace(num_accepted=[count + 1 for count in said.num_accepted])

    monkeypatch.setattr(speculative_runs, "verify", one_more)
    with pytest.raises(ValueError, match="accepted"):
        list(climb([served_activations()]))

    def first_only(logits, drafts, *others):
        said = right(logits, drafts, *others)
        return said._replace(num_accepted=[0], token_ids=[said.token_ids[0][-1:]])

    monkeypatch.setattr(speculative_runs, "verify", first_only)
    reports = {r.rung.number: r for r in climb([served_activations()])}
    assert not reports[12].ok and reports[11].ok


class Wrong(TorchBackend):
    """Its decode or its extend gives the negative."""

    def __init__(self, kind):
        self.kind = kind

    def plan(self, *args, **kwargs):
        plan = super().plan(*args, **kwargs)
        ways = {"decode": plan.decode, "extend": plan.extend}
        ways[self.kind] = _flipped(ways[self.kind])
        return SimpleNamespace(num_splits=plan.num_splits, **ways)


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("number", [14, 15])
def test_a_wrong_kernel_is_named(monkeypatch, number, kind):
    kinds = {"triton": "", "cupy": ""} | {BACKENDS[number]: kind}
    monkeypatch.setattr(
        kernel_runs,
        "find_backend",
        lambda name: Wrong(kinds[name]) if kinds[name] else TorchBackend(),
    )
    reports = {r.rung.number: r for r in climb([served_activations(8, torch.float32)])}
    assert [n for n, report in reports.items() if not report.ok] == [number]


def test_what_a_machine_lacks_is_said_and_not_climbed(monkeypatch):
    def missing(name):
        raise ImportError(f"backend {name!r} cannot be used: there is no such package")

    monkeypatch.setattr(kernel_runs, "find_backend", missing)
    layer = served_activations(3, torch.float32)
    assert gaps(layer) == {
        14: "backend 'triton' cannot be used: there is no such package",
        15: "backend 'cupy' cannot be used: there is no such package",
    }
    assert len(list(climb([layer]))) == 13


def test_without_triton_the_ladder_says_how_to_install_it(monkeypatch):
    missing = ImportError("backend 'triton' cannot be used")
    missing.__cause__ = ModuleNotFoundError("No module named 'triton'", name="triton")

    def absent(name):
        raise missing

    monkeypatch.setattr("mla_ref.ladder.kernel_runs.find_backend", absent)
    layer = served_activations(3, torch.float32)
    assert kernel_gap(14, layer) == 'triton is not installed: pip install "mla-ref[triton]"'

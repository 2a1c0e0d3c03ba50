"""How a layer's activations run on rungs 14 and 15: the kernels of a backend, on a verifier batch.

On a CPU Triton runs in its interpreter and CUDA C++ in an emulation, lane by lane. Both take a
thousand times as long as the reference, so four rows of the text climb, those of one request with
three drafts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from mla_ref.backends import AttnSpec, find_backend
from mla_ref.cache import pack_fp8_rows
from mla_ref.indexer import positions_to_slots
from mla_ref.ladder.activations import LayerActivations
from mla_ref.ladder.run import PAGE_SIZE, Run, against, filled_pages, timed
from mla_ref.ladder.sparse_runs import SparseResult, absorbed_query, projected
from mla_ref.numerics import AttentionResult, compare
from mla_ref.platform.packages import install_command

# 1 + 3 drafts.
ROWS = 4
BACKENDS = {14: "triton", 15: "cupy"}


def kernel_gap(number: int, layer: LayerActivations) -> str:
    """Why the kernels of a rung cannot run here on this layer; empty if they can."""
    try:
        backend = find_backend(BACKENDS[number])
    except ImportError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return f"{cause.name} is not installed: {install_command(cause.name)}"
        return str(cause or error)
    spec = _spec(layer)
    if spec.q_dtype == torch.float64:
        return "the kernels take float32 and bfloat16"
    return backend.supports(spec, torch.device("cpu")) or ""


def on_kernels(number: int) -> Callable[[LayerActivations, SparseResult], Run]:
    """The runner of a rung."""

    def run(layer: LayerActivations, below: SparseResult) -> Run:
        view = layer.latent[-1]
        n = view.kv_rows.shape[0]
        new = min(ROWS, n)
        rows = (pack_fp8_rows(view.kv_rows),)
        step, (cache,) = filled_pages((n - new,), (new,), rows)
        text = step.positions
        lists = below.positions[text]
        slots = positions_to_slots(lists, step.request_of_row, step.block_table, PAGE_SIZE).int()
        q = absorbed_query(view, view.q_nope[text], view.q_pe[text])
        spec, scale, dtype = _spec(layer), layer.softmax_scale, view.q_nope.dtype
        backend = find_backend(BACKENDS[number])
        plan = backend.plan(spec, max_rows=new, max_requests=1, device=q.device)
        latent, seconds = timed(lambda: plan.decode(q, cache, slots, softmax_scale=scale))
        one_pass = plan.extend(q, cache, slots, softmax_scale=scale)
        expected = AttentionResult(below.result.out[text], below.result.lse[text])
        checks = against(projected(view, latent, dtype), expected)
        extend = against(projected(view, one_pass, dtype), expected)
        checks |= {f"extend, {name}": check for name, check in extend.items()}
        served = backend.plan(
            replace(spec, q_dtype=torch.bfloat16), max_rows=new, max_requests=1, device=q.device
        ).decode(q.bfloat16(), cache, slots, softmax_scale=scale)
        error = compare(projected(view, served, dtype).out, expected.out).rel_l2
        splits = getattr(plan, "num_splits", 1)
        pieces = "one piece" if splits == 1 else f"{splits} pieces"
        note = f"{new} rows, decode in {pieces} and extend; bfloat16 queries move it by {error:.1e}"
        return Run(below, checks, seconds, note)

    return run


def _spec(layer: LayerActivations) -> AttnSpec:
    view = layer.latent[-1]
    wide = torch.promote_types(view.q_nope.dtype, torch.float32)
    topk = layer.index.topk if layer.index else 1
    return AttnSpec(view.q_nope.shape[1], topk=topk, page_size=PAGE_SIZE, q_dtype=wide)

"""`mla-ref plan`: what a server's buffers hold, where a batch goes, why, and what it costs."""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_ref.cli.comma_numbers import comma_numbers
from mla_ref.cli.example import Example

if TYPE_CHECKING:
    from mla_ref.batching import ScratchPlan, ServerBatch, ServingLimits, SpecMode
    from mla_ref.cli.plan_report import Diagnosis

PANEL = "Serve"
EXAMPLES = (
    Example("plan --seqs 16 --mtp 3", "What the buffers hold in each mode, and all routes"),
    Example(
        "plan --query-lens 4,4,4 --prefilling 0,0,1", "Why a batch with one prefill is not decode"
    ),
    Example("plan --query-lens 4 --prefilling 0 --mode 0 --json", "One batch as a JSON object"),
)


def plan(
    query_lens: Annotated[
        str | None,
        typer.Option(help="A batch: new tokens of each request, with commas; 0 for padding."),
    ] = None,
    prefilling: Annotated[
        str | None,
        typer.Option(help="1 for each request that still runs its prompt, else 0; one for all."),
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(help="The batch from a JSON file with the names of vLLM's metadata."),
    ] = None,
    seqs: Annotated[int, typer.Option(help="max_num_seqs of the server.")] = 16,
    mtp: Annotated[
        int,
        typer.Option(
            "--mtp", "--num-speculative-tokens", help="Drafts a request, num_speculative_tokens."
        ),
    ] = 3,
    mode: Annotated[
        str | None,
        typer.Option(help="auto, 0 (never) or 1 (all that is short). Default: see above."),
    ] = None,
    max_q: Annotated[
        int | None,
        typer.Option(help="Most tokens a request in decode. Default: see above."),
    ] = None,
    max_batched_tokens: Annotated[
        int, typer.Option(help="max_num_batched_tokens of the server.")
    ] = 8192,
    topk: Annotated[int, typer.Option(help="Keys that a row attends to.")] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads on a GPU.")] = 8,
    backend: Annotated[str, typer.Option(help="Whose buffers are counted.")] = "torch",
    sms: Annotated[int, typer.Option(help="Multiprocessors of the GPU.")] = 188,
    answer_as: Annotated[
        str, typer.Option("--as", help="original: answer as the pull request's code does.")
    ] = "mla-ref",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where a batch goes, decode or extend, and the one change that would give decode.

    Without a batch: what the buffers hold in each of the three modes, and
    where each kind of batch goes.

    The mode is taken from MLA_REF_SPEC_EXTEND_AS_DECODE, else from
    VLLM_B12X_MLA_SPEC_EXTEND_AS_DECODE, else it is auto. max_q is taken from
    MLA_REF_SPEC_DECODE_MAX_Q or VLLM_B12X_MLA_SPEC_DECODE_MAX_Q, else it is 8.
    """
    from mla_ref.batching import ServingLimits, SpecMode, read_max_q, read_mode
    from mla_ref.checks import require_choice, require_count
    from mla_ref.cli import plan_report

    require_choice("--as", answer_as, ("mla-ref", "original"))
    require_count("--sms", sms, at_least=1)
    for name, value in (("--seqs", seqs), ("--max-batched-tokens", max_batched_tokens)):
        require_count(name, value, at_least=1)
    with warnings.catch_warnings(record=True) as slips:
        warnings.simplefilter("always")
        most = read_max_q(max_q)
    for slip in slips:
        typer.echo(f"mla-ref: warning: {slip.message}", err=True)
    limits = ServingLimits(seqs, max_batched_tokens, require_count("--mtp", mtp), most)
    chosen = read_mode(mode)
    batch = _batch(query_lens, prefilling, metadata)
    if batch is None:
        if answer_as == "original":
            raise ValueError("--as original needs a batch: give --query-lens or --metadata")
        plans = [_plan(backend, heads, topk, limits, m) for m in SpecMode]
        if as_json:
            typer.echo(json.dumps(plan_report.capacity_json(plans, backend), indent=2))
        else:
            plan_report.show_capacity(plans, backend, heads, topk)
        return
    found = _diagnosis(batch, _plan(backend, heads, topk, limits, chosen), backend, sms, answer_as)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        plan_report.show_diagnosis(found)


def _batch(
    query_lens: str | None, prefilling: str | None, metadata: Path | None
) -> "ServerBatch | None":
    """The batch that the user gave, in whichever way; None if none."""
    from mla_ref.batching import ServerBatch, read_metadata
    from mla_ref.checks import require_utf8

    if metadata is not None:
        if query_lens is not None or prefilling is not None:
            raise ValueError("--metadata holds a batch: leave out --query-lens and --prefilling")
        text = require_utf8(f"--metadata {metadata}", metadata.read_bytes())
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--metadata {metadata} is no JSON: {error}") from error
        return read_metadata(data)
    if query_lens is None:
        if prefilling is not None:
            raise ValueError("--prefilling needs --query-lens")
        return None
    lens = comma_numbers("--query-lens", query_lens, such_as="4,4,4", at_least=0)
    flags = None
    if prefilling is not None:
        flags = comma_numbers("--prefilling", prefilling, such_as="0,0,1", at_least=0)
        flags *= len(lens) if len(flags) == 1 else 1
        if len(flags) != len(lens) or any(f > 1 for f in flags):
            raise ValueError(
                f"--prefilling must be one 0 or 1, or one for each of {len(lens)} requests, got "
                f"{prefilling!r}"
            )
    return ServerBatch(tuple(lens), None if flags is None else tuple(map(bool, flags)), sum(lens))


def _plan(
    backend: str, heads: int, topk: int, limits: "ServingLimits", mode: "SpecMode"
) -> "ScratchPlan":
    """The backend's plans: counted without memory where it can do that, else allocated."""
    import torch

    from mla_ref.backends import AttnSpec, find_backend
    from mla_ref.batching import plan_scratch
    from mla_ref.platform import resolve_device

    spec, found = AttnSpec(num_heads=heads, topk=topk), find_backend(backend)
    device = torch.device("meta")
    if found.supports(spec, device) is not None:
        device = resolve_device("auto")
    return plan_scratch(found, spec, limits, mode, device=device)


def _diagnosis(
    batch: "ServerBatch", plans: "ScratchPlan", backend: str, sms: int, answer_as: str
) -> "Diagnosis":
    from mla_ref.batching import kernel_cost, original_route, route, route_per_request
    from mla_ref.cli.plan_report import Diagnosis

    facts, spec = batch.facts, plans.spec
    original, splits = None, None
    if answer_as == "original":
        original = original_route(
            batch.query_lens, batch.is_prefilling, batch.num_tokens_padded, plans, plans.mode
        )
        splits = -(-spec.topk // 64)  # it pins one split for each tile of 64 keys
    visible = batch.visible_lens(unknown=spec.topk)
    rows = facts.num_tokens_padded
    return Diagnosis(
        batch=batch,
        plan=plans,
        backend=backend,
        route=route(facts, plans),
        per_request=route_per_request(facts, plans),
        original=original,
        costs=(
            kernel_cost("extend", visible, spec, num_rows_padded=rows, multiprocessors=sms),
            kernel_cost(
                "decode",
                visible,
                spec,
                num_rows_padded=rows,
                multiprocessors=sms,
                num_splits=splits,
            ),
        ),
    )

"""What `mla-ref generate` reports beside the text: figures in a few lines, or all of it as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from mla_ref.cli.generate_result import Run, Writing
from mla_ref.engine import first_difference
from mla_ref.speculative import AcceptanceStats


class Comparison(NamedTuple):
    """The same prompts with drafts and without, in one process.

    Attributes:
        drafted: With drafts.
        plain: Without.
        greedy: Whether each token is the most likely one, so that both write the same if no
            rounding comes between.
        cache_dtype: What the cache stores.
    """

    drafted: Run
    plain: Run
    greedy: bool
    cache_dtype: str

    @property
    def steps_saved(self) -> int:
        """Steps of the model that drafts have made unnecessary."""
        return self.plain.num_steps - self.drafted.num_steps

    @property
    def speedup(self) -> float:
        """Time of all steps without drafts over that with drafts."""
        return self.plain.seconds / self.drafted.seconds

    @property
    def first_difference(self) -> tuple[str, int] | None:
        """Name of the first prompt whose tokens differ, and the place; None if all are equal."""
        for a, b in zip(self.drafted.writings, self.plain.writings, strict=True):
            place = first_difference(a.transcript.token_ids, b.transcript.token_ids)
            if place is not None:
                return a.request.request_id, place
        return None

    @property
    def line(self) -> str:
        """In one line: steps, acceptance, time, and whether the tokens are the same."""
        drafted, plain = self.drafted, self.plain
        return (
            f"{drafted.num_steps} steps instead of {plain.num_steps} ({self.steps_saved} saved), "
            f"{_length(drafted.acceptance)}; {drafted.seconds:.2f} s instead of "
            f"{plain.seconds:.2f} s for plain decoding, {self.speedup:.2f} times as fast; "
            f"{self._tokens()}"
        )

    def _tokens(self) -> str:
        found = self.first_difference
        if found is None:
            return "the same tokens"
        if not self.greedy:
            return "other tokens, as they may be: their law is the same"
        name, place = found
        where = f"OTHER TOKENS from number {place} of {name} on"
        if self.cache_dtype == "float32":
            return f"{where}: two logits so close that rounding swaps them, or a bug"
        # Rows that run in another company differ in the last digit, which is nothing, unless it
        # decides how a number is rounded to 8 bits; and each layer passes the difference on.
        return (
            f"{where}: the {self.cache_dtype} cache rounds a last digit to a whole step. See "
            "--cache-dtype float32"
        )


def lines(run: Run, model: Mapping[str, Any]) -> list[str]:
    """The figures of a run, for a reader."""
    decode = f", decode {run.decode_rate:.1f} tokens/s" if run.decode_rate else ""
    sparse = model["topk"] and f"top-{model['topk']}"
    name = " ".join(filter(None, (model["attention"], model["form"], sparse)))
    reasons = [writing.transcript.finish_reason for writing in run.writings]
    ends = ", ".join(
        str(reason) if len(reasons) == 1 else f"{reasons.count(reason)} {reason}"
        for reason in dict.fromkeys(reasons)
    )
    found = [
        f"{run.new_tokens} tokens ({ends}), prefill {run.prefill_rate or 0:.0f} tokens/s{decode}, "
        f"KV cache {model['kv_bytes_per_token']:,} bytes a token ({name}, {model['cache_dtype']})"
    ]
    if where := _where(run, model):
        found.append(where)
    if run.step_parts:
        total = sum(run.step_parts.values())
        parts = sorted(run.step_parts.items(), key=lambda part: -part[1])
        words = ", ".join(f"{part} {1e3 * s:.1f}" for part, s in parts if s >= 5e-5)
        found.append(f"a decode step: {1e3 * total:.1f} ms ({words})")
    if run.acceptance.num_drafts:
        rates = " ".join(f"{rate:.0%}" for rate in run.acceptance.per_position_rates)
        found.append(
            f"drafts ({model['drafter']}, up to {model['num_speculative_tokens']} a step): "
            f"{_length(run.acceptance)}, accepted by position {rates}"
        )
    elif model["drafter"]:
        found.append(f"drafts ({model['drafter']}): none was proposed")
    if run.routes:
        ways = ", ".join(
            f"{route} {count} ({reason})"
            for route, counts in run.routes.items()
            for reason, count in counts.items()
        )
        found.append(f"routes, in steps: {ways}")
    return found


def _where(run: Run, model: Mapping[str, Any]) -> str | None:
    """Device, kernels and graphs; nothing where torch alone runs in float32 on the CPU."""
    words = []
    if model["device_name"] or model["dtype"] != "fp32":
        name = f" ({model['device_name']})" if model["device_name"] else ""
        words.append(f"on {model['device']}{name} in {model['dtype']}")
    if model["backend"] not in (None, "torch"):
        kernels = model["kernels"].items()
        ours = [step for step, who in kernels if who == model["backend"]]
        words.append(f"{model['backend']} kernels for {', '.join(ours)}")
    if model["graphs"]:
        words.append(
            f"{run.num_replayed} of {run.num_steps} steps replayed from {run.num_graphs} graphs"
        )
    return "; ".join(words) or None


def to_json(run: Run, model: Mapping[str, Any], comparison: Comparison | None) -> dict[str, Any]:
    """All as plain data; keys are added in later versions, never renamed."""
    data = {
        **model,
        "prompts": [_writing_json(writing) for writing in run.writings],
        **_run_json(run),
        "comparison": None,
    }
    if comparison is not None:
        found = comparison.first_difference
        data["comparison"] = {
            "plain": _run_json(comparison.plain),
            "steps_saved": comparison.steps_saved,
            "speedup": comparison.speedup,
            "same_tokens": found is None,
            "first_difference": found and {"name": found[0], "token": found[1]},
        }
    return data


def _writing_json(writing: Writing) -> dict[str, Any]:
    request, transcript = writing.request, writing.transcript
    return {
        "name": request.request_id,
        "prompt": writing.prompt.text,
        "chat": writing.prompt.chat,
        "text": transcript.text,
        "token_ids": transcript.token_ids,
        "prompt_tokens": len(request.prompt_ids),
        "new_tokens": len(transcript.token_ids),
        "finish_reason": transcript.finish_reason,
        "sampling": asdict(request.sampling),
        "steps": [
            {"drafts": step.drafts, "num_accepted": step.num_accepted, "new_tokens": step.token_ids}
            for step in writing.outputs
            if step.token_ids
        ],
    }


def _run_json(run: Run) -> dict[str, Any]:
    stats = run.acceptance
    acceptance = {
        "drafts": stats.num_drafts,
        "drafted_tokens": stats.num_drafted,
        "accepted_tokens": stats.num_accepted,
        "mean_acceptance_length": _number(stats.mean_acceptance_length),
        "per_position_rates": stats.per_position_rates,
        "histogram": stats.histogram,
    }
    return {
        "new_tokens": run.new_tokens,
        "steps": run.num_steps,
        "replayed_steps": run.num_replayed,
        "recorded_graphs": run.num_graphs,
        "seconds": run.seconds,
        "prefill_tokens_per_second": run.prefill_rate,
        "decode_tokens_per_second": run.decode_rate,
        "seconds_of_a_decode_step": run.step_parts,
        "routes": run.routes,
        "acceptance": acceptance,
    }


def _length(stats: AcceptanceStats) -> str:
    return f"mean acceptance length {stats.mean_acceptance_length:.2f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value

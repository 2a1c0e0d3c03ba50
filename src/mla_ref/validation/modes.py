"""Greedy texts of the sparse model by every mode of the router, against plain decoding.

Modes say which kernel a verifier batch goes to: "0" to extend, "auto" and "1" to decode. All must
write what decoding without drafts writes, token by token, or a near tie must explain the first
difference. That is worth nothing if all modes took the same kernel, so each step's route is
counted, and a mode whose verifier steps went elsewhere makes the comparison prove nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_ref.checks import require_count
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import Drafter
from mla_ref.validation.modes_acceptance import Acceptance
from mla_ref.validation.modes_texts import Departure, Texts, departures, write_texts
from mla_ref.validation.verdict import FAILS, HOLDS, PROVES_NOTHING

PLAIN = "plain"
# Where each mode must send every step that has drafts.
EXPECTED = {"auto": "decode", "0": "extend", "1": "decode"}


@dataclass(frozen=True)
class ModesFinding:
    """What the modes have written.

    Attributes:
        plain: Without drafts.
        modes: With drafts, one for each of `EXPECTED`.
        departures: Where a mode's text is another one.
    """

    plain: Texts
    modes: tuple[Texts, ...]
    departures: tuple[Departure, ...]

    @property
    def acceptance(self) -> tuple[Acceptance, ...]:
        """Of each mode."""
        return tuple(Acceptance.of(f"mode {m.name}", m.acceptance) for m in self.modes)

    @property
    def misrouted(self) -> tuple[str, ...]:
        """Modes with no verifier step, or with one that went to another kernel than it must."""
        return tuple(mode.name for mode in self.modes if set(mode.routes) != {EXPECTED[mode.name]})

    @property
    def status(self) -> str:
        """Whether the texts are the same: a difference needs no proof of routes to be believed."""
        if not all(departure.tie for departure in self.departures):
            return FAILS
        return PROVES_NOTHING if self.misrouted else HOLDS

    @property
    def headline(self) -> str:
        """What was compared, and whether it holds."""
        count = sum(map(len, self.plain.token_ids.values()))
        what = (
            f"{count} greedy tokens of {len(self.plain.token_ids)} prompts by modes "
            f"{', '.join(mode.name for mode in self.modes)} against plain decoding"
        )
        if self.status == PROVES_NOTHING:
            return (
                f"Proves nothing: {what}. Verifier steps of mode {', '.join(self.misrouted)} did "
                "not go where the mode sends them."
            )
        if self.status == FAILS:
            wrong = sum(not departure.tie for departure in self.departures)
            return f"NOT the same: {what}. No tie explains {_differences(wrong)}."
        if self.departures:
            ties = _differences(len(self.departures))
            return f"The same but for ties: {what}. Near ties explain {ties}."
        return f"The same tokens: {what}."

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "headline": self.headline,
            "status": self.status,
            "expected_routes": EXPECTED,
            "plain": self.plain.to_json(),
            "modes": [mode.to_json() for mode in self.modes],
            "acceptance": [found.to_json() for found in self.acceptance],
            "departures": [departure.to_json() for departure in self.departures],
        }


def compare_modes(
    model: LanguageModel,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[int]],
    *,
    num_drafts: int = 3,
    tokens: int = 24,
    cache_dtype: torch.dtype | None = None,
    on_way: Callable[[str], None] | None = None,
) -> ModesFinding:
    """Write every text plainly and in each mode, and weigh the differences.

    Args:
        model: A model with two kernels, as `SparseSmolLM2`.
        drafter: Who proposes.
        prompts: Tokens by name.
        num_drafts: Drafts a step, 1 at least.
        tokens: Tokens to write for each prompt.
        cache_dtype: What the cache stores; None: the model's choice.
        on_way: Called with the name of each way before it runs.

    Raises:
        ValueError: A number is below 1, or there is no prompt.
    """
    require_count("num_drafts", num_drafts, at_least=1)

    def texts(name: str, **drafts: Any) -> Texts:
        if on_way:
            on_way(name)
        return write_texts(name, model, prompts, tokens=tokens, cache_dtype=cache_dtype, **drafts)

    plain = texts(PLAIN)
    modes = tuple(
        texts(mode, drafter=drafter, num_drafts=num_drafts, mode=mode) for mode in EXPECTED
    )
    found = [d for mode in modes for d in departures(model, prompts, plain, mode)]
    return ModesFinding(plain, modes, tuple(found))


def _differences(count: int) -> str:
    return "a difference" if count == 1 else f"{count} differences"

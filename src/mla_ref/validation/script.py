"""Verifier batches from real decoding, written down once, to be replayed in every configuration.

The engine decodes greedily with drafts, on the attention as the model was trained with, which is
the cheapest. What it ran is kept: prompts, and for each step the rows that the verifier got. A
replay feeds these tokens whatever its own logits say ("teacher forcing"). So all configurations see
the same tokens at the same positions, and rows differ by the arithmetic alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.engine import Engine, Request
from mla_ref.models.language_model import LanguageModel
from mla_ref.speculative import Drafter

PAGE_SIZE = 64
# New tokens of a step at most: a prompt of more runs in chunks.
MAX_TOKENS = 256


@dataclass(frozen=True)
class ScriptStep:
    """One request's rows of one step.

    Attributes:
        computed_len: Tokens whose rows the cache holds.
        token_ids: The new tokens: the last accepted one and the drafts behind it.
        num_accepted: How many of the drafts were accepted.
    """

    computed_len: int
    token_ids: tuple[int, ...]
    num_accepted: int


@dataclass(frozen=True)
class Script:
    """One request, from its prompt to its last step.

    Attributes:
        name: Of the prompt.
        prompt_ids: Its tokens.
        num_drafts: Drafts a step, n. Only steps with all 1 + n rows are measured.
        steps: In order. Each begins behind what the one before has accepted.
    """

    name: str
    prompt_ids: tuple[int, ...]
    num_drafts: int
    steps: tuple[ScriptStep, ...]

    def is_full(self, number: int) -> bool:
        """Whether step `number` has all 1 + n rows."""
        return len(self.steps[number].token_ids) == 1 + self.num_drafts

    @property
    def num_rows(self) -> int:
        """Rows of the full steps."""
        return sum(map(self.is_full, range(len(self.steps)))) * (1 + self.num_drafts)

    @property
    def longest(self) -> int:
        """Tokens that the cache ever holds, drafts included."""
        return max(
            (step.computed_len + len(step.token_ids) for step in self.steps),
            default=len(self.prompt_ids),
        )


def write_scripts(
    model: LanguageModel,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[int]],
    *,
    num_drafts: int,
    rows: int,
) -> list[Script]:
    """Decode every prompt with drafts until there are enough full steps.

    A token that would end the text does not end it here: rows are wanted. The same arguments give
    the same scripts.

    Args:
        model: Decodes.
        drafter: Proposes.
        prompts: Tokens by name.
        num_drafts: Drafts a step, n.
        rows: Rows of full steps that all scripts together have at least; fewer only where the
            drafter proposes fewer than n.

    Raises:
        ValueError: There is no prompt, a number is below 1, or a prompt is too long for the model.
    """
    if not prompts:
        raise ValueError("prompts must hold a prompt at least, got none")
    require_count("num_drafts", num_drafts, at_least=1)
    require_count("rows", rows, at_least=1)
    # As many steps for each prompt, and one more for the first few.
    each, more = divmod(-(-rows // (1 + num_drafts)), len(prompts))
    wanted = {name: each + (i < more) for i, name in enumerate(prompts)}
    return [
        _script(model, drafter, name, tuple(ids), num_drafts, wanted[name])
        for name, ids in prompts.items()
        if wanted[name]
    ]


def _script(
    model: LanguageModel,
    drafter: Drafter,
    name: str,
    prompt_ids: tuple[int, ...],
    num_drafts: int,
    full_steps: int,
) -> Script:
    """Decode one prompt alone, by an engine of its own."""
    # A step gives 1 + n tokens at most and may only draft what is still to be written.
    new = 1 + full_steps * (1 + num_drafts)
    engine = Engine(
        model,
        drafter=drafter,
        num_drafts=num_drafts,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_TOKENS,
        num_pages=pages_needed(len(prompt_ids) + new, PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    steps: list[ScriptStep] = []
    computed, newest, full = len(prompt_ids), -1, 0
    for output in engine.stream([Request(name, prompt_ids, new)]):
        if output.num_prefilled:
            newest = output.token_ids[-1] if output.token_ids else newest
            continue
        steps.append(ScriptStep(computed, (newest, *output.drafts), output.num_accepted))
        computed += 1 + output.num_accepted
        newest = output.token_ids[-1]
        full += len(output.drafts) == num_drafts
        if full == full_steps:
            break
    return Script(name, prompt_ids, num_drafts, tuple(steps))

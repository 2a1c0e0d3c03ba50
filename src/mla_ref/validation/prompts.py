"""The prompts that a validation replays where no file is named: from what this package holds.

Where every row may see no more than top-k keys, sparse attention is dense attention. So before each
of the five beginnings of code stands a stretch of "Emma" as long as top-k: every row then has to
leave keys out. With more prompts than five, stretches of "Emma" alone follow, which the model
writes on as prose.
"""

from collections.abc import Mapping
from itertools import islice

from mla_ref.bench.speculative_prompts import PROMPTS
from mla_ref.models.passage import passage
from mla_ref.models.tokenizer import Tokenizer

# Tokens of a stretch before code, and of one alone; the second is as long as the first with code.
BEFORE_CODE, ALONE = 256, 312
# Tokens from where one stretch begins to the next: ten of them end before the passage does.
APART = 125
NUM_PROMPTS = 10


def package_prompts(tokenizer: Tokenizer, count: int = len(PROMPTS)) -> Mapping[str, list[int]]:
    """Up to ten prompts of 290 to 340 tokens, the same ones every time.

    Args:
        tokenizer: SmolLM2's.
        count: How many.
    """
    text = tokenizer.encode(passage())
    prompts = {
        f"emma, then {name}": text[i * APART :][:BEFORE_CODE] + tokenizer.encode("\n\n" + code)
        for i, (name, code) in enumerate(PROMPTS.items())
    }
    for i in range(len(PROMPTS), NUM_PROMPTS):
        prompts[f"emma from token {i * APART}"] = text[i * APART :][:ALONE]
    return dict(islice(prompts.items(), count))

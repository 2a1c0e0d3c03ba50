"""Scripts: what real decoding with drafts ran, written down so that it can be run again."""

import pytest
from tests.engine.serving import KnowingDrafter, plain_tokens, prompt, small_model

from mla_ref.speculative import NgramDrafter
from mla_ref.validation import Script, write_scripts

pytestmark = pytest.mark.thorough

PROMPTS = {"eight": prompt(3), "two": prompt(4)}
WRITTEN = 16


def scripts(rows: int = 12, num_drafts: int = 2, **kwargs: object) -> list[Script]:
    texts = [(*ids, *plain_tokens("gqa", ids, WRITTEN)) for ids in PROMPTS.values()]
    drafter = KnowingDrafter(texts, **kwargs)  # type: ignore[arg-type]
    model = small_model("gqa")
    return write_scripts(model, drafter, PROMPTS, num_drafts=num_drafts, rows=rows)


def test_steps_are_those_of_the_engine() -> None:
    """Calls propose 2, 1 or 0 right drafts in turn: so many are accepted, and one token more."""
    eight, two = scripts(script=[2, 1, 0])
    assert (eight.name, eight.prompt_ids) == ("eight", prompt(3))
    assert [len(eight.steps), len(two.steps)] == [2, 2] and eight.num_rows == two.num_rows == 6
    for found in (eight, two):
        text = (*found.prompt_ids, *plain_tokens("gqa", found.prompt_ids, WRITTEN))
        computed = len(found.prompt_ids)
        for number, step in enumerate(found.steps):
            assert found.is_full(number) and step.computed_len == computed
            # The accepted part of a step is what plain decoding writes, the rest is not.
            kept = 1 + step.num_accepted
            assert step.token_ids[:kept] == text[computed : computed + kept]
            assert kept == 3 or step.token_ids[kept] != text[computed + kept]
            computed += kept
    assert [step.num_accepted for step in eight.steps] == [2, 1]
    assert eight.longest == len(eight.prompt_ids) + 3 + 3


@pytest.mark.parametrize(("rows", "steps"), [(1, [1]), (3, [1]), (4, [1, 1]), (9, [2, 1])])
def test_there_are_as_many_rows_as_asked_for_and_no_step_more(rows: int, steps: list[int]) -> None:
    found = scripts(rows)
    assert [len(script.steps) for script in found] == steps
    assert sum(script.num_rows for script in found) >= rows


def test_the_same_script_twice() -> None:
    assert scripts(wrong=0.5) == scripts(wrong=0.5)


def test_a_drafter_of_few_tokens_gives_what_it_can() -> None:
    """Prompt look-up finds nothing in a text that does not repeat itself: no step is full."""
    ids = {"new": tuple(range(20))}
    (found,) = write_scripts(small_model("gqa"), NgramDrafter(3), ids, num_drafts=3, rows=4)
    full = [step for step in found.steps if len(step.token_ids) == 4]
    assert found.num_rows == 4 * len(full)
    assert all(step.token_ids for step in found.steps)


def test_bad_input_is_refused() -> None:
    model, drafter = small_model("gqa"), NgramDrafter(3)
    for changed, says in (
        ({"prompts": {}}, "prompts must hold a prompt"),
        ({"num_drafts": 0}, "num_drafts must be at least 1"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"prompts": {"long": [1] * 64}}, "must fit into the model's context"),
    ):
        arguments = {"prompts": PROMPTS, "num_drafts": 3, "rows": 4} | changed
        with pytest.raises(ValueError, match=says):
            write_scripts(model, drafter, **arguments)  # type: ignore[arg-type]


@pytest.mark.model
def test_the_packages_prompts_are_longer_than_a_list() -> None:
    from mla_ref.models.tokenizer import Tokenizer
    from mla_ref.validation import package_prompts
    from mla_ref.validation.configuration import TOPK

    tokenizer = Tokenizer.from_gguf()
    found = package_prompts(tokenizer, 10)
    assert len(found) == 10 and len(package_prompts(tokenizer)) == 5
    assert all(TOPK < len(ids) < 350 for ids in found.values())
    assert len({tuple(ids) for ids in found.values()}) == 10

"""What the README shows is what there is."""

import re
from pathlib import Path
from typing import Any

import pytest

from mla_ref.cli.app import VERBS
from mla_ref.engine import Engine
from mla_ref.ladder import RUNGS
from mla_ref.testing import Mismatch, find_case

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_runs_and_the_two_forms_agree() -> None:
    example, _, _, _ = blocks("python")
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    found = names["compare"](names["absorbed"].out, names["expanded"].out)
    assert found.agrees(rel_l2=1e-5), found


def test_the_kernel_to_check_passes_and_says_what_is_wrong_without_its_guard() -> None:
    _, _, kernel, _ = blocks("python")
    assert len([line for line in kernel.splitlines() if line]) <= 20
    names: dict[str, Any] = {}
    exec(compile(kernel, "README.md", "exec"), names)
    for name in ("plain", "none-strewn", "row-empty-sink", "counts-nan-behind", "poison-nan"):
        find_case(f"decode/{name}").check(names["adapter"])
    guard = "    kv = torch.where(valid[..., None], kv, 0)\n"
    assert guard in kernel
    exec(compile(kernel.replace(guard, ""), "README.md", "exec"), names)
    with pytest.raises(Mismatch) as caught:
        find_case("decode/poison-nan").check(names["adapter"])
    assert f"FAILED: {caught.value}" in "\n".join(blocks("text"))


@pytest.mark.model
def test_the_engine_of_the_example_writes_what_plain_decoding_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, example, _, _ = blocks("python")
    assert "max_new_tokens=24" in example
    names: dict[str, Any] = {}
    exec(compile(example.replace("tokens=24", "tokens=8"), "README.md", "exec"), names)
    shown, decode = capsys.readouterr().out, names["tokenizer"].decode
    plain = Engine(names["model"], num_pages=16).run(names["requests"])
    texts = [state.request.request_id + decode(state.output_ids) for state in plain]
    found = re.fullmatch(
        re.escape("\n".join(texts)) + r"\n(\d+) steps, (.*) tokens a draft\n", shown
    )
    assert found, shown
    assert int(found[1]) < 8
    assert float(found[2]) > 1.5


def test_every_command_shown_is_a_verb() -> None:
    shown = re.findall(r"mla-ref (\w+)", "\n".join(blocks("sh")))
    assert shown
    assert set(shown) <= set(VERBS)


def test_the_table_is_that_of_the_ladder() -> None:
    rows = re.findall(r"^\| (\d+ [^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == [f"{rung.number} {rung.name}" for rung in RUNGS]
    assert [row[2] for row in rows] == [rung.checked_against for rung in RUNGS]


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"\b(?:SETUP|RUN)-[A-Z]+\b|LADDER-OUTPUT|TODO", README) == []

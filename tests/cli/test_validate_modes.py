"""`mla-ref validate modes` and `recipe` without the real model: prompts, devices, exit codes."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tests.cli.verbs import run_verb, words

import mla_ref.validation as validation
from mla_ref.cli import validate_modes, validate_recipe, validate_rows
from mla_ref.cli.validate import validate
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.speculative import AcceptanceStats
from mla_ref.validation import modes, ranks, recipe
from mla_ref.validation.modes import EXPECTED, ModesFinding
from mla_ref.validation.modes_acceptance import Acceptance
from mla_ref.validation.modes_texts import Texts
from mla_ref.validation.ranks import RankJob, RanksFinding
from mla_ref.validation.recipe import RECIPES, RecipeRow

pytestmark = pytest.mark.thorough


run = partial(run_verb, validate)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every part that needs the model gives a finding that holds; what it was asked is kept."""
    seen: dict[str, Any] = {"held": SimpleNamespace(passed=True)}

    def texts(name: str, **kinds: int) -> Texts:
        return Texts(name, {"p": (1, 2)}, AcceptanceStats(), kinds, 1)

    def by_modes(model: Any, drafter: Any, prompts: Mapping[str, Any], **kwargs: Any) -> Any:
        seen["modes"] = list(prompts)
        ways = tuple(texts(mode, **{kind: 1}) for mode, kind in EXPECTED.items())
        return ModesFinding(texts("plain"), ways, ())

    def by_ranks(job: RankJob, **kwargs: Any) -> RanksFinding:
        seen["ranks"], seen["worlds"] = list(job.prompts), job.worlds
        worlds = {world: texts(f"DCP {world}", decode=1) for world in job.worlds}
        return RanksFinding(texts("one process"), worlds, (), ())

    def by_recipes(dense: Any, drafter: Any, text: Any, prompts: Any, **kwargs: Any) -> Any:
        seen["recipe"] = list(prompts)
        return [RecipeRow(r, 2.0, 0.1, 1.0, 9, Acceptance("a", 2, 6, 3)) for r in RECIPES]

    def verifier_rows(dense: Any, drafter: Any, prompts: Any, drafts: int, rows: int) -> Any:
        seen["verifier rows"] = list(prompts)
        return SimpleNamespace(verdict=seen["held"], headline="Held.", to_json=dict)

    monkeypatch.setattr(Tokenizer, "from_gguf", lambda: SimpleNamespace(encode=lambda text: [1, 2]))
    monkeypatch.setattr(SmolLM2, "from_gguf", lambda **kwargs: None)
    monkeypatch.setattr("mla_ref.engine.new_drafter", lambda *args: None)
    monkeypatch.setattr(validate_modes, "load", lambda *args: (None, None))
    monkeypatch.setattr(
        validation, "package_prompts", lambda _, count: {f"own {i}": [1, 2] for i in range(count)}
    )
    monkeypatch.setattr(modes, "compare_modes", by_modes)
    monkeypatch.setattr(ranks, "compare_ranks", by_ranks)
    monkeypatch.setattr(recipe, "measure_recipes", by_recipes)
    monkeypatch.setattr(validate_recipe, "_verifier_rows", verifier_rows)
    return seen


# ---- which prompts


def test_of_the_package_s_prompts_few_run(asked: Any, tmp_path: Path) -> None:
    for what in ("modes", "recipe"):
        assert run(what).exit_code == 0
    own = [f"own {i}" for i in range(8)]
    for part in ("modes", "ranks", "recipe", "verifier rows"):
        assert asked[part] == own[:2], part
    for what in ("modes", "recipe"):
        assert run(what, "--full", "--out", str(tmp_path)).exit_code == 0
    assert (asked["modes"], asked["ranks"]) == (own[:5], own[:2])
    assert asked["recipe"] == asked["verifier rows"] == own[:4]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("what", ["modes", "recipe"])
def test_prompts_that_a_user_names_all_run(
    asked: Any, tmp_path: Path, what: str, full: bool
) -> None:
    """With --prompts, with --limit, and with both; a limit goes by the package's prompts too."""
    parts = {"modes": ("modes", "ranks"), "recipe": ("recipe", "verifier rows")}[what]
    path = tmp_path / "many.txt"
    path.write_text("\n---\n".join("abcdefghi"))
    more = ("--full", "--out", str(tmp_path)) if full else ()
    for given, count in (
        (("--prompts", str(path)), 9),
        (("--prompts", str(path), "--limit", "7"), 7),
        (("--limit", "3"), 3),
        (("--limit", "1"), 1),
    ):
        result = run(what, *given, *more)
        assert result.exit_code == 0, result.output
        assert [len(asked[part]) for part in parts] == [count, count]


def test_recipe_says_how_many_prompts(asked: Any) -> None:
    assert "2 of 6 drafted tokens accepted for 2 of 6 on 2 prompts. Held." in words(
        run("recipe").stdout
    )
    assert "accepted for 2 of 6 on 1 prompt. Held." in words(run("recipe", "--limit", "1").stdout)
    read = json.loads(run("recipe", "--limit", "3", "--json").stdout)
    assert read["prompts"] == 3 and "on 3 prompts." in read["what"]


def test_the_help_tells_the_defaults_that_are_taken() -> None:
    """Of the numbers in the help, each is a constant's."""
    app = typer.Typer()
    app.command()(validate)
    command = typer.main.get_command(app)
    told = {option.name: words(getattr(option, "help", None) or "") for option in command.params}
    axes = sum(validation.FULL_ROWS[axis.dtype] for axis in validation.full_axes())
    assert (
        f"Default: {validate_rows.ROWS}, with --full {axes} in all; for recipe "
        f"{validate_recipe.ROWS}, with --full {validate_recipe.FULL_ROWS}."
    ) in told["rows"]
    assert (
        f"modes takes the first {validate_modes.PROMPTS}, with --full "
        f"{validate_modes.FULL_PROMPTS} (ranks {validate_modes.PROMPTS}), and recipe "
        f"{validate_recipe.PROMPTS}, with --full {validate_recipe.FULL_PROMPTS}."
    ) in told["prompts"]
    assert validation.configuration.TOPK == validate_modes.FULL_TOPK
    assert (
        f"not to {validate_modes.FULL_TOPK} chosen ones (modes without --full and ranks: "
        f"{validate_modes.SHORT_TOPK})"
    ) in told["dense"]


# ---- which device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As many GPUs as the command sees; nothing runs on one."""
    device = SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(validate_modes, "resolve_device", lambda name: device)
    monkeypatch.setattr(validate_modes, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(validate_modes, "count_gpus", lambda: count)


def test_one_gpu_shares_no_cache_and_is_exit_code_1(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 1)
    result = run("modes", "--device", "cuda")
    assert asked["worlds"] == (1,)
    assert result.exit_code == 1
    shown = words(result.stdout)
    assert "Proves nothing: 2 greedy tokens on 1 ranks (DCP)" in shown
    assert "No cache was shared" in shown
    assert json.loads(run("modes", "--device", "cuda", "--json").stdout)["passed"] is False
    with_gpus(monkeypatch, 2)
    result = run("modes", "--device", "cuda")
    assert asked["worlds"] == (1, 2) and result.exit_code == 0, result.output


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_single_gpu_is_refused_for_ranks_which_take_their_own(
    asked: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with_gpus(monkeypatch, 2)
    result = run("modes", "--device", device)
    assert isinstance(result.exception, ValueError), result.output
    assert f"--device must name no single GPU for modes, got '{device}'" in str(result.exception)
    assert "rank r takes the r-th GPU" in str(result.exception)
    assert "CUDA_VISIBLE_DEVICES" in str(result.exception)
    assert "modes" not in asked
